"""Options that verbs share."""

from typing import Annotated

import typer

A_RUN = "A run's folder; or tiny-a, tiny-b, tiny-a-qa, tiny-b-qa, which come with the package."
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default what there is.")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")]
