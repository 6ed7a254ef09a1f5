"""The verbs. Each imports what it needs when it is called, so that --help is instant."""

from pathlib import Path
from typing import Annotated

import typer

import ssmax
from ssmax.cli.options import Device, Json, Out, show_version

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Scalable-Softmax: convert models, export them, and see what it costs.",
)


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


@app.command()
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the Hub.")],
    out: Out,
    init: Annotated[
        str, typer.Option(help="identity, paper or anneal: where s and b start.")
    ] = "identity",
    train_length: Annotated[
        int | None, typer.Option(help="The length the model was trained at.")
    ] = None,
    rule: Annotated[
        str,
        typer.Option(help="What multiplies the query: ssmax, or another rule of docs/rules.md."),
    ] = "ssmax",
    bias: Annotated[
        bool | None, typer.Option("--bias/--no-bias", help="By default as --init needs it.")
    ] = None,
    layers: Annotated[str, typer.Option(help="full: those without a window; or all.")] = "full",
    attention: Annotated[str, typer.Option(help="self, or all: cross attention too.")] = "self",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write s and b alone, a few kilobytes.")
    ] = False,
    remote_code: Annotated[
        bool, typer.Option("--remote-code", help="A file of code beside it, to load without ssmax.")
    ] = False,
    opens_as_softmax: Annotated[
        bool,
        typer.Option(
            "--opens-as-softmax",
            help="With --remote-code: who does not trust that code gets softmax, without s, "
            "instead of an error.",
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """Give a Hugging Face model SSMax, verified and ready to train."""
    from ssmax.cli.convert import convert_shown

    convert_shown(
        model,
        out,
        rule=rule,
        init=init,
        train_length=train_length,
        bias=bias,
        layers=layers,
        attention=attention,
        adapter=adapter,
        remote_code=remote_code,
        opens_as_softmax=opens_as_softmax,
        as_json=json_,
    )


@app.command()
def export(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a converted model.",
        ),
    ],
    out: Out,
    to: Annotated[str, typer.Option(help="hf, ministral, gguf, onnx or torch-export.")],
    weights: Annotated[str, typer.Option(help="Of gguf: float32, bfloat16 or q8_0.")] = "float32",
    fit: Annotated[
        bool, typer.Option("--fit", help="Give up the heads' biases for the nearest s.")
    ] = False,
    check_tokens: Annotated[
        int, typer.Option(help="How many tokens to compare with the source on.")
    ] = 20_000,
    text: Annotated[
        Path | None, typer.Option(help="What to compare on; by default Python's own sources.")
    ] = None,
    json_: Json = False,
) -> None:
    """Write a model in a form that other engines run, and check it."""
    from ssmax.cli.export import export_shown

    export_shown(
        model,
        out,
        to=to,
        weights=weights,
        fit=fit,
        check_tokens=check_tokens,
        text=text,
        as_json=json_,
    )


@app.command()
def doctor(json_: Json = False) -> int:
    """What this machine has for the work, and what it lacks."""
    from ssmax.cli.doctor import doctor_shown

    return doctor_shown(as_json=json_)


@app.command()
def bench(
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    tokens: Annotated[int, typer.Option(help="Of a row.")] = 2048,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 12,
    kv_heads: Annotated[int | None, typer.Option(help="By default as many as query heads.")] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default the device's.")
    ] = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """What SSMax costs over softmax on this machine, for your shape."""
    from ssmax.cli.bench import bench_shown

    bench_shown(
        batch=batch,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        as_json=json_,
    )
