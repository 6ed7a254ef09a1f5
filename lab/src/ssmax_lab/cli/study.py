"""Reproduce the paper, from the command line: the plan, the verdicts, the page."""

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmax.cli.options import Device, Json
from ssmax.errors import UsageError
from ssmax_lab.cli.options import OpenPage, Sets

if TYPE_CHECKING:
    from ssmax_lab.records import Comparison

OUT_OF_TIME = 75
"""Exit status after `--minutes`, sysexits' EX_TEMPFAIL: all is well, give the command again."""
SYMBOLS = {"supported": "+", "contradicted": "-", "no difference": "=", "inconclusive": "?"}


DECIDED = {
    "run.seed": "--first-seed and --seeds",
    "data.seed": "--first-seed and --seeds",
    "data.folder": "--data",
    "model.rule": "--configs",
    "switch.rule": "--configs",
}
"""What a study sets itself, and the option that tells it how."""


def reproduce(
    preset: Annotated[
        str, typer.Option(help="quick, million, small, gpu, paper, or PRESET:VARIANT.")
    ] = "quick",
    configs: Annotated[
        str | None, typer.Option(help="Configurations, as a,b,temperature; by default all.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Seeds per configuration; by default the preset's.")
    ] = None,
    first_seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE", help="Only figure1 to figure8, or C1 to C8; may be repeated."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
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
        typer.Option(help="Prepared tokens to measure on; by default the validation side."),
    ] = None,
    questions: Annotated[
        str | None,
        typer.Option(
            help="Questions to fine-tune on: a SQuAD file, hidden:7, or FILE+hidden:7; by "
            "default the preset's."
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
        typer.Option(
            help="Save and stop after so many minutes, with exit status 75; the same "
            "command resumes."
        ),
    ] = None,
    part: Annotated[str, typer.Option(help="Name of this machine's part of a larger study.")] = "",
    records: Annotated[
        Path | None, typer.Option(help="Write the records, without weights, to this .tar.xz.")
    ] = None,
    open_page: OpenPage = None,
    json_: Json = False,
) -> int:
    """Reproduce the paper: train, measure, judge and draw.

    If interrupted, the same command resumes.
    """
    from ssmax_lab.data.qa import check_files, with_full_paths
    from ssmax_lab.data.sources import EMBEDDED
    from ssmax_lab.records import LOGS
    from ssmax_lab.study.plan import is_computed, read_figures
    from ssmax_lab.study.presets import check_embedded_is_enough, check_source, study_named
    from ssmax_lab.train.config import read_overrides

    study = study_named(preset)
    changes = read_overrides(set_ or [])
    for key in DECIDED.keys() & changes.keys():
        raise UsageError(f"{key} is different for every run of a study; give {DECIDED[key]}")
    study = study.with_settings(changes)
    figures = read_figures(only or [])
    if text is not None:
        if data is not None:
            raise UsageError("--text and --data both name the text to train on; give one of them")
        study = dataclasses.replace(study, source=check_source(text))
    elif data is None and study.source == EMBEDDED and not is_computed(figures):
        check_embedded_is_enough(preset, study.tokens_trained)
    if questions is not None:
        check_files(questions)
        study = study.with_questions(with_full_paths(questions))
    # It loads torch, which takes seconds.
    from ssmax_lab.study.reproduction import reproduce as run_study

    folder = out or Path("reproduction") / preset.replace(":", "-")
    # Scripts read standard output; people then read the plan beside it.
    with contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        done = run_study(
            study,
            folder,
            configurations=[name.strip() for name in configs.split(",")] if configs else None,
            seeds=seeds,
            first_seed=first_seed,
            figures=figures,
            data=data,
            test=test,
            device=device,
            workers=workers,
            launcher=_words(launcher),
            minutes=minutes,
            part=part,
            records=records,
            command=shlex.join(["ssmax-lab", *sys.argv[1:]]),
            dry_run=dry_run,
        )
    if dry_run:
        return 0
    if done.page is not None:
        _show(done.comparisons, done.page, open_page=open_page, as_json=json_)
    for name, words in done.failed.items():
        log = folder / LOGS / f"{name}.log"
        print(f"ssmax-lab: {name} failed: {words}; all of it in {log}", file=sys.stderr)
    if done.stopped_by is not None:
        why = f"the {minutes:g} minutes are used" if done.stopped_by == "clock" else "stopped"
        print(f"{why}; what was done is kept, the same command resumes", file=sys.stderr)
    if done.stopped_by == "signal":
        return 130
    if done.failed:
        return 1
    return OUT_OF_TIME if done.stopped_by == "clock" else 0


def _words(launcher: str) -> list[str]:
    try:
        return shlex.split(launcher)
    except ValueError as error:
        raise UsageError(f"--launcher must be a command, got {launcher!r}: {error}") from None


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="STUDY", help="A study's folder, or one of results.")
    ],
    open_page: OpenPage = None,
    json_: Json = False,
) -> None:
    """Judge and draw a study again from its records.

    Results of ssmax-lab evaluate are shown side by side.
    """
    from ssmax_lab.records import STUDY
    from ssmax_lab.report.side_by_side import text_table, write_side_by_side
    from ssmax_lab.study.reproduction import report as judge_and_draw

    if not (folder / STUDY).is_file() and folder.is_dir() and any(folder.glob("*.jsonl")):
        found, page = write_side_by_side(folder)
        rows = [dataclasses.asdict(row) for row in found.rows()]
        _show_page(page, {"runs": found.runs, "rows": rows}, text_table(found), open_page, json_)
        return
    comparisons, page = judge_and_draw(folder)
    _show(comparisons, page, open_page=open_page, as_json=json_)


def merge(
    folder: Annotated[Path, typer.Argument(metavar="STUDY", help="The study's folder.")],
    archives: Annotated[
        list[Path], typer.Argument(metavar="PART", help="Files that reproduce --records wrote.")
    ],
) -> None:
    """Merge the parts of a study made on several machines."""
    from ssmax_lab.study.partial import merge as put_together

    for archive in archives:
        if not archive.is_file():
            raise UsageError(f"there is no file {archive}")
    parts = put_together(archives, folder)
    count = f"{len(parts)} part{'s' if len(parts) != 1 else ''}"
    print(f"{folder} holds {count}: {', '.join(parts)}")
    print(f"judge and draw them: ssmax-lab report {shlex.quote(str(folder))}")


def _show(
    comparisons: "Sequence[Comparison]", page: Path, *, open_page: bool | None, as_json: bool
) -> None:
    from ssmax_lab.analysis.statistics import verdict_of
    from ssmax_lab.report.captions import CLAIMS

    values = {
        "verdicts": {name: verdict_of(name, comparisons) for name in CLAIMS},
        "comparisons": [dataclasses.asdict(one) for one in comparisons],
    }
    _show_page(page, values, table(comparisons), open_page, as_json)


def _show_page(
    page: Path,
    values: dict[str, Any],
    lines: Sequence[str],
    open_page: bool | None,
    as_json: bool,
) -> None:
    """Print a result as lines or as JSON, name its page, and open that where it is wanted."""
    if as_json:
        print(json.dumps({"page": str(page.resolve()), **values}, indent=2))
    else:
        print("\n".join([*lines, "", f"the page: {page.resolve()}"]))
    if _is_desktop() if open_page is None else open_page:
        webbrowser.open(page.resolve().as_uri())


def table(comparisons: "Sequence[Comparison]") -> list[str]:
    """List the verdicts, claim by claim."""
    from ssmax_lab.analysis.statistics import verdict_of
    from ssmax_lab.report.captions import CLAIMS

    lines = []
    for name, text in CLAIMS.items():
        mine = [one for one in comparisons if one.claim == name]
        lines += ["", f"{name}  {text}", f"    {verdict_of(name, comparisons).upper()}"]
        for one in mine:
            ours = "  (ours)" if one.is_ours else ""
            symbol = SYMBOLS.get(one.verdict.partition(" larger")[0], " ")
            lines.append(f"  {symbol} {one.text}{ours}")
            told = "" if one.effect is None else f"{one.interval(4)} {one.unit}; "
            lines.append(f"      {told}{one.over}: {one.verdict}")
    return lines


def _is_desktop() -> bool:
    """Tell whether a person is at a screen, where a page may be opened."""
    has_screen = sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return has_screen and sys.stdout.isatty()
