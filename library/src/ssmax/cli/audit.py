"""`ssmax audit`: do the engines here apply the attention temperature of a checkpoint?"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmax.cli.options import Json

if TYPE_CHECKING:
    from ssmax.audit import Audit


def audit(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a checkpoint.")],
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="transformers, vllm, mlx-lm or llama.cpp, or as vllm=PYTHON the one of another "
            "environment; several times for several; by default all that are installed."
        ),
    ] = None,
    small: Annotated[
        bool,
        typer.Option(
            "--small", help="A small random model with this config's scale instead of the weights."
        ),
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(help="Of the prompt; by default 1,024 past where it begins.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="The longest text that vLLM is told to expect.")
    ] = None,
    gguf: Annotated[Path | None, typer.Option(help="The same model as llama.cpp reads it.")] = None,
    json_: Json = False,
) -> int:
    """Check which engines apply a model's attention temperature."""
    from ssmax._engines import ENGINES, parse
    from ssmax.hf.sources import read_config

    read_config(model)
    for text in engine or ():
        parse(text, tuple(ENGINES))
    import ssmax.audit

    found = ssmax.audit.audit(
        model, engines=engine, tokens=tokens, max_length=max_length, gguf=gguf, small=small
    )
    print(json.dumps(dataclasses.asdict(found), indent=2) if json_ else told(found))
    return 0 if found.is_applied else 1


def told(found: "Audit") -> str:
    """Write the table."""
    lines = [
        f"{found.where}: {found.formula}",
        f"from position {found.begins:,} on; {found.tokens:,} random tokens",
    ]
    for one in found.verdicts:
        lines.append(f"{f'{one.engine} {one.version}':28}{one.finding}")
        if one.why:
            lines.append(f"{'':28}{one.why}")
    return "\n".join(lines)
