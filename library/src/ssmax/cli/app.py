"""Gather the verbs. Each imports what it needs when it is called, so that --help is instant."""

from typing import Annotated

import typer

import ssmax
from ssmax.cli.audit import audit
from ssmax.cli.convert import convert
from ssmax.cli.doctor import doctor
from ssmax.cli.export import export
from ssmax.cli.extend import extend
from ssmax.cli.options import show_version
from ssmax.cli.serve import serve

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Scalable-Softmax (SSMax): convert, extend, export, serve and audit models.",
)
for _verb in (convert, extend, export, serve, audit, doctor):
    app.command()(_verb)

Version = Annotated[
    bool,
    typer.Option(
        "--version",
        is_eager=True,
        callback=show_version("ssmax", ssmax.__version__),
        help="Show the version and exit.",
    ),
]


@app.callback()
def _before_verbs(version: Version = False) -> None:
    """Take the options that stand before a verb."""
