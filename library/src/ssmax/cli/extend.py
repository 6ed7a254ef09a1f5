"""`ssmax extend`: a Hugging Face model in, one for longer contexts out."""

import contextlib
import dataclasses
import json
import logging
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmax.cli.options import Adapter, Json, Model, Out
from ssmax.errors import UsageError

_logger = logging.getLogger(__name__)


def extend(
    model: Model,
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
    adapter: Adapter = False,
    json_: Json = False,
) -> None:
    """Extend the context of a Hugging Face model, with nothing trained."""
    from ssmax._files import check_empty, whole_folder
    from ssmax.hf.choices import check_extension
    from ssmax.hf.sources import check_typed

    check_empty(out)
    scale: str | float = sharpen
    with contextlib.suppress(ValueError):
        scale = float(sharpen)
    # All that can be told before weights are read, which may take minutes.
    check_extension(to, positions, scale, train_length)
    check_typed(model, of_an_adapter="give that model itself to ssmax extend")
    import ssmax.hf
    from ssmax._device import select_device
    from ssmax.hf.conversion import Conversion
    from ssmax.hf.extension import memory_shortfall
    from ssmax.hf.full_checkpoint import load_source
    from ssmax.hf.inputs import copy_inputs
    from ssmax.hf.verification import UnverifiedError

    extended = load_source(model, may_be_converted=True)
    choice: Any = {"positions": positions, "sharpen": scale, "train_length": train_length}
    done = ssmax.hf.extend(extended, to, **choice)
    lack = memory_shortfall(extended, to, select_device(None))
    if lack is not None:
        _logger.warning(f"{lack}; it is written all the same, for a machine with more")
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
    scales = {"none": "as they were", "clamp": f"x max(1, log n / log {done.train_length})",
              "yarn": "x YaRN's temperature"}  # fmt: skip
    print(f"queries: {scales.get(done.sharpen, f'x {done.sharpen}')}")
    if unverified:
        print(f"not verified: {unverified}")
    if adapter:
        how = f"ssmax.hf.load(base, {str(out)!r})"
    elif has_scale:
        how = f"ssmax.hf.from_pretrained({str(out)!r})"
    else:
        how = f"AutoModelForCausalLM.from_pretrained({str(out)!r}); it needs no ssmax"
    print(f"{out}: load it with {how}")
    against = [model, "--adapter", str(out)] if adapter else [model, str(out)]
    print(f"whether it is worth having: ssmax-lab evaluate --hf {shlex.join(against)}")


def _lengthen_tokenizer(folder: Path, to: int) -> None:
    """Let a tokenizer that cuts texts at the trained length cut them at the new one."""
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    if isinstance(values.get("model_max_length"), int) and values["model_max_length"] < to:
        path.write_text(json.dumps({**values, "model_max_length": to}, indent=2) + "\n")


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
