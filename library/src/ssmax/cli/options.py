"""Options that verbs share: one name, one wording."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Adapter = Annotated[
    bool, typer.Option("--adapter", help="Write the change alone, a few kilobytes.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the Hub.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="An empty folder, or a new one.")]


def show_version(program: str, version: str) -> Callable[[bool], None]:
    """Make the callback of --version."""

    def show(is_asked: bool) -> None:
        if is_asked:
            print(f"{program} {version}")
            raise typer.Exit

    return show
