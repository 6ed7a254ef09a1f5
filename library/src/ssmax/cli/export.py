"""`ssmax export`: a converted model in, a form that others run out."""

import dataclasses
import functools
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmax._progress import log_progress
from ssmax.cli.options import Json, Out
from ssmax.errors import UsageError

if TYPE_CHECKING:
    from ssmax.export.exporting import Exported

_logger = logging.getLogger(__name__)
# A head start for what is not one token a character.
_CHARACTERS_PER_TOKEN = 8


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a converted model.")],
    out: Out,
    to: Annotated[str, typer.Option(help="Form: hf, ministral, gguf, onnx or torch-export.")],
    weights: Annotated[
        str, typer.Option(help="Weights of gguf: float32, bfloat16 or q8_0.")
    ] = "float32",
    fit: Annotated[
        bool,
        typer.Option(
            "--fit", help="Replace per-head biases by the nearest s, and report the loss."
        ),
    ] = False,
    check_tokens: Annotated[
        int, typer.Option(min=2, help="Number of tokens to compare with the source on.")
    ] = 20_000,
    text: Annotated[
        Path | None, typer.Option(help="Text to compare on; by default Python's own sources.")
    ] = None,
    json_: Json = False,
) -> None:
    """Write a model in a form that other engines run, and check it."""
    from ssmax.export.forms import TOKENIZER, check_choice, check_exportable
    from ssmax.hf.written_config import KEY

    check_choice(out, to, weights, fit)
    if text is not None and not text.is_file():
        raise UsageError(f"there is no file {text}")
    if KEY not in check_exportable(model):
        raise UsageError(f"{model} is not converted; ssmax convert {model} OUT does that")
    has_tokenizer = (model / TOKENIZER).is_file()
    if text is not None and not has_tokenizer:
        raise UsageError("--text needs a tokenizer, and none came with this model")
    from ssmax.export.exporting import export

    prompt = _prompt(model, text, check_tokens) if has_tokenizer else check_tokens
    _logger.info(f"writing {to}")
    show = functools.partial(log_progress, _logger, "checked token")
    done = export(model, out, to=to, weights=weights, fit=fit, prompt=prompt, progress=show)
    if json_:
        about = dataclasses.asdict(done.agreement)
        print(json.dumps({"out": str(out), "to": to, "weights": weights, "how": done.how, **about}))
    else:
        print(_told(done, is_text=has_tokenizer))


def _prompt(source: Path, text: Path | None, length: int) -> list[int]:
    """Take the first tokens of a text, by default of Python's own sources."""
    from ssmax.hf.inputs import own_tokenizer

    tokenizer = own_tokenizer(source)
    paths = [text] if text is not None else sorted(Path(os.__file__).parent.glob("*.py"))
    tokens: list[int] = []
    for path in paths:
        written = _read(path)[: length * _CHARACTERS_PER_TOKEN]
        tokens += tokenizer.encode(written, add_special_tokens=False, verbose=False)
        if len(tokens) >= length:
            break
    if len(tokens) < 2:
        raise UsageError(
            f"--text must hold at least 2 tokens to compare on, {text} holds {len(tokens)}; "
            "give a longer one"
        )
    if len(tokens) < length:
        _logger.warning(f"the text ends after {len(tokens):,} tokens")
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
