"""Reproduce the paper, from the command line: the plan, the verdicts, the page."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmax.cli.options import Device, Json
from ssmax.errors import UsageError
from ssmax_lab.cli.options import Sets

if TYPE_CHECKING:
    from ssmax_lab.records import Comparison

OUT_OF_TIME = 75
"""Exit status after `--minutes`, sysexits' EX_TEMPFAIL: all is well, give the command again."""
SYMBOLS = {"supported": "+", "contradicted": "-", "no difference": "=", "inconclusive": "?"}
DECIDED = {"run.seed", "data.seed", "data.folder", "model.rule", "switch.rule"}
"""Settings of which a study has several, or that other options tell."""


def reproduce(
    preset: Annotated[
        str, typer.Option(help="quick, million, small, gpu, paper, or PRESET:VARIANT.")
    ] = "quick",
    configs: Annotated[
        str | None, typer.Option(help="Configurations, as a,b,temperature; by default all.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per configuration; by default the preset's.")
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
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
        int | None, typer.Option(min=1, help="Jobs side by side; by default the preset's.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help='Before every training, as "torchrun --nproc-per-node 8".')
    ] = "",
    device: Device = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Save and stop after so many minutes, with exit status 75; the same "
            "command resumes.",
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Write the records, without weights, to this .tar.xz: a part, by its name, of a "
            "study made on several machines."
        ),
    ] = None,
) -> int:
    """Reproduce the paper: train, measure, judge and draw.

    If interrupted, the same command resumes.
    """
    from ssmax_lab.data.qa import check_files, with_full_paths
    from ssmax_lab.records import LOGS
    from ssmax_lab.study.plan import is_computed, read_figures
    from ssmax_lab.study.presets import check_source, check_text_is_given, study_named
    from ssmax_lab.train.config import read_overrides

    study = study_named(preset)
    changes = read_overrides(set_ or [])
    for key in DECIDED & changes.keys():
        raise UsageError(f"{key} differs between the runs of a study; see --configs and --seeds")
    study = study.with_settings(changes)
    figures = read_figures(only or [])
    if text is not None:
        if data is not None:
            raise UsageError("--text and --data both name the text to train on; give one of them")
        study = dataclasses.replace(study, source=check_source(text))
    elif data is None and not is_computed(figures):
        check_text_is_given(study)
    if questions is not None:
        check_files(questions)
        study = study.with_questions(with_full_paths(questions))
    # It loads torch, which takes seconds.
    from ssmax_lab.study.reproduction import reproduce as run_study

    folder = out or Path("reproduction") / preset.replace(":", "-")
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
        records=records,
        command=shlex.join(["ssmax-lab", *sys.argv[1:]]),
        dry_run=dry_run,
    )
    if dry_run:
        return 0
    if done.page is not None:
        print("\n".join([*table(done.comparisons), "", f"the page: {done.page.resolve()}"]))
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
    json_: Json = False,
) -> None:
    """Judge and draw a study again from its records.

    Results of ssmax-lab evaluate are shown side by side.
    """
    from ssmax_lab.records import STUDY

    lines: Sequence[str]
    values: dict[str, Any]
    if not (folder / STUDY).is_file() and folder.is_dir() and any(folder.glob("*.jsonl")):
        from ssmax_lab.report.side_by_side import text_table, write_side_by_side

        found, page = write_side_by_side(folder)
        lines = text_table(found)
        values = {"runs": found.runs, "rows": list(map(dataclasses.asdict, found.rows()))}
    else:
        from ssmax_lab.analysis.statistics import verdict_of
        from ssmax_lab.report.captions import CLAIMS
        from ssmax_lab.study.reproduction import report as judge_and_draw

        comparisons, page = judge_and_draw(folder)
        lines = table(comparisons)
        values = {
            "verdicts": {name: verdict_of(name, comparisons) for name in CLAIMS},
            "comparisons": list(map(dataclasses.asdict, comparisons)),
        }
    if json_:
        print(json.dumps({"page": str(page.resolve()), **values}, indent=2))
    else:
        print("\n".join([*lines, "", f"the page: {page.resolve()}"]))


def merge(
    folder: Annotated[Path, typer.Argument(metavar="STUDY", help="The study's folder.")],
    archives: Annotated[
        list[Path], typer.Argument(metavar="PART", help="Files that reproduce --records wrote.")
    ],
) -> None:
    """Merge the parts of a study made on several machines."""
    from ssmax_lab.study.partial import merge as put_together

    parts = put_together(archives, folder)
    print(f"{folder} holds {len(parts)} part{'s' * (len(parts) != 1)}: {', '.join(parts)}")
    print(f"judge and draw them: ssmax-lab report {shlex.quote(str(folder))}")


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
