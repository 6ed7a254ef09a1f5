"""The verbs. Each imports what it needs when it is called, so that --help is instant."""

import errno
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import ssmax
from ssmax.cli.evaluate_verbs import evaluate_app
from ssmax.cli.options import A_RUN, TINY, TOKENIZERS, Device, Json, OpenPage, Out, Theta
from ssmax.errors import MachineError, NonfiniteError, UsageError
from ssmax.tiny import run_folder

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Scalable-Softmax: reproduce the paper, convert, train, measure and serve models.",
)
app.add_typer(evaluate_app, name="evaluate")
data_app: typer.Typer = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Text to tokens, and tokens checked."
)
app.add_typer(data_app, name="data")

API_KEY_VARIABLE = "SSMAX_API_KEY"
_OF_THE_MACHINE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
}  # fmt: skip
"""No permission, no room, or a path that leads through a file."""

Runs = Annotated[Path, typer.Option(help="Folder of all runs.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override, as optim.lr=3e-4; may be repeated."),
]
File = Annotated[Path | None, typer.Option(help="Settings in .toml or .json.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")]
OnNonfinite = Annotated[
    str | None, typer.Option(help="stop or skip, where a loss or gradient is not finite.")
]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"ssmax {ssmax.__version__}")
        raise typer.Exit


@app.callback()
def _before_verbs(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Nothing but what stands before a verb."""


def run(arguments: list[str]) -> int:
    """Run a verb; the exit code. Bad usage is one line and 2, a failed machine one line and 1.

    Anything else is a bug, and keeps its traceback.
    """
    try:
        result = app(arguments, standalone_mode=False, prog_name="ssmax")
        return result if isinstance(result, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped at once", 130)
    except UsageError as error:
        return _fail(str(error), 2)
    except (MachineError, NonfiniteError) as error:
        return _fail(str(error), 1)
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        return _fail(str(error), 1)
    except Exception as error:
        # Click's own errors, whichever package carries Click.
        if hasattr(error, "format_message"):
            return _usage(error)
        raise


def _usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 2
    command = error.ctx.command_path if error.ctx is not None else "ssmax"
    return _fail(f"{error.format_message().rstrip('.')}; see {command} --help", 2)


def _fail(text: str, code: int) -> int:
    # Numbers of errors mean nothing to a reader; the words behind them stay.
    text = re.sub(r"\[Errno \d+\] ", "", text)
    rank = os.environ.get("RANK", "0")
    print(f"ssmax{'' if rank == '0' else f' (rank {rank})'}: {text}", file=sys.stderr)
    return code


@data_app.command("prepare")
def data_prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="embedded, a file or folder of .txt/.jsonl/.parquet, hf:NAME, or tokens:PATH.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the tokens, for every --data.")
    ],
    tokenizer: Annotated[str, typer.Option(help=f"{TOKENIZERS}.")] = "gpt2",
    workers: Annotated[int | None, typer.Option(help="Processes; by default one a core.")] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the documents that is kept for validation.")
    ] = 0.005,
    text_field: Annotated[str, typer.Option(help="Where .jsonl and .parquet keep it.")] = "text",
) -> None:
    """Turn text into shards of tokens. Stopped, the same command goes on."""
    from ssmax.cli.prepare import prepare_shown

    prepare_shown(
        source,
        out,
        tokenizer=tokenizer,
        workers=workers,
        validation_fraction=validation_fraction,
        text_field=text_field,
    )


@data_app.command("verify")
def data_verify(
    folder: Annotated[
        Path, typer.Argument(metavar="DATA", help="Folder that ssmax data prepare wrote.")
    ],
) -> None:
    """Compare every shard with its checksum."""
    from ssmax.data.preparation import PREPARATION, sides_of
    from ssmax.data.shards import ShardSet
    from ssmax.data.tasks import TRAIN, VALIDATION

    sides = [side for side in (TRAIN, VALIDATION) if (folder / side).is_dir()]
    if missing := [str(folder / side) for side in sides_of(folder) if side not in sides]:
        raise UsageError(
            f"{' and '.join(missing)} should be there by the {PREPARATION} and the records beside "
            "it; bring it back, or run the same ssmax data prepare again"
        )
    for side in [folder / side for side in sides] or [folder]:
        shards = ShardSet.open(side)
        shards.verify()
        print(f"{side}: {shards.num_tokens:,} tokens, {shards.num_documents:,} documents, whole")


@app.command()
def reproduce(
    preset: Annotated[
        str, typer.Option(help="quick, small, gpu, paper, or quick:VARIANT, small:VARIANT.")
    ] = "quick",
    configs: Annotated[
        str | None, typer.Option(help="Only these, as a,b,temperature; by default all.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Of every configuration; by default the preset's.")
    ] = None,
    first_seed: Annotated[int, typer.Option(help="Seeds are counted from it.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FIGURE", help="figure1 to figure8, or C1 to C8; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The study's folder; by default reproduction/PRESET.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="What to train on: embedded, a file or folder of .txt/.jsonl/.parquet, hf:NAME, "
            "or tokens:PATH. Needed for small and gpu; by default the preset's text.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder that ssmax data prepare wrote, in place of --text."),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(help="Likewise, to measure on; by default data's validation side."),
    ] = None,
    questions: Annotated[
        str | None,
        typer.Option(
            help="To fine-tune on: a file in SQuAD's format, hidden:7, or both as FILE+hidden:7; "
            "by default the preset's."
        ),
    ] = None,
    set_: Sets = None,
    workers: Annotated[
        int | None, typer.Option(help="Jobs side by side; by default the preset's.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help='Before every training, as "torchrun --nproc-per-node 8".')
    ] = "",
    device: Device = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Save and stop after so many, with 75; the same command goes on."),
    ] = None,
    piece: Annotated[
        str, typer.Option(help="The name of this machine's piece of a larger study.")
    ] = "",
    records: Annotated[
        Path | None, typer.Option(help="Bring the records into this .tar.xz, without weights.")
    ] = None,
    open_page: OpenPage = None,
    json_: Json = False,
) -> int:
    """The whole paper on this machine: train, measure, judge, draw.

    Stopped, the same command goes on.
    """
    from ssmax.study.text import TOKENS_TRAINED, check_embedded_is_enough

    # Before torch is loaded, where neither --set nor --only could change the answer.
    if text is None and data is None and not set_ and not only:
        check_embedded_is_enough(preset, TOKENS_TRAINED.get(preset.partition(":")[0], 0))

    from ssmax.cli.study import reproduce_shown

    return reproduce_shown(
        preset,
        configs=configs,
        seeds=seeds,
        first_seed=first_seed,
        only=only or [],
        dry_run=dry_run,
        out=out,
        text=text,
        data=data,
        test=test,
        questions=questions,
        sets=set_ or [],
        workers=workers,
        launcher=launcher,
        device=device,
        minutes=minutes,
        piece=piece,
        records=records,
        open_page=open_page,
        as_json=json_,
    )


@app.command()
def gather(
    folder: Annotated[Path, typer.Argument(metavar="STUDY", help="The study's folder.")],
    archives: Annotated[
        list[Path], typer.Argument(metavar="PIECE", help="Files of reproduce --records.")
    ],
) -> None:
    """Put the pieces of a study, made on several machines, together."""
    from ssmax.cli.study import gather_shown

    gather_shown(archives, folder)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="STUDY", help="A study's folder, or one of results.")
    ],
    open_page: OpenPage = None,
    json_: Json = False,
) -> None:
    """Judge and draw again what a study has measured.

    Results of ssmax evaluate are shown side by side.
    """
    from ssmax.cli.study import report_shown

    report_shown(folder, open_page=open_page, as_json=json_)


@app.command()
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the Hub.")],
    out: Out,
    init: Annotated[
        str, typer.Option(help="identity, paper, anneal or clamp: where s and b start.")
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
            parser=run_folder,
            help=f"Folder of a run or of a converted model; or {TINY}.",
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
def serve(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            parser=run_folder,
            help=f"Folder of a run, of a converted model, or one that export wrote; or {TINY}.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call it; by default its run's or its folder's name."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY_VARIABLE, help="Ask for this key; by default for none."),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Of a prompt; by default 8192, fewer where learnt positions end."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 1024,
    max_batch: Annotated[int, typer.Option(help="Requests that are answered at a time.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait behind them.")] = 256,
    drain_seconds: Annotated[
        int, typer.Option(help="For requests that run when the server is stopped.")
    ] = 30,
    tokenizer: Annotated[
        str | None, typer.Option(help=f"{TOKENIZERS}; by default the model's own.")
    ] = None,
    trust_program: Annotated[
        bool,
        typer.Option(help="Load what export --to torch-export wrote: such a file can run code."),
    ] = False,
    device: Device = None,
) -> None:
    """Answer OpenAI's clients: completions and chats, many at a time."""
    from ssmax.cli.serve import serve_shown

    serve_shown(
        model,
        host=host,
        port=port,
        name=name,
        # An empty variable is a secret that did not arrive; typer takes it for none.
        api_key=os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_batch=max_batch,
        max_waiting=max_waiting,
        drain_seconds=drain_seconds,
        tokenizer=tokenizer,
        trust_program=trust_program,
        device=device,
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
    key_heads: Annotated[
        int | None, typer.Option(help="By default as many as query heads.")
    ] = None,
    width: Annotated[int, typer.Option(help="Of a head.")] = 64,
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
        key_heads=key_heads,
        width=width,
        dtype=dtype,
        device=device,
        as_json=json_,
    )


@app.command()
def pretrain(
    preset: Annotated[
        str | None, typer.Option(help="quick, small, gpu or paper; by default quick.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="a (softmax), b (SSMax), c, d, f, probe, or a rule's name; by default b."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder that ssmax data prepare wrote; by default the preset's text."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the run; by default PRESET-CONFIG.")] = None,
    runs: Runs = Path("runs"),
    file: File = None,
    set_: Sets = None,
    resume: Resume = False,
    on_nonfinite: OnNonfinite = None,
    device: Device = None,
) -> int:
    """Train a model of the paper's kind from scratch.

    The quick preset's text is that which every Python carries.
    """
    from ssmax.cli.training import changes_of, pretrain_shown

    return pretrain_shown(
        preset=preset,
        config=config,
        data=data,
        name=name,
        runs=runs,
        changes=changes_of(file, set_, on_nonfinite),
        resume=resume,
        device=device,
    )


@app.command()
def finetune(
    base: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            parser=run_folder,
            help=f"{A_RUN} With --hf a converted model's folder.",
        ),
    ],
    hf: Annotated[
        bool,
        typer.Option("--hf", help="RUN is a folder that ssmax convert wrote, or an adapter's."),
    ] = False,
    adapter_base: Annotated[
        str | None, typer.Option("--base", help="With --hf: the model that an adapter is for.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="With --hf: text that ssmax data prepare wrote, instead of questions."),
    ] = None,
    only_ssmax: Annotated[
        bool, typer.Option("--only-ssmax", help="With --hf: s and b learn, all else stays.")
    ] = False,
    questions: Annotated[
        str | None,
        typer.Option(
            help="A file in SQuAD's format, invented, or hidden: a number in the run's own text; "
            "several joined by +. With --hf this or --data is needed: one file, or invented. "
            "By default hidden for quick runs, else invented."
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="e, or a rule: replace the attention's rule first.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the run; by default RUN-qa, with --hf RUN-tuned.")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder of all runs; by default RUN's, with --hf runs.")
    ] = None,
    file: File = None,
    set_: Sets = None,
    resume: Resume = False,
    on_nonfinite: OnNonfinite = None,
    device: Device = None,
) -> int:
    """Teach a run's model to answer questions, as in table 3.

    With --hf: fine-tune a converted Hugging Face model, on questions or on text.
    """
    from ssmax.cli.training import changes_of, finetune_shown

    return finetune_shown(
        base,
        hf=hf,
        adapter_base=adapter_base,
        data=data,
        only_ssmax=only_ssmax,
        questions=questions,
        config=config,
        name=name,
        runs=runs,
        changes=changes_of(file, set_, on_nonfinite),
        resume=resume,
        device=device,
    )


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", parser=run_folder, help=A_RUN)],
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="One or more texts to continue.")
    ],
    max_new_tokens: Annotated[int, typer.Option(help="At most so many for each.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest that have this mass together.")
    ] = None,
    theta: Theta = None,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    device: Device = None,
) -> None:
    """Continue prompts with a run's model."""
    from ssmax.cli.training import generate_shown

    generate_shown(
        folder,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        theta=theta,
        seed=seed,
        device=device,
    )
