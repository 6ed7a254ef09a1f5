"""The paper on this machine: plan, do what is left, judge, draw. `ssmax-lab reproduce` is this."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from ssmax._device import check_device, select_device
from ssmax._files import LOCK, check_folder, locked, make_folder, write_whole
from ssmax._progress import clock
from ssmax.errors import UsageError
from ssmax_lab.analysis.findings import read_findings, read_study_file
from ssmax_lab.data.preparation import cores, text_to_measure
from ssmax_lab.data.qa import is_path, question_sources
from ssmax_lab.data.shards import TRAIN, ShardSet
from ssmax_lab.records import PARTS, STUDY, TEXT, VERDICTS, Comparison, Provenance, to_jsonl
from ssmax_lab.report.study_page import draw
from ssmax_lab.study.claims import judge
from ssmax_lab.study.partial import QUESTIONS, check_archive, check_part, identity, pack
from ssmax_lab.study.plan import (
    Job,
    expected_seconds,
    expected_time,
    is_computed,
    plan,
    seconds_taken,
)
from ssmax_lab.study.presets import Study
from ssmax_lab.study.scheduler import Scheduler, StoppedBy, seconds_to_use, worker_command
from ssmax_lab.train.config import TrainConfig
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
    part: str = "",
    records: Path | None = None,
    command: str = "",
    dry_run: bool = False,
) -> Reproduced:
    """Do what is left of a study in its folder, and draw the page of what there is.

    Everything is measured on the validation side of the text, or on all of `test`. After
    `minutes` what runs is saved, and the same call resumes. A `part` of a larger study has a
    name, and its `records` go into an archive after every job, however it ends. `command` is what
    was typed.
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
    if many < 1:
        raise UsageError(f"workers must be at least 1, got {many}")
    if records is not None:
        check_archive(records)
        check_folder(records.parent)
    if part:
        check_part(part)
    check_folder(folder)
    text = (data or folder / TEXT).resolve()
    origin = Origin(data=str(text), test=str((test or text).resolve()), part=part)
    _check_same_study(study, folder, origin)
    # Here, not when the first model is trained.
    if (measured := test or data) is not None:
        text_to_measure(measured, is_for_tests=test is not None)
    if not jobs and not is_computed(figures):
        raise UsageError(
            "there is nothing to do: these configurations have no part in what was asked for; "
            "--dry-run without --only and --configs shows what there is"
        )
    check_device(device)
    left = [job for job in jobs if seconds_taken(folder, job) is None]
    if minutes is not None:
        _check_minutes(minutes, study, left)
    if left and device is not None:
        select_device(device)
    print("\n".join(_plan_lines(study, folder, jobs, left, many, minutes, origin)))
    if dry_run:
        return Reproduced(is_whole=not left, failed={})
    if left:
        check_gpu(study.pretraining.run.recipe, device)
    make_folder(folder)

    def command_of(job: Job) -> list[str]:
        return worker_command(
            folder,
            job,
            data=Path(origin.test) if job.kind in ("loss", "needle") else text,
            device=device,
            threads=max(1, cores() // many) if study.workers_per_core else 0,
            launcher=launcher,
        )

    def keep_records() -> None:
        if records is not None:
            pack(folder, records)

    def keep_records_so_far() -> None:
        # A full disk ends nothing that runs; at the end it is told.
        with suppress(OSError, UsageError):
            # The text may have been prepared just now.
            _write(study, folder, jobs, origin=origin)
            keep_records()

    with locked(folder) if left else nullcontext():
        _write(study, folder, jobs, origin=origin, command=command)
        scheduler = Scheduler(
            folder,
            jobs,
            study=study,
            command=command_of,
            workers=many,
            minutes=minutes,
            part=part,
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
        is_whole=not scheduler.failed and len(scheduler.is_done) == len(jobs),
        failed=scheduler.failed,
        comparisons=comparisons,
        page=page,
    )


def report(folder: Path, out: Path | None = None) -> tuple[list[Comparison], Path]:
    """Judge what the folder of a study holds, and draw it there or in `out`."""
    findings = read_findings(folder)
    provenance = Provenance.here(config=findings.study, device="records alone", seed=0)
    before = {(one.claim, one.text): one for one in findings.comparisons}
    # What comes out as it was keeps the commit and the date that it first came out at.
    judged = [
        old if (old := before.get((new.claim, new.text))) and _is_as_before(old, new) else new
        for new in judge(findings, provenance)
    ]
    if judged != findings.comparisons:
        write_whole(folder / VERDICTS, to_jsonl(judged))
        findings.comparisons = judged
    return findings.comparisons, draw(findings, out or folder)


def _is_as_before(old: Comparison, new: Comparison) -> bool:
    """Compare all but the last digits, which another processor may give otherwise."""
    names = ("effect", "low", "high", "p_holm")
    pairs = [(getattr(old, name), getattr(new, name)) for name in names]
    is_near = all(
        a == b if None in (a, b) else math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
        for a, b in pairs
    )
    same = {name: getattr(new, name) for name in (*names, "provenance")}
    return is_near and dataclasses.replace(old, **same) == new


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What of a study its folder decides: the texts, and the part that it is."""

    data: str
    """Prepared tokens to learn from."""
    test: str
    """Those that everything is measured on."""
    part: str = ""


def read_study(folder: Path) -> tuple[Study, dict[str, Job]]:
    """Read the study of a folder and its jobs by name."""
    values = read_study_file(folder)
    study = values["study"]
    study["pretraining"] = TrainConfig.from_dict(study["pretraining"])
    for name in ("needle_lengths", "base_factors"):
        study[name] = tuple(study[name])
    study["cells"] = tuple(map(tuple, study["cells"]))
    jobs = [Job(**{**job, "needs": tuple(job["needs"])}) for job in values["jobs"]]
    return Study(**study), {job.name: job for job in jobs}


def _check_same_study(study: Study, folder: Path, origin: Origin) -> None:
    """Refuse the folder of another study: numbers may not come from two."""
    if (folder / PARTS).is_dir():
        raise UsageError(
            f"{folder} holds merged parts, behind which new work would be hidden; give another "
            "--out, and merge its --records into this one"
        )
    texts = _texts(origin, study.questions)
    if not (folder / STUDY).exists():
        if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
            raise UsageError(f"{folder} holds something that is no study; give another --out")
        return
    values = read_study_file(folder)
    there, known = values["study"], values["texts"]

    def refuse(begun: str) -> NoReturn:
        raise UsageError(
            f"{folder} was begun with {begun}; go on with those, or give another --out"
        )

    if values["part"] != origin.part:
        refuse(f"part {values['part']!r}, not {origin.part!r}")
    if Path(origin.data) == (folder / TEXT).resolve() and there["source"] != study.source:
        refuse(f"--text {there['source']}, not {study.source}")
    for name, option in (("data", "--data"), ("test", "--test"), (QUESTIONS, "--questions")):
        path = getattr(origin, name, study.questions)
        # The same tokens may have been moved, alone or with the study.
        is_unknown = name not in texts and values.get(name, path) == path
        if name in known and not is_unknown and texts.get(name) != known[name]:
            words = "questions" if name == QUESTIONS else "tokens"
            refuse(f"other {words} than {option} {path}")
    if identity(there) != identity(study.to_dict()):
        raise UsageError(
            f"{folder} holds another study, {there['preset']!r} with other settings; "
            "give another --out, or the settings of its study.json"
        )


def _shards(origin: Origin) -> dict[str, ShardSet]:
    """Open the tokens to learn from and to measure on, those that are there."""
    found = {}
    with suppress(UsageError):
        found["data"] = ShardSet.open(Path(origin.data) / TRAIN)
    with suppress(UsageError):
        is_for_tests = origin.test != origin.data
        side = text_to_measure(Path(origin.test), is_for_tests=is_for_tests)
        found["test"] = ShardSet.open(side)
    return found


def _texts(origin: Origin, questions: str) -> dict[str, str]:
    """Fingerprint the tokens to learn from and to measure on, and the questions, where they are."""
    shards = _shards(origin)
    if len({one.vocabulary.hash for one in shards.values()}) > 1:
        raise UsageError(
            f"{origin.test} holds tokens of {shards['test'].vocabulary.name!r}, {origin.data} of "
            f"{shards['data'].vocabulary.name!r}; prepare both with one tokenizer"
        )
    texts = {name: one.fingerprint for name, one in shards.items()}
    files = [Path(source) for source in question_sources(questions) if is_path(source)]
    if files and all(file.is_file() for file in files):
        digest = hashlib.sha256()
        for file in files:
            digest.update(file.read_bytes())
        texts[QUESTIONS] = digest.hexdigest()
    return texts


def _check_minutes(minutes: float, study: Study, left: Sequence[Job]) -> None:
    """Refuse a time in which some job would never be started, however often it is tried."""
    if not 0 < minutes < math.inf:
        raise UsageError(f"minutes must be more than 0 and finite, got {minutes:g}")
    seconds = {job.name: seconds_to_use(job, expected_seconds(study, job)) for job in left}
    longest = max(seconds, key=seconds.__getitem__, default="")
    if longest and 60 * minutes < seconds[longest]:
        raise UsageError(
            f"{minutes:g} minutes are too few: {longest} is not started with less than "
            f"{seconds[longest]:g} seconds left; give at least {math.ceil(seconds[longest] / 60)}"
        )


def _write(
    study: Study, folder: Path, jobs: Sequence[Job], *, origin: Origin, command: str = ""
) -> None:
    """Write the study, with all jobs and commands that it ever had."""
    known = {job.name: job for job in jobs}
    commands = [command] if command else []
    if (folder / STUDY).exists():
        known = read_study(folder)[1] | known
        before = read_study_file(folder)["commands"]
        commands = list(dict.fromkeys([*before, *commands]))
    values = {
        "study": study.to_dict(),
        "jobs": [dataclasses.asdict(job) for job in known.values()],
        "commands": commands,
        "texts": _texts(origin, study.questions),
        **dataclasses.asdict(origin),
    }
    write_whole(folder / STUDY, json.dumps(values, indent=2) + "\n")


def _plan_lines(
    study: Study,
    folder: Path,
    jobs: Sequence[Job],
    left: Sequence[Job],
    workers: int,
    minutes: float | None,
    origin: Origin,
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
    shards, needed = _shards(origin), study.tokens_trained
    text = f"{study.source!r}, not prepared yet; --text takes another"
    if "data" in shards:
        have = shards["data"].num_tokens
        text = f"{have:,} tokens, {needed / have:.3g} times over in a pretraining"
    yield f"  {'text to learn from':41} {text}"
    rows = shards["test"].num_tokens // study.loss_length if "test" in shards else math.inf
    if rows < study.loss_documents:
        fewer = f"about {rows} rows of {study.loss_length:,} tokens, not {study.loss_documents}"
        yield f"  {'text to measure on':41} {fewer}; --test takes another"
    seconds = expected_time(study, left, workers)
    side = f", {workers} side by side" if workers > 1 else ""
    shared = " (shared ones take several times as long)" if study.workers_per_core else ""
    yield (
        f"about {clock(seconds)} for {_counted(len(left), 'job')}{side}, measured on "
        f"{study.measured_on}{shared}; stopped, the same command resumes"
    )
    if minutes is not None:
        commands = _counted(math.ceil(seconds / 60 / minutes), "command")
        yield f"{commands} of {minutes:g} minutes"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
