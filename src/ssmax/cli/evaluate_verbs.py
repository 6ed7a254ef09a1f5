"""`ssmax evaluate ...`: what the paper measures, of a run or of models of Hugging Face."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmax.cli.options import A_RUN, Device, Json
from ssmax.tiny import run_folder

evaluate_app: typer.Typer = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="What the paper measures, of a run."
)

Seed = Annotated[int, typer.Option(help="Of needles and texts.")]
Digits = Annotated[int, typer.Option(help="Of a number.")]

Measure = Callable[..., None]
"""What is done to every model; it takes the model's measurement and as_json."""


def _each_model(
    measure: Measure,
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", parser=run_folder, help=A_RUN)
    ] = None,
    hf: Annotated[
        list[str] | None,
        typer.Option(
            "--hf", metavar="MODEL", help="A folder or a name on the Hub; may be repeated."
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Measure the --hf model with this adapter's s beside it.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="For --hf; by default the model's own.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Prepared tokens; by default the run's.")
    ] = None,
    theta: Annotated[
        float | None, typer.Option(help="Base of the rotation; by default the run's.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Replace the attention's rule first: e's is ssmax.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    device: Device = None,
    json_: Json = False,
) -> None:
    from ssmax.cli.evaluate import Models

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
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@evaluate_app.command("position-loss")
@_of_models
def position_loss(
    length: Annotated[int, typer.Option(help="Tokens of a document.")] = 2048,
    documents: Annotated[int, typer.Option(help="How many.")] = 32,
    batch: Annotated[int, typer.Option(help="Documents at a time.")] = 1,
) -> Measure:
    """The loss at every position of long documents: figure 5."""
    from ssmax.cli import evaluate

    return functools.partial(
        evaluate.position_loss, length=length, documents=documents, batch=batch
    )


@evaluate_app.command("needle")
@_of_models
def needle(
    lengths: Annotated[
        list[int] | None, typer.Option("--length", help="Tokens of a context; may be repeated.")
    ] = None,
    depths: Annotated[int, typer.Option(help="Depths from start to end, evenly.")] = 11,
    trials: Annotated[int, typer.Option(help="Of a cell.")] = 20,
    digits: Digits = 7,
    batch: Annotated[int, typer.Option(help="Prompts at a time.")] = 8,
    seed: Seed = 0,
) -> Measure:
    """A number hidden in a text and asked for: figure 6. Stopped, it goes on where it was."""
    from ssmax.cli import evaluate

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
    length: Annotated[int | None, typer.Option(help="Tokens of a context.")] = None,
    trials: Annotated[int, typer.Option(help="How many needles.")] = 100,
    depth: Annotated[float | None, typer.Option(help="Of all; by default drawn for each.")] = None,
    digits: Digits = 7,
    seed: Seed = 0,
) -> Measure:
    """Attention from the end of the prompt to the hidden number: figures 7 and 8."""
    from ssmax.cli import evaluate

    return functools.partial(
        evaluate.needle_score, length=length, trials=trials, depth=depth, digits=digits, seed=seed
    )


@evaluate_app.command("fading")
@_of_models
def fading(
    length: Annotated[int, typer.Option(help="Tokens of a document.")] = 2048,
    documents: Annotated[int, typer.Option(help="How many.")] = 8,
) -> Measure:
    """How sharp attention is, head by head, as the context grows."""
    from ssmax.cli import evaluate

    return functools.partial(evaluate.fading, length=length, documents=documents)


@evaluate_app.command("all")
@_of_models
def everything(
    length: Annotated[int, typer.Option(help="Tokens of a document and of a context.")] = 1024,
    documents: Annotated[int, typer.Option(help="How many, for losses and fading.")] = 8,
    depths: Annotated[int, typer.Option(help="Of needles, from start to end.")] = 5,
    trials: Annotated[int, typer.Option(help="Of every depth, and of needle scores.")] = 10,
    digits: Digits = 7,
    seed: Seed = 0,
) -> Measure:
    """All four at one length; --hf BEFORE --hf AFTER shows them side by side."""
    from ssmax.cli import evaluate

    return functools.partial(
        evaluate.everything,
        length=length,
        documents=documents,
        depths=depths,
        trials=trials,
        digits=digits,
        seed=seed,
    )
