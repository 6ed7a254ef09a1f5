"""A reproduction as a person sees it: the plan, the verdicts, the page."""

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ssmax.errors import UsageError
from ssmax_lab.analysis.statistics import overall
from ssmax_lab.data.sources import EMBEDDED
from ssmax_lab.records import LOGS, STUDY, Comparison
from ssmax_lab.report.captions import CLAIMS
from ssmax_lab.report.side_by_side import text_table, write_side_by_side
from ssmax_lab.study.partial import merge
from ssmax_lab.study.plan import read_figures
from ssmax_lab.study.presets import study_named
from ssmax_lab.study.reproduction import is_computed, report, reproduce
from ssmax_lab.study.text import check_embedded_is_enough, check_source
from ssmax_lab.train.config import read_overrides
from ssmax_lab.train.questions import check_files, with_full_paths

OUT_OF_TIME = 75
"""Exit status after `--minutes`, sysexits' EX_TEMPFAIL: all is well, give the command again."""
SYMBOLS = {"supported": "+", "contradicted": "-", "not resolved": "?", "not measured": " "}


DECIDED = {
    "run.seed": "--first-seed and --seeds",
    "data.seed": "--first-seed and --seeds",
    "data.folder": "--data",
    "model.rule": "--configs",
    "switch.rule": "--configs",
}
"""What a study sets itself, and the option that tells it how."""


def reproduce_shown(
    preset: str,
    *,
    configs: str | None,
    seeds: int | None,
    first_seed: int,
    only: Sequence[str],
    dry_run: bool,
    out: Path | None,
    text: str | None,
    data: Path | None,
    test: Path | None,
    questions: str | None,
    sets: Sequence[str],
    workers: int | None,
    launcher: str,
    device: str | None,
    minutes: float | None,
    part: str,
    records: Path | None,
    open_page: bool | None,
    as_json: bool,
) -> int:
    """Reproduce, say what came out; the exit code."""
    study = study_named(preset)
    changes = read_overrides(sets)
    for key in DECIDED.keys() & changes.keys():
        raise UsageError(f"{key} is different for every run of a study; give {DECIDED[key]}")
    study = study.with_settings(changes)
    figures = read_figures(only)
    if text is not None:
        if data is not None:
            raise UsageError("--text and --data both name the text to train on; give one of them")
        study = dataclasses.replace(study, source=check_source(text))
    elif data is None and study.source == EMBEDDED and not is_computed(figures):
        check_embedded_is_enough(preset, study.tokens_trained)
    if questions is not None:
        check_files(questions)
        study = study.with_questions(with_full_paths(questions))
    folder = out or Path("reproduction") / preset.replace(":", "-")
    # Scripts read standard output; people then read the plan beside it.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        done = reproduce(
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
            command=shlex.join(["ssmax", *sys.argv[1:]]),
            dry_run=dry_run,
        )
    if dry_run:
        return 0
    if done.page is not None:
        _show(done.comparisons, done.page, open_page=open_page, as_json=as_json)
    for name, words in done.failed.items():
        log = folder / LOGS / f"{name}.log"
        print(f"ssmax: {name} failed: {words}; all of it in {log}", file=sys.stderr)
    if done.stopped_by is not None:
        why = f"the {minutes:g} minutes are used" if done.stopped_by == "clock" else "stopped"
        print(f"{why}; what was done is kept, the same command goes on", file=sys.stderr)
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


def report_shown(folder: Path, *, open_page: bool | None, as_json: bool) -> None:
    """Judge and draw again; a folder of results alone is shown side by side."""
    if not (folder / STUDY).is_file() and folder.is_dir() and any(folder.glob("*.jsonl")):
        _show_results(folder, open_page=open_page, as_json=as_json)
        return
    comparisons, page = report(folder)
    _show(comparisons, page, open_page=open_page, as_json=as_json)


def merge_shown(archives: Sequence[Path], folder: Path) -> None:
    """Merge parts, say which there are."""
    for archive in archives:
        if not archive.is_file():
            raise UsageError(f"there is no file {archive}")
    parts = merge(archives, folder)
    count = f"{len(parts)} part{'s' if len(parts) != 1 else ''}"
    print(f"{folder} holds {count}: {', '.join(parts)}")
    print(f"judge and draw them: ssmax-lab report {shlex.quote(str(folder))}")


def _show_results(folder: Path, *, open_page: bool | None, as_json: bool) -> None:
    found, page = write_side_by_side(folder)
    if as_json:
        rows = [dataclasses.asdict(row) for row in found.rows()]
        print(json.dumps({"page": str(page.resolve()), "runs": found.runs, "rows": rows}, indent=2))
    else:
        print("\n".join(text_table(found)))
        print(f"\nthe page: {page.resolve()}")
    if _is_desktop() if open_page is None else open_page:
        webbrowser.open(page.resolve().as_uri())


def _show(
    comparisons: Sequence[Comparison], page: Path, *, open_page: bool | None, as_json: bool
) -> None:
    if as_json:
        rows = [dataclasses.asdict(one) for one in comparisons]
        print(json.dumps({"page": str(page.resolve()), "comparisons": rows}, indent=2))
    else:
        for line in table(comparisons):
            print(line)
        print(f"\nthe page: {page.resolve()}")
    if _is_desktop() if open_page is None else open_page:
        webbrowser.open(page.resolve().as_uri())


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """The verdicts, claim by claim."""
    lines = []
    for name, text in CLAIMS.items():
        mine = [one for one in comparisons if one.claim == name]
        verdict = overall([one.verdict for one in mine if not one.is_ours])
        lines += ["", f"{name}  {text}", f"    {verdict.upper()}"]
        for one in mine:
            ours = "  (ours)" if one.is_ours else ""
            lines.append(f"  {SYMBOLS[one.verdict]} {one.text}{ours}")
            told = "" if one.effect is None else f"{one.interval(4)} {one.unit}; "
            lines.append(f"      {told}{one.basis}: {one.verdict}")
    return lines


def _is_desktop() -> bool:
    """A person at a screen: a page may be opened."""
    has_screen = sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return has_screen and sys.stdout.isatty()
