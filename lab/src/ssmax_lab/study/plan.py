"""A study as jobs: what has to be done, in what order, how long it takes, and what is done."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssmax.errors import UsageError
from ssmax_lab.configurations import CONFIGURATIONS, PILOT_SEED, PROBE
from ssmax_lab.model.config import nearest
from ssmax_lab.records import DONE
from ssmax_lab.study.presets import Study

_DRAWN_FROM = {2: "pretrain", 4: "pretrain", 5: "loss", 6: "needle", 7: "needle", 8: "needle"}
"""The kind of job that each figure is drawn from; 1 and 3 are mathematics."""


TRAINED, MEASURED = ("pretrain", "finetune"), ("loss", "needle")
"""Kinds of jobs; "data" prepares the text of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One piece of work that leaves its result on disk."""

    kind: str
    configuration: str = ""
    seed: int = 0
    needs: tuple[str, ...] = ()
    """Names of jobs that have to be done before."""
    seconds: float = 0.0
    """What the whole of it took where the preset was measured."""
    begins: float = 0.0
    """The share of it that another job does: (f) continues (a)."""

    @classmethod
    def named(cls, name: str) -> "Job":
        """Read what a name says, for the process that does the job."""
        kind, _, run = name.partition("-")
        configuration, _, seed = run.partition("-")
        return cls(kind=kind, configuration=configuration, seed=int(seed or 0))

    @property
    def name(self) -> str:
        """Its name, and that of its log."""
        return f"{self.kind}-{self.run}" if self.configuration else self.kind

    @property
    def run(self) -> str:
        """The run that it makes or measures."""
        return f"{self.configuration}-{self.seed}"

    @property
    def of_pretrained(self) -> str:
        """The run whose pretrained model it works with."""
        base = CONFIGURATIONS[self.configuration].base or self.configuration
        return f"{base}-{self.seed}"

    @property
    def of_finetuned(self) -> str:
        """The fine-tuned run that it makes or works with."""
        is_own = CONFIGURATIONS[self.configuration].is_finetuned
        return f"{self.run if is_own else self.of_pretrained}-qa"

    @property
    def expected(self) -> float:
        """Estimate what it takes, in seconds."""
        return (1.0 - self.begins) * self.seconds


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
    chosen = list(configurations or CONFIGURATIONS)
    for name in chosen:
        if name not in CONFIGURATIONS:
            raise UsageError(
                f"there is no configuration {name!r}" + nearest(name, list(CONFIGURATIONS))
            )
    # Where retrieval is taught in pretraining nothing is taught later, and (e) is nothing but (a).
    count = {
        name: 0
        if study.teaches_needles and CONFIGURATIONS[name].applied == "fine-tuning"
        else (study.seeds[name] if seeds is None else seeds)
        for name in chosen
    }
    by_name: dict[str, Job] = {}

    def add(kind: str, name: str = "", seed: int = 0) -> str:
        needed = tuple(needs(kind, name, seed))
        is_continued = kind == "pretrain" and f"pretrain-a-{seed}" in needed
        job = Job(
            kind=kind, configuration=name, seed=seed, needs=needed, seconds=study.seconds[kind],
            begins=1.0 - study.pretraining.switch.last_fraction if is_continued else 0.0,
        )  # fmt: skip
        by_name.setdefault(job.name, job)
        return job.name

    def needs(kind: str, name: str, seed: int) -> Iterator[str]:
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
                for kind in _kinds(name, figures):
                    add(kind, name, first_seed + number)
    if not by_name and not is_computed(figures):
        raise UsageError(
            "there is nothing to do: these configurations have no part in what was asked for"
        )
    return list(by_name.values())


def _kinds(name: str, figures: Sequence[int] | None) -> Iterator[str]:
    """List what is done of a configuration for its own sake."""
    if name == PROBE:
        # It is figure 2's, and has no lengths beyond those of the training.
        if figures is None or 2 in figures:
            yield "pretrain"
        return
    if CONFIGURATIONS[name].is_pretrained and (figures is None or 4 in figures):
        yield "pretrain"
    for kind in MEASURED:
        if figures is None or kind in map(_DRAWN_FROM.get, figures):
            yield kind


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
    return figures is not None and _DRAWN_FROM.keys().isdisjoint(figures)


def side_by_side(seconds: Iterable[float], workers: int) -> float:
    """Estimate what jobs of so many seconds take together."""
    every = list(seconds)
    return max(sum(every) / workers, *every, 0.0)


def done_mark(folder: Path, job: Job) -> Path:
    """Locate the file that says that a job need not be done again."""
    return folder / DONE / f"{job.name}.json"
