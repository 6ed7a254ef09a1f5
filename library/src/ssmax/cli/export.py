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
    json_: Json = False,
) -> None:
    """Write a model in a form that other engines run, and check it."""
    from ssmax.export.forms import TOKENIZER, check_choice, check_exportable
    from ssmax.hf.written_config import KEY

    check_choice(out, to, weights, fit)
    if KEY not in check_exportable(model):
        raise UsageError(f"{model} is not converted; ssmax convert {model} OUT does that")
    has_tokenizer = (model / TOKENIZER).is_file()
    from ssmax.export.exporting import export

    prompt = _prompt(model, check_tokens) if has_tokenizer else check_tokens
    _logger.info(f"writing {to}")
    show = functools.partial(log_progress, _logger, "checked token")
    done = export(model, out, to=to, weights=weights, fit=fit, prompt=prompt, progress=show)
    if json_:
        about = dataclasses.asdict(done.agreement)
        print(json.dumps({"out": str(out), "to": to, "weights": weights, "how": done.how, **about}))
    else:
        print(_told(done, is_text=has_tokenizer))


def _prompt(source: Path, length: int) -> list[int]:
    """Take the first tokens of Python's own sources."""
    from ssmax.hf.inputs import own_tokenizer

    tokenizer = own_tokenizer(source)
    tokens: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        tokens += tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if len(tokens) >= length:
            break
    return tokens[:length]


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
