"""`ssmax extend`: a Hugging Face model in, one for longer contexts out."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmax.cli.options import Json, Out
from ssmax.errors import UsageError


def extend(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the Hub.")],
    out: Out,
    to: Annotated[int, typer.Option(metavar="TOKENS", help="The longest context to read.")],
    positions: Annotated[
        str,
        typer.Option(help="auto, base (raise the RoPE base), yarn (its frequencies) or none."),
    ] = "auto",
    sharpen: Annotated[
        str,
        typer.Option(
            help="auto, none, clamp, yarn (its temperature) or a number: what multiplies the query."
        ),
    ] = "auto",
    train_length: Annotated[
        int | None,
        typer.Option(help="The length the model was trained at; by default as its config says."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the change alone, a few kilobytes.")
    ] = False,
    json_: Json = False,
) -> None:
    """Extend the context of a Hugging Face model, with nothing trained."""
    from ssmax._extras import require
    from ssmax._files import check_empty, whole_folder
    from ssmax.hf.choices import check_extension
    from ssmax.hf.sources import check_source, check_typed

    check_empty(out)
    scale = _number_or_name(sharpen)
    # All that can be told before weights are read, which may take minutes.
    check_extension(to, positions, scale, train_length)
    check_source(model, of_an_adapter="give that model itself to ssmax extend")
    check_typed(model)
    transformers = require("transformers", install="ssmax[hf]", purpose="ssmax extend")
    import ssmax.hf
    from ssmax.hf.conversion import Conversion
    from ssmax.hf.inputs import copy_inputs
    from ssmax.hf.verification import UnverifiedError

    extended = _load(transformers, model)
    choice: Any = {"positions": positions, "sharpen": scale, "train_length": train_length}
    done = ssmax.hf.extend(extended, to, **choice)
    has_scale = Conversion.of(extended) is not None
    if adapter and not has_scale:
        raise UsageError(
            "nothing scales the queries of this model, and an adapter holds what does; leave "
            "--adapter out: the folder is a plain model, which needs no ssmax"
        )
    unverified = ""
    with whole_folder(out) as partial:
        # Before it runs: bitsandbytes packs its 4-bit weights for the CPU then, and saves those.
        if adapter:
            ssmax.hf.save(extended, partial)
        else:
            extended.save_pretrained(partial)
            copy_inputs(model, partial, extended.config)
            _lengthen_tokenizer(partial, to)
        if has_scale:
            try:
                ssmax.hf.verify(extended)
            except UnverifiedError as error:
                unverified = str(error)
    if json_:
        about = dataclasses.asdict(done)
        print(json.dumps({"out": str(out), "verified": has_scale and not unverified, **about}))
        return
    print(f"{type(extended).__name__}: from {done.train_length:,} to {done.to:,} tokens")
    print(f"positions: {_rotation(done)}")
    print(f"queries: {_scale(done.sharpen, done.train_length)}")
    if unverified:
        print(f"not verified: {unverified}")
    print(f"{out}: load it with {_how(out, adapter=adapter, has_scale=has_scale)}")
    against = f"--hf {shlex.quote(model)}" + (
        f" --adapter {shlex.quote(str(out))}" if adapter else f" {shlex.quote(str(out))}"
    )
    print(f"whether it is worth having: ssmax-lab evaluate {against}")


def _number_or_name(sharpen: str) -> str | float:
    try:
        return float(sharpen)
    except ValueError:
        return sharpen


def _load(transformers: Any, source: str) -> Any:
    """Load a model, converted or not, by the class that was saved."""
    import ssmax.hf
    from ssmax.hf.foreign import load_with_s
    from ssmax.hf.sources import read_by_transformers
    from ssmax.hf.written_config import KEY

    with read_by_transformers(source):
        values, _ = transformers.PretrainedConfig.get_config_dict(source)
        if KEY in values:
            return ssmax.hf.from_pretrained(source, dtype="auto")
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    return load_with_s(kind or transformers.AutoModelForCausalLM, source, dtype="auto")


def _lengthen_tokenizer(folder: Path, to: int) -> None:
    """Let a tokenizer that cuts texts at the trained length cut them at the new one."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    values = json.loads(path.read_text())
    if isinstance(values.get("model_max_length"), int) and values["model_max_length"] < to:
        values["model_max_length"] = to
        path.write_text(json.dumps(values, indent=2) + "\n")


def _rotation(done: Any) -> str:
    what = {
        "base": f"RoPE base x {done.factor:g}",
        "yarn": f"YaRN's frequencies, factor {done.factor:g}",
        "none": "unchanged",
    }[done.positions]
    before, after = (
        "none" if limit is None else f"{limit:,.0f} tokens"
        for limit in (done.rope_limit_before, done.rope_limit)
    )
    return f"{what}; RoPE limit before: {before}, after: {after}"


def _scale(sharpen: str, train_length: int) -> str:
    if sharpen == "none":
        return "as they were"
    if sharpen == "clamp":
        return f"x max(1, log n / log {train_length})"
    return "x YaRN's temperature" if sharpen == "yarn" else f"x {sharpen}"


def _how(out: Path, *, adapter: bool, has_scale: bool) -> str:
    if adapter:
        return f"ssmax.hf.load(base, {str(out)!r})"
    if has_scale:
        return f"ssmax.hf.from_pretrained({str(out)!r})"
    return f"AutoModelForCausalLM.from_pretrained({str(out)!r}); it needs no ssmax"
