"""The verbs. Each imports what it needs when it is called, so that --help is instant."""

from pathlib import Path
from typing import Annotated

import typer

import ssmax_lab
from ssmax.cli.options import Device, Json, Out, show_version
from ssmax_lab.cli.evaluate_verbs import evaluate_app
from ssmax_lab.cli.options import A_RUN, TOKENIZERS, OpenPage, Theta
from ssmax_lab.tiny import run_folder

app: typer.Typer = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The laboratory of Scalable-Softmax: reproduce the paper, train and measure models.",
)
app.add_typer(evaluate_app, name="evaluate")
data_app: typer.Typer = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Text to tokens, and tokens checked."
)
app.add_typer(data_app, name="data")

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
    """Turn text into shards of tokens. Stopped, the same command resumes."""
    from ssmax_lab.cli.prepare import prepare_command

    prepare_command(
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
        Path, typer.Argument(metavar="DATA", help="Folder that ssmax-lab data prepare wrote.")
    ],
) -> None:
    """Compare every shard with its checksum."""
    from ssmax_lab.data.shards import verify_prepared

    for shards in verify_prepared(folder):
        print(
            f"{shards.folder}: {shards.num_tokens:,} tokens, {shards.num_documents:,} documents, "
            "checksums match"
        )


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
        typer.Option(help="Folder that ssmax-lab data prepare wrote, in place of --text."),
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
    from ssmax_lab.study.text import TOKENS_TRAINED, check_embedded_is_enough

    # Before torch is loaded, where neither --set nor --only could change the answer.
    if text is None and data is None and not set_ and not only:
        check_embedded_is_enough(preset, TOKENS_TRAINED.get(preset.partition(":")[0], 0))

    from ssmax_lab.cli.study import reproduce_shown

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
    from ssmax_lab.cli.study import gather_shown

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

    Results of ssmax-lab evaluate are shown side by side.
    """
    from ssmax_lab.cli.study import report_shown

    report_shown(folder, open_page=open_page, as_json=json_)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", parser=run_folder, help=A_RUN)],
    out: Out,
    json_: Json = False,
) -> None:
    """Write a run as a Hugging Face model, which ssmax export then brings to engines."""
    from ssmax_lab.cli.export import export_shown

    export_shown(folder, out, as_json=json_)


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
        typer.Option(
            help="Folder that ssmax-lab data prepare wrote; by default the preset's text."
        ),
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
    from ssmax_lab.cli.training import changes_of, pretrain_shown

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
        typer.Option(
            help="With --hf: text that ssmax-lab data prepare wrote, instead of questions."
        ),
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
    from ssmax_lab.cli.training import changes_of, finetune_shown

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
    from ssmax_lab.cli.training import generate_shown

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
