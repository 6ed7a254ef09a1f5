"""The paper on this machine: plan, do what is left, judge, draw. `ssmax-lab reproduce` is this."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ssmax._device import check_device, select_device
from ssmax._files import LOCK, check_folder, locked, make_folder, write_whole
from ssmax._progress import clock
from ssmax.errors import UsageError
from ssmax_lab.analysis.findings import read_findings, read_study_file
from ssmax_lab.data.preparation import cores, text_to_measure
from ssmax_lab.data.shards import TRAIN, ShardSet
from ssmax_lab.records import (
    ARCHIVE,
    PART_VARIABLE,
    PARTS,
    STUDY,
    TEXT,
    VERDICTS,
    Comparison,
    Provenance,
    to_jsonl,
)
from ssmax_lab.report.study_page import draw
from ssmax_lab.study.claims import judge
from ssmax_lab.study.partial import check_archive, check_same_study, pack
from ssmax_lab.study.plan import MEASURED, TRAINED, Job, done_mark, plan, side_by_side
from ssmax_lab.study.presets import Study
from ssmax_lab.study.scheduler import Scheduler, StoppedBy
from ssmax_lab.train.recipes import check_gpu

WORDS = {
    "data": "prepare the text",
    "pretrain": "pretrain",
    "finetune": "fine-tune",
    "loss": "loss by position and attention sharpness",
    "needle": "needles: grid and scores",
}
"""What jobs of a kind do."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reproduced:
    """How a reproduction ended."""

    is_whole: bool
    """Nothing is left to do."""
    failed: Mapping[str, str]
    """Jobs that failed, and their last words."""
    comparisons: Sequence[Comparison] = ()
    page: Path | None = None
    """None where it was stopped, or nothing but a plan."""
    stopped_by: StoppedBy | None = None
    """A signal, or the clock as `minutes` asked for; the same call resumes."""


def reproduce(
    study: Study,
    folder: Path,
    *,
    configurations: Sequence[str] | None = None,
    seeds: int | None = None,
    first_seed: int = 0,
    figures: Sequence[int] | None = None,
    data: Path | None = None,
    test: Path | None = None,
    device: str | None = None,
    workers: int | None = None,
    launcher: Sequence[str] = (),
    minutes: float | None = None,
    records: Path | None = None,
    command: str = "",
    dry_run: bool = False,
) -> Reproduced:
    """Do what is left of a study in its folder, and draw the page of what there is.

    Everything is measured on the validation side of the text, or on all of `test`. After
    `minutes` what runs is saved, and the same call resumes. `records` go into an archive after
    every job, however it ends: a part of a larger study, called by its name. `command` is what was
    typed.
    """
    jobs = plan(
        study,
        configurations=configurations,
        seeds=seeds,
        first_seed=first_seed,
        figures=figures,
        has_text=data is not None,
    )
    many = workers if workers is not None else (cores() if study.workers_per_core else 1)
    if records is not None:
        check_archive(records)
        check_folder(records.parent)
    check_device(device)
    check_folder(folder)
    # Here, not when the first model is trained.
    if (measured := test or data) is not None:
        text_to_measure(measured, is_for_tests=test is not None)
    text = (data or folder / TEXT).resolve()
    test = test.resolve() if test is not None else None
    shards = _shards(text, test)
    _check_folder(study, folder, shards, is_own_text=data is None)
    left = [job for job in jobs if not done_mark(folder, job).is_file()]
    print("\n".join(_plan_lines(study, folder, jobs, left, many, shards)))
    if dry_run:
        return Reproduced(is_whole=not left, failed={})
    if left:
        if device is not None:
            select_device(device)
        check_gpu(study.pretraining.run.recipe, device)
    make_folder(folder)

    def command_of(job: Job) -> list[str]:
        is_trained, is_measured = job.kind in TRAINED, job.kind in MEASURED
        start = launcher if launcher and is_trained else [sys.executable]
        read = test if is_measured and test is not None else text
        words = [*start, "-m", "ssmax_lab.study.jobs", str(folder), job.name, "--data", str(read)]
        return words + (["--device", device] if device else [])

    def keep_records() -> None:
        # The text may have been prepared just now.
        _write(study, folder, _shards(text, test), command)
        if records is not None:
            pack(folder, records)

    def keep_records_so_far() -> None:
        # A full disk ends nothing that runs; at the end it is told.
        with suppress(OSError, UsageError):
            keep_records()

    environment = {PART_VARIABLE: records.name.removesuffix(ARCHIVE) if records else ""}
    if study.workers_per_core:
        environment["OMP_NUM_THREADS"] = str(max(1, cores() // many))
    with locked(folder) if left else nullcontext():
        _write(study, folder, shards, command)
        scheduler = Scheduler(
            folder,
            jobs,
            command=command_of,
            workers=many,
            measured_on=study.measured_on,
            environment=environment,
            minutes=minutes,
            on_done=keep_records_so_far,
        )
        stopped_by = scheduler.run()
    if stopped_by is not None:
        keep_records()
        return Reproduced(is_whole=False, failed=scheduler.failed, stopped_by=stopped_by)
    comparisons, page = report(folder)
    # They were kept after every job; where that failed, it is told when all else is there.
    keep_records()
    return Reproduced(
        is_whole=len(scheduler.is_done) == len(jobs),
        failed=scheduler.failed,
        comparisons=comparisons,
        page=page,
    )


def report(folder: Path, out: Path | None = None) -> tuple[list[Comparison], Path]:
    """Judge what the folder of a study holds, and draw it there or in `out`."""
    findings = read_findings(folder)
    provenance = Provenance.here(config=findings.study, device="records alone", seed=0)
    judged = judge(findings, provenance)
    # Verdicts that come out as they were keep the commit and the date that they came out at.
    if list(map(_told, judged)) != list(map(_told, findings.comparisons)):
        write_whole(folder / VERDICTS, to_jsonl(judged))
        findings.comparisons = judged
    return findings.comparisons, draw(findings, out or folder)


def _told(one: Comparison) -> list[object]:
    """Tell a comparison without the last digits, which differ from processor to processor."""
    values = [getattr(one, field.name) for field in dataclasses.fields(one)]
    return [
        f"{x:.9g}" if isinstance(x, float) else x for x in values if not isinstance(x, Provenance)
    ]


def _check_folder(
    study: Study, folder: Path, shards: Mapping[str, ShardSet], *, is_own_text: bool
) -> None:
    """Refuse the folder of another study: numbers may not come from two."""
    if (folder / PARTS).is_dir():
        raise UsageError(
            f"{folder} holds merged parts, behind which new work would be hidden; give another "
            "--out, and merge its --records into this one"
        )
    if not (folder / STUDY).exists():
        if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
            raise UsageError(f"{folder} holds something that is no study; give another --out")
        return
    there = read_study_file(folder)
    check_same_study(there, _values(study, shards), folder, advice="give another --out")
    if is_own_text and there["study"]["source"] != study.source:
        raise UsageError(
            f"{folder} was begun with --text {there['study']['source']}, not {study.source}; go on "
            "with that, or give another --out"
        )


def _shards(text: Path, test: Path | None) -> dict[str, ShardSet]:
    """Open the tokens to learn from and to measure on, those that are there."""
    found = {}
    with suppress(UsageError):
        found["data"] = ShardSet.open(text / TRAIN)
    with suppress(UsageError):
        found["test"] = ShardSet.open(text_to_measure(test or text, is_for_tests=test is not None))
    if len({one.vocabulary.hash for one in found.values()}) > 1:
        raise UsageError(
            f"{test} holds tokens of {found['test'].vocabulary.name!r}, {text} of "
            f"{found['data'].vocabulary.name!r}; prepare both with one tokenizer"
        )
    return found


def _values(study: Study, shards: Mapping[str, ShardSet]) -> dict[str, Any]:
    """Describe the study for its file, with the fingerprints of its tokens."""
    texts = {name: one.fingerprint for name, one in shards.items()}
    return {"study": study.to_dict(), "texts": texts}


def _write(study: Study, folder: Path, shards: Mapping[str, ShardSet], command: str) -> None:
    """Write the study, with all commands that it ever had."""
    before = read_study_file(folder)["commands"] if (folder / STUDY).exists() else []
    commands = list(dict.fromkeys([*before, *filter(None, [command])]))
    values = {**_values(study, shards), "commands": commands}
    write_whole(folder / STUDY, json.dumps(values, indent=2) + "\n")


def _plan_lines(
    study: Study,
    folder: Path,
    jobs: Sequence[Job],
    left: Sequence[Job],
    workers: int,
    shards: Mapping[str, ShardSet],
) -> Iterator[str]:
    """Say what there is to do, of which text, and how long it takes."""
    yield f"study {study.preset!r} in {folder}"
    for kind, words in WORDS.items():
        if these := [job for job in jobs if job.kind == kind]:
            to_do = sum(job in left for job in these)
            runs = ", ".join(job.run for job in these if job.configuration)
            each = f"{clock(study.seconds[kind])} each  {runs}".rstrip()
            yield f"  {words:41} {_counted(len(these), 'job'):>8}, {to_do} left, {each}"
    if not left:
        yield "all of it is done; the page is drawn again"
        return
    learned = f"{study.source!r}, not prepared yet; --text takes another"
    if "data" in shards:
        have = shards["data"].num_tokens
        times = study.tokens_trained / have
        learned = f"{have:,} tokens, {times:.3g} times over in a pretraining"
    yield f"  {'text to learn from':41} {learned}"
    rows = shards["test"].num_tokens // study.loss_length if "test" in shards else math.inf
    if rows < study.loss_documents:
        fewer = f"about {rows} rows of {study.loss_length:,} tokens, not {study.loss_documents}"
        yield f"  {'text to measure on':41} {fewer}; --test takes another"
    seconds = side_by_side((job.expected for job in left), workers)
    side = f", {workers} side by side" if workers > 1 else ""
    shared = " (shared ones take several times as long)" if study.workers_per_core else ""
    yield (
        f"about {clock(seconds)} for {_counted(len(left), 'job')}{side}, measured on "
        f"{study.measured_on}{shared}; stopped, the same command resumes"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
