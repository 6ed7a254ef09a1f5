"""A study as jobs: what has to be done, in what order, and what is done already."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ssmax._files import write_whole
from ssmax.errors import UsageError
from ssmax_lab.model.config import nearest
from ssmax_lab.records import METRICS, RUN_CONFIG, read_metrics
from ssmax_lab.report.findings import DONE, RUNS
from ssmax_lab.study.presets import (
    CONFIGURATIONS,
    MEASURED,
    NOT_TRAINED,
    REPLACED,
    TRAINED,
    Study,
)
from ssmax_lab.train import configured

Kind = Literal["data", "pretrain", "finetune", "loss", "needle"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# What each figure is drawn from; 1 and 3 are mathematics.
_KINDS: dict[int, set[Kind]] = {
    1: set(),
    2: {"pretrain"},
    3: set(),
    4: {"pretrain"},
    5: {"loss"},
    6: {"needle"},
    7: {"needle"},
    8: {"needle"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One piece of work that leaves its result on disk."""

    kind: Kind
    configuration: str = ""
    seed: int = 0
    needs: tuple[str, ...] = ()
    """Names of jobs that have to be done before."""

    @property
    def name(self) -> str:
        """Its name, and that of its log."""
        return f"{self.kind}-{self.run}" if self.configuration else self.kind

    @property
    def run(self) -> str:
        """The run that it makes or measures."""
        return f"{self.configuration}-{self.seed}"

    @property
    def goes_on(self) -> bool:
        """Stopped, it goes on where it was; otherwise it begins again."""
        return self.kind != "loss"


def plan(
    study: Study,
    *,
    configurations: Sequence[str] | None = None,
    seeds: int | None = None,
    first_seed: int = 0,
    figures: Sequence[int] | None = None,
) -> list[Job]:
    """The jobs in an order in which they can be done.

    A run is trained and measured, then the next: whoever is interrupted has whole results.
    `seeds` replaces the preset's numbers, `figures` leaves out what none of them needs.
    """
    if first_seed < 0:
        raise UsageError(f"first_seed must be at least 0, got {first_seed}")
    chosen = list(configurations) if configurations else list(CONFIGURATIONS)
    for name in chosen:
        if name not in CONFIGURATIONS:
            raise UsageError(
                f"there is no configuration {name!r}" + nearest(name, list(CONFIGURATIONS))
            )
    if seeds is not None and seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {seeds}")
    count = {name: study.seeds[name] if seeds is None else seeds for name in chosen}
    wanted = _wanted_kinds(figures)
    by_name: dict[str, Job] = {}

    def add(kind: Kind, name: str = "", seed: int = 0) -> str:
        job = Job(kind=kind, configuration=name, seed=seed, needs=tuple(needs(kind, name, seed)))
        by_name.setdefault(job.name, job)
        return job.name

    def needs(kind: Kind, name: str, seed: int) -> Iterable[str]:
        base = REPLACED[name].base if name in REPLACED else name
        if kind == "pretrain":
            yield add("data")
            # (f) is (a) until its switch.
            if name == "f" and seed - first_seed < count.get("a", 0):
                yield add("pretrain", "a", seed)
        elif kind in ("finetune", "loss"):
            yield add("pretrain", base, seed)
        elif kind == "needle":
            yield add("finetune", base if name in NOT_TRAINED else name, seed)

    rounds = range(max(count.values(), default=0))
    for number in rounds:
        for name in chosen:
            if number < count[name]:
                for kind in sorted(wanted):
                    if _applies(kind, name, figures):
                        add(kind, name, first_seed + number)
    return list(by_name.values())


def read_figures(texts: Sequence[str]) -> list[int] | None:
    """`["figure5", "C6"]` as numbers; None for all of them."""
    figures = []
    for text in texts:
        match = re.fullmatch(r"(?:figure|fig|c)?[ -]?([1-8])", text.strip().lower())
        if match is None:
            raise UsageError(f"--only takes figure1 to figure8 or C1 to C8, got {text!r}")
        figures.append(int(match.group(1)))
    return sorted(set(figures)) or None


def _wanted_kinds(figures: Sequence[int] | None) -> set[Kind]:
    if figures is None:
        return {"pretrain", "finetune", "loss", "needle"}
    return set().union(*(_KINDS[figure] for figure in figures))


def _applies(kind: Kind, name: str, figures: Sequence[int] | None) -> bool:
    if kind == "pretrain":
        # Alone, figure 2 needs the probe and figure 4 all the others.
        is_probes_turn = figures is None or 2 in figures
        is_others_turn = figures is None or 4 in figures
        return name in TRAINED and (is_probes_turn if name == "probe" else is_others_turn)
    return name in MEASURED and not (kind == "finetune" and name in NOT_TRAINED)


def mark_done(folder: Path, job: Job, seconds: float) -> None:
    """From now on the job is not done again."""
    (folder / DONE).mkdir(parents=True, exist_ok=True)
    write_whole(folder / DONE / f"{job.name}.json", json.dumps({"seconds": round(seconds, 1)}))


def seconds_taken(folder: Path, job: Job) -> float | None:
    """What a job that is done took; None where it is not."""
    try:
        return float(json.loads((folder / DONE / f"{job.name}.json").read_text())["seconds"])
    except FileNotFoundError:
        return None


def share_done(study: Study, folder: Path, job: Job) -> float:
    """Of the steps of a training that was begun and is not done, those behind it."""
    run = folder / RUNS / (f"{job.run}-qa" if job.kind == "finetune" else job.run)
    if job.kind not in ("pretrain", "finetune") or not (run / METRICS).is_file():
        return 0.0
    try:
        steps = json.loads((run / RUN_CONFIG).read_text())["run"]["steps"]
        done = (
            max((line["step"] for line in read_metrics(run / METRICS, "step")), default=0) / steps
        )
    except (OSError, ValueError, KeyError):
        # It is told when the job goes on.
        return 0.0
    begin = begins_at(study, job)
    return min(1.0, max(0.0, done - begin) / (1.0 - begin))


def expected_seconds(study: Study, job: Job) -> float:
    """What a job takes, as the preset was measured."""
    return (1.0 - begins_at(study, job)) * study.seconds[job.kind]


def begins_at(study: Study, job: Job) -> float:
    """The share of its steps that a job finds done: (f) goes on where (a) was at its switch."""
    goes_on = job.kind == "pretrain" and any(name.startswith("pretrain") for name in job.needs)
    return 1.0 - configured(study.pretraining, "f").switch.last_fraction if goes_on else 0.0


def can_start(job: Job, *, done: set[str], running: Sequence[Job], trains_alone: bool) -> bool:
    """Whether what it needs is done, and the machine is not filled."""
    is_filled = trains_alone and any(other.kind == "pretrain" for other in running)
    return done.issuperset(job.needs) and not (is_filled and job.kind == "pretrain")


def makespan(
    study: Study,
    jobs: Sequence[Job],
    workers: int,
    *,
    done: Mapping[str, float] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> float:
    """Seconds until these jobs are done; what they need besides is.

    Of those that are being done, `done` has the share that is. `seconds` has what is left of each
    job; by default that is what the preset was measured with.
    """
    shares = done or {}
    if seconds is None:
        seconds = {
            job.name: expected_seconds(study, job) * (1.0 - shares.get(job.name, 0.0))
            for job in jobs
        }
    there = {name for job in jobs for name in job.needs} - {job.name for job in jobs}
    # What is being done stays so.
    waiting = sorted(jobs, key=lambda job: job.name not in shares)
    running, now = dict[str, tuple[float, Job]](), 0.0
    while waiting or running:
        for job in list(waiting):
            beside = [other for _, other in running.values()]
            if len(beside) < workers and can_start(
                job, done=there, running=beside, trains_alone=study.trains_alone
            ):
                waiting.remove(job)
                running[job.name] = now + seconds[job.name], job
        now, ended = min(running.values(), key=lambda one: one[0])
        del running[ended.name]
        there.add(ended.name)
    return now
