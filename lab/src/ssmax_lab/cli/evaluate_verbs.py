"""`ssmax-lab evaluate ...`: what the paper measures, of a run or of models of Hugging Face."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmax.cli.options import Device, Json
from ssmax_lab.cli.options import A_RUN, TOKENIZERS, USUAL_DIGITS, Data, Theta
from ssmax_lab.tiny import run_folder

evaluate_app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What the paper measures, of a run or of Hugging Face models.",
)

Seed = Annotated[int, typer.Option(help="Of needles and texts.")]
Digits = Annotated[
    int | None,
    typer.Option(help=f"Of a number; by default as a run was fine-tuned on, else {USUAL_DIGITS}."),
]

Measure = Callable[..., None]
"""What is done to every model; it takes the model's measurement and as_json."""


def _each_model(
    measure: Measure,
    folder: Annotated[
        Path | None, typer.Argument(metavar="RUN", parser=run_folder, help=f"{A_RUN} Or --hf.")
    ] = None,
    hf: Annotated[
        list[str] | None,
        typer.Option(
            "--hf", metavar="MODEL", help="A folder, or a name on the Hub; may be repeated."
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Measure the --hf model without and with this adapter.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help=f"For --hf: {TOKENIZERS}; by default the model's own.")
    ] = None,
    data: Data = None,
    theta: Theta = None,
    rule: Annotated[
        str | None,
        typer.Option(help="Replace the run's rule first; ssmax makes configuration e of a."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    device: Device = None,
    json_: Json = False,
) -> None:
    from ssmax_lab.cli.evaluate import Models

    models = Models(
        run=folder, hf=hf or [], adapter=adapter, tokenizer=tokenizer, data=data, theta=theta,
        rule=rule, results=results, device=device, as_json=json_,
    )  # fmt: skip
    models.each(functools.partial(measure, as_json=json_))


def _of_models(verb: Callable[..., Measure]) -> Callable[..., None]:
    """A verb over any models: beside its own options it has those that say which."""
    own = inspect.signature(verb).parameters
    shared = list(inspect.signature(_each_model).parameters.values())[1:]

    def run(**options: Any) -> None:
        measure = verb(**{name: options.pop(name) for name in own})
        _each_model(measure, **options)

    parameters = [shared[0], *own.values(), *shared[1:]]
    run.__doc__ = verb.__doc__
    # What typer reads the options from; no type of a function knows that it may be set.
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@evaluate_app.command("position-loss")
@_of_models
def position_loss(
    length: Annotated[int, typer.Option(help="Tokens of a document.")] = 2048,
    documents: Annotated[int, typer.Option(help="How many documents.")] = 32,
    batch: Annotated[int, typer.Option(help="Documents at a time.")] = 1,
) -> Measure:
    """The loss at every position of long documents: figure 5."""
    from ssmax_lab.cli import evaluate

    return functools.partial(
        evaluate.position_loss, length=length, documents=documents, batch=batch
    )


@evaluate_app.command("needle")
@_of_models
def needle(
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            metavar="TOKENS",
            help="Of a context; may be repeated. By default 1, 2 and 4 training lengths.",
        ),
    ] = None,
    depths: Annotated[int, typer.Option(help="How many, evenly from start to end.")] = 11,
    trials: Annotated[int, typer.Option(help="Of every depth in every context.")] = 20,
    digits: Digits = None,
    batch: Annotated[int, typer.Option(help="Prompts at a time.")] = 8,
    seed: Seed = 0,
) -> Measure:
    """A number hidden in a text and asked for: figure 6.

    Stopped, the same command goes on.
    """
    from ssmax_lab.cli import evaluate

    return functools.partial(
        evaluate.needle,
        lengths=lengths,
        depths=depths,
        trials=trials,
        digits=digits,
        batch=batch,
        seed=seed,
    )


@evaluate_app.command("needle-score")
@_of_models
def needle_score(
    length: Annotated[
        int | None, typer.Option(help="Tokens of a context; by default 2 training lengths.")
    ] = None,
    trials: Annotated[int, typer.Option(help="How many needles.")] = 100,
    depth: Annotated[float | None, typer.Option(help="Of all; by default drawn for each.")] = None,
    digits: Digits = None,
    batch: Annotated[int, typer.Option(help="Prompts at a time.")] = 8,
    seed: Seed = 0,
) -> Measure:
    """Attention from the prompt's end to the hidden number.

    What figures 7 and 8 show.
    """
    from ssmax_lab.cli import evaluate

    return functools.partial(
        evaluate.needle_score,
        length=length,
        trials=trials,
        depth=depth,
        digits=digits,
        batch=batch,
        seed=seed,
    )


@evaluate_app.command("sharpness")
@_of_models
def sharpness(
    length: Annotated[int, typer.Option(help="Tokens of a document.")] = 2048,
    documents: Annotated[int, typer.Option(help="How many documents.")] = 8,
) -> Measure:
    """How sharp attention is, head by head, as the context grows."""
    from ssmax_lab.cli import evaluate

    return functools.partial(evaluate.sharpness, length=length, documents=documents)


@evaluate_app.command("all")
@_of_models
def everything(
    length: Annotated[int, typer.Option(help="Tokens of a document and of a context.")] = 1024,
    documents: Annotated[int, typer.Option(help="How many, for losses and sharpness.")] = 8,
    depths: Annotated[
        int, typer.Option(help="Of needles: how many, evenly from start to end.")
    ] = 5,
    trials: Annotated[int, typer.Option(help="Of every depth, and of needle scores.")] = 10,
    digits: Digits = None,
    seed: Seed = 0,
) -> Measure:
    """All four at one length.

    --hf BEFORE --hf AFTER shows them side by side.
    """
    from ssmax_lab.cli import evaluate

    return functools.partial(
        evaluate.everything,
        length=length,
        documents=documents,
        depths=depths,
        trials=trials,
        digits=digits,
        seed=seed,
    )
