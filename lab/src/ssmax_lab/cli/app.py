"""Gather the verbs. Each imports what it needs when it is called, so that --help is instant."""

from typing import Annotated

import typer

import ssmax_lab
from ssmax.cli.options import show_version
from ssmax_lab.cli import data, evaluate, study, train

_LOOK = {"no_args_is_help": True, "rich_markup_mode": None}
app: typer.Typer = typer.Typer(
    **_LOOK,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The laboratory of Scalable-Softmax: reproduce the paper, train and measure models.",
)
data_app: typer.Typer = typer.Typer(**_LOOK, help="Turn text into tokens, and check them.")
for verb in (data.prepare, data.verify):
    data_app.command()(verb)
for verb in (
    study.reproduce,
    train.pretrain,
    train.finetune,
    evaluate.evaluate,
    train.generate,
    train.export,
    study.report,
    study.merge,
):
    app.command()(verb)
app.add_typer(data_app, name="data")

Version = Annotated[
    bool,
    typer.Option(
        "--version",
        is_eager=True,
        callback=show_version("ssmax-lab", ssmax_lab.__version__),
        help="Show the version and exit.",
    ),
]


@app.callback()
def _before_verbs(version: Version = False) -> None:
    """Take the options that stand before a verb."""
