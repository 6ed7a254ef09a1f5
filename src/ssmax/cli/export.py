"""`ssmax export`: a run or a converted model in, a form that others run out."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmax.errors import UsageError
from ssmax.hf.sources import check_source
from ssmax.lm.config import CONFIG, FORMAT
from ssmax.serve.forms import check_choice
from ssmax.train.watch import LiveLine

if TYPE_CHECKING:
    from ssmax.serve.exporting import Exported

PEFT = "adapter_config.json"
"""What PEFT writes beside the weights of an adapter."""

# A head start for what is not one token a character.
_CHARACTERS_PER_TOKEN = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model and what its tokens mean."""

    model: Any
    encode: Callable[[str], list[int]] | None
    """None where no tokenizer came with the model."""
    tokenizer: str | None
    """The content of its tokenizer.json."""


def export_shown(
    source: Path,
    out: Path,
    *,
    to: str,
    weights: str,
    fit: bool,
    check_tokens: int,
    text: Path | None,
    as_json: bool,
) -> None:
    """Load, write, check on text; say how well it agrees."""
    if check_tokens < 2:
        raise UsageError(f"--check-tokens must be at least 2, got {check_tokens}")
    check_choice(out, to, weights, fit)
    if text is not None and not text.is_file():
        raise UsageError(f"there is no file {text}")
    read_config(source)
    from ssmax.lm import LM
    from ssmax.serve.exporting import export

    found = load_source(source, keeps_dtype=to in ("hf", "ministral"))
    prompt = _prompt(found, text, check_tokens)
    # What is shown on the way must not mix with the result.
    line = LiveLine(is_shown=not as_json)

    def show(done: int, total: int) -> None:
        line.show(f"checking {to}: {done:,} of {total:,} tokens", is_last=done == total)

    line.say(f"writing {to}")
    done = export(
        found.model,
        out,
        to=to,
        weights=weights,
        fit=fit,
        prompt=prompt,
        tokenizer=found.tokenizer,
        progress=show,
    )
    line.close()
    if to in ("hf", "ministral") and not isinstance(found.model, LM):
        # Beside its tokenizer.json, what Transformers keeps: special tokens, the chat's template.
        from ssmax.hf.inputs import copy_inputs

        copy_inputs(source, out, found.model.config)
    if as_json:
        about = dataclasses.asdict(done.agreement)
        print(json.dumps({"out": str(out), "to": to, "weights": weights, "how": done.how, **about}))
    else:
        print(_told(done, is_text=found.encode is not None))


def load_source(folder: Path, *, keeps_dtype: bool) -> Source:
    """The model of a run, of `save_lm`, or of `save_pretrained` after a conversion."""
    values = read_config(folder)
    if values.get("format") == FORMAT:
        from ssmax.lm import load_lm

        return Source(model=load_lm(folder), encode=None, tokenizer=None)
    if "model_type" in values:
        return _converted(folder, keeps_dtype)
    from ssmax.train import load_run_model, load_run_tokenizer

    tokenizer = load_run_tokenizer(folder)
    return Source(
        model=load_run_model(folder), encode=tokenizer.encode, tokenizer=tokenizer.definition
    )


def read_config(folder: Path) -> dict[str, Any]:
    """What a folder says of its model."""
    _refuse_adapters(folder)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; give a run, or a converted model's")
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder} is no model: it holds no {CONFIG}; give a run, or a converted model's folder"
        )
    try:
        values = json.loads((folder / CONFIG).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / CONFIG} is not JSON: {error}") from None
    if not isinstance(values, dict) or not values:
        raise UsageError(f"{folder / CONFIG} describes no model; give a run, or a converted model")
    return values


def _refuse_adapters(folder: Path) -> None:
    then = "save_pretrained(OUT) makes a whole model of both; save the base's tokenizer there too"
    loaded = f"(base, {str(folder)!r})"
    check_source(folder, of_an_adapter=f"ssmax.hf.load{loaded}.{then}")
    if (folder / PEFT).is_file() and not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder} holds PEFT's adapter without the model that it is for; "
            f"PeftModel.from_pretrained{loaded}.merge_and_unload().{then}"
        )


def _converted(folder: Path, keeps_dtype: bool) -> Source:
    import torch

    import ssmax.hf
    from ssmax.hf.inputs import own_tokenizer

    model = ssmax.hf.from_pretrained(folder, dtype="auto" if keeps_dtype else torch.float32)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return Source(model=model, encode=None, tokenizer=None)
    tokenizer = own_tokenizer(folder, model.config)
    return Source(
        model=model,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False),
        tokenizer=path.read_bytes().decode(),
    )


def _prompt(source: Source, text: Path | None, length: int) -> list[int]:
    """The first tokens of a text, by default of Python's sources; drawn where none are known."""
    if source.encode is None:
        if text is not None:
            raise UsageError("--text needs a tokenizer, and none came with this model")
        import torch

        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            source.model.config.vocab_size, (length,), generator=generator
        ).tolist()
    if text is not None:
        tokens = source.encode(_read(text)[: length * _CHARACTERS_PER_TOKEN])
        if len(tokens) < 2:
            raise UsageError(
                f"--text must hold at least 2 tokens to compare on, {text} holds {len(tokens)}; "
                "give a longer one"
            )
    else:
        from ssmax.data.embedded import embedded_documents

        tokens = []
        for document in embedded_documents():
            tokens += source.encode(document.text[: length * _CHARACTERS_PER_TOKEN])
            if len(tokens) >= length:
                break
    if len(tokens) < length:
        print(f"the text ends after {len(tokens):,} tokens", file=sys.stderr)
    return tokens[:length]


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--text must be a file of text, {text} cannot be read: {why}") from None


def _told(done: "Exported", *, is_text: bool) -> str:
    found = done.agreement
    return (
        f"s and b: {done.how}\n"
        f"{found.tokens:,} tokens{'' if is_text else ', drawn,'} through the cache, the last "
        f"{found.decoded} one by one: logits within {found.largest_difference:.2g} of the source's "
        f"(largest {found.largest_logit:.3g}), {found.same_choice:.2%} of choices the same, loss "
        f"{found.exported_loss:.6f} against {found.source_loss:.6f} "
        f"({found.exported_loss - found.source_loss:+.2g})\n"
        f"{done.folder}: README.md tells how to load it"
    )
