"""A study as jobs: what has to be done, in what order, and what is done already."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ssmax._files import write_whole
from ssmax.errors import UsageError
from ssmax_lab.configurations import CONFIGURATIONS, PILOT_SEED, PROBE
from ssmax_lab.model.config import nearest
from ssmax_lab.records import DONE
from ssmax_lab.study.presets import Study

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
    def is_resumable(self) -> bool:
        """Whether it resumes where it was stopped; otherwise it begins again."""
        return self.kind != "loss"

    @property
    def of_pretrained(self) -> str:
        """The run whose pretrained model it works with."""
        base = CONFIGURATIONS[self.configuration].base or self.configuration
        return f"{base}-{self.seed}"

    @property
    def of_finetuned(self) -> str:
        """The run whose fine-tuned model it works with."""
        is_own = CONFIGURATIONS[self.configuration].is_finetuned
        return self.run if is_own else self.of_pretrained


def plan(
    study: Study,
    *,
    configurations: Sequence[str] | None = None,
    seeds: int | None = None,
    first_seed: int = 0,
    figures: Sequence[int] | None = None,
    has_text: bool = False,
) -> list[Job]:
    """List the jobs in an order in which they can be done.

    A run is trained and measured, then the next: whoever is interrupted has whole results.
    `seeds` replaces the preset's numbers, `figures` leaves out what none of them needs, and
    `has_text` the preparing of the text.
    """
    if first_seed < 0:
        raise UsageError(f"first_seed must be at least 0, got {first_seed}")
    chosen = list(configurations or CONFIGURATIONS)
    for name in chosen:
        if name not in CONFIGURATIONS:
            raise UsageError(
                f"there is no configuration {name!r}" + nearest(name, list(CONFIGURATIONS))
            )
    if seeds is not None and seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {seeds}")
    count = {name: study.seeds[name] if seeds is None else seeds for name in chosen}
    kinds = set(KINDS[1:]) if figures is None else set().union(*(_KINDS[one] for one in figures))
    if study.teaches_needles:
        # Nothing is taught later, and (e) would be nothing but (a).
        kinds -= {"finetune"}
        count = {
            name: 0 if CONFIGURATIONS[name].applied == "fine-tuning" else number
            for name, number in count.items()
        }
    by_name: dict[str, Job] = {}

    def add(kind: Kind, name: str = "", seed: int = 0) -> str:
        job = Job(kind=kind, configuration=name, seed=seed, needs=tuple(needs(kind, name, seed)))
        by_name.setdefault(job.name, job)
        return job.name

    def needs(kind: Kind, name: str, seed: int) -> Iterable[str]:
        if kind == "data":
            return
        one = CONFIGURATIONS[name]
        if kind == "pretrain":
            if not has_text:
                yield add("data")
            # It is (a) until its last steps.
            if one.applied == "last steps" and seed - first_seed < count.get("a", 0):
                yield add("pretrain", "a", seed)
        elif kind == "needle" and not study.teaches_needles:
            yield add("finetune", name if one.is_finetuned else one.base, seed)
        else:
            yield add("pretrain", one.base or name, seed)

    for number in range(max(count.values(), default=0)):
        for name in chosen:
            # Of the pilot seed only (a) is looked at: where it is between all and nothing.
            is_idle = study.has_pilot and first_seed + number == PILOT_SEED and name != "a"
            if number < count[name] and not is_idle:
                for kind in sorted(kinds):
                    if _applies(kind, name, figures):
                        add(kind, name, first_seed + number)
    return list(by_name.values())


def read_figures(texts: Sequence[str]) -> list[int] | None:
    """Read `["figure5", "C6"]` as numbers; None for all of them."""
    figures = []
    for text in texts:
        match = re.fullmatch(r"(?:figure|fig|c)?[ -]?([1-8])", text.strip().lower())
        if match is None:
            raise UsageError(f"--only takes figure1 to figure8 or C1 to C8, got {text!r}")
        figures.append(int(match.group(1)))
    return sorted(set(figures)) or None


def is_computed(figures: Sequence[int] | None) -> bool:
    """Say whether these figures are mathematics, for which nothing has to be done."""
    return figures is not None and not any(_KINDS[figure] for figure in figures)


def _applies(kind: Kind, name: str, figures: Sequence[int] | None) -> bool:
    one = CONFIGURATIONS[name]
    if kind == "pretrain":
        # Alone, figure 2 needs the probe and figure 4 all the others.
        figure = 2 if name == PROBE else 4
        return one.is_pretrained and (figures is None or figure in figures)
    return name != PROBE and (one.is_finetuned or kind != "finetune")


def mark_done(folder: Path, job: Job, seconds: float) -> None:
    """Mark a job as done, so that it is not done again."""
    (folder / DONE).mkdir(parents=True, exist_ok=True)
    write_whole(folder / DONE / f"{job.name}.json", json.dumps({"seconds": round(seconds, 1)}))


def seconds_taken(folder: Path, job: Job) -> float | None:
    """Read what a job took; None where it is not."""
    try:
        return float(json.loads((folder / DONE / f"{job.name}.json").read_text())["seconds"])
    except FileNotFoundError:
        return None


def expected_seconds(study: Study, job: Job) -> float:
    """Estimate what a job takes, as the preset was measured; (f) resumes (a) at its switch."""
    is_resumed = job.kind == "pretrain" and any(name.startswith("pretrain") for name in job.needs)
    share = study.pretraining.switch.last_fraction if is_resumed else 1.0
    return share * study.seconds[job.kind]


def can_start(job: Job, *, done: set[str], running: Sequence[Job], trains_alone: bool) -> bool:
    """Say whether what it needs is done, and the machine is not filled."""
    is_filled = trains_alone and any(other.kind == "pretrain" for other in running)
    return done.issuperset(job.needs) and not (is_filled and job.kind == "pretrain")


def expected_time(study: Study, jobs: Sequence[Job], workers: int) -> float:
    """Estimate what jobs take side by side, as the preset was measured."""
    seconds = [expected_seconds(study, job) for job in jobs]
    alone = [
        expected_seconds(study, job)
        for job in jobs
        if study.trains_alone and job.kind == "pretrain"
    ]
    return max(sum(seconds) / workers, sum(alone), *seconds, 0.0)
