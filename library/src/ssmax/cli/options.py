"""Options that verbs share: one name, one wording."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="An empty folder, or a new one.")]


def show_version(program: str, version: str) -> Callable[[bool], None]:
    """Make the callback of --version."""

    def show(is_asked: bool) -> None:
        if is_asked:
            print(f"{program} {version}")
            raise typer.Exit

    return show
