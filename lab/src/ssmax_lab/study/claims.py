"""The paper's claims as comparisons with numbers: what is expected, what was measured, a verdict.

A claim is never tuned to pass. What the paper says of two configurations is one comparison, with an
effect and an interval; where this scale cannot tell, it says so.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.analysis.figure_inputs import FIGURE_1_S, figure1_output, ssmax_factor, z_max_needed
from ssmax_lab.analysis.findings import ByReplica, Findings, Record, Replica
from ssmax_lab.analysis.fits import SHAPES, fit_table
from ssmax_lab.analysis.measures import (
    losses_of_documents,
    stretches,
    top_heads_score,
    top_score,
    weight_changes,
)
from ssmax_lab.analysis.statistics import (
    NEAR_NATS,
    Interval,
    Side,
    exact,
    hull,
    over_items,
    over_seeds,
)
from ssmax_lab.configurations import CONFIGURATIONS, CONTROL, called
from ssmax_lab.records import (
    Comparison,
    NeedleTrial,
    PositionLoss,
    Provenance,
)

NOT_MEASURED = "not measured"
BEYOND = "beyond the training length"

Items = dict[Replica, list[float]]
"""A value for every document, trial or stretch, the same ones for every configuration."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What is expected of two configurations."""

    first: str
    expected: Side
    second: str
    text: str
    margin: float = 0.0
    is_papers: bool = True

    @property
    def is_ours(self) -> bool:
        """The paper does not have it; the control is ours everywhere."""
        return not self.is_papers or CONTROL in (self.first, self.second)


class Result(NamedTuple):
    """A comparison, wherever it was made."""

    claim: str
    text: str
    interval: Interval | str
    """Or why there is none."""
    unit: str
    verdict: str
    is_ours: bool = False


def judge(findings: Findings, provenance: Provenance) -> list[Comparison]:
    """Make every comparison that what was measured allows."""
    results = [*_claim_1(findings), *_claim_2(findings), *_claim_3()]
    for claim in (_claim_4, _claim_5, _claim_6, _claim_7, _claim_8):
        results += claim(findings)
    return [_comparison(result, provenance) for result in results]


def _comparison(result: Result, provenance: Provenance) -> Comparison:
    claim, text, interval, unit, verdict, is_ours = result
    told = (
        {"effect": None, "low": None, "high": None, "basis": interval}
        if isinstance(interval, str)
        else dataclasses.asdict(interval)
    )
    return Comparison(
        claim=claim, text=text, **told, unit=unit, verdict=verdict, is_ours=is_ours,
        provenance=provenance,
    )  # fmt: skip


def _computed(claim: str, text: str, effect: float, side: Side, unit: str) -> Result:
    interval = exact(effect)
    return Result(claim, text, interval, unit, interval.verdict(side))


def _claim_1(findings: Findings) -> list[Result]:
    sizes = [2**power for power in range(1, 17)]
    fall = figure1_output(sizes[-1], 1.0) - figure1_output(sizes[0], 1.0)
    least = min(figure1_output(n, ssmax_factor(n)) for n in sizes)

    # What the vectors are in a model: does a head's largest weight fall with n?
    text = f"{BEYOND} the largest weight of (b)'s heads falls less than {{}}'s"
    pairs = _above(text, ("a", CONTROL), is_papers=False)
    items = _items(findings.sharpness, lambda one: weight_changes(one, findings.train_length))
    return [
        _computed("C1", "softmax's largest output falls between n = 2 and n = 65,536", fall,
                  "below", "of the weight"),
        _computed("C1", "SSMax's (s = 0.43) stays above 0.8 for every n between", least - 0.8,
                  "above", "over 0.8"),
        *_judged("C1", pairs, items, what="heads", unit="of the weight"),
    ]  # fmt: skip


def _claim_2(findings: Findings) -> list[Result]:
    if not findings.tables:
        return []
    squares: dict[str, Items] = {name: {} for name in (*SHAPES, "power")}
    slopes = []
    for seed, table in findings.tables.items():
        for fit in fit_table(table):
            off = np.asarray(table[1:]) - np.asarray(fit.curve)
            squares[fit.shape][seed] = (off**2 / max(np.var(table[1:]), 1e-30)).tolist()
            slopes += [fit.a1] * (fit.shape == "log n")
    basis = "one seed" if len(slopes) == 1 else f"the least of {len(slopes)} seeds"
    slope = dataclasses.replace(exact(min(slopes)), basis=basis)
    pairs = [
        Pair("log n", "below", "n", "log n fits the learned p_n better than n does"),
        Pair("log n", "below", "sqrt n", "log n fits the learned p_n better than sqrt n does"),
        Pair("log n", "near", "power", "log n fits as well as the best power of n, within 0.02 "
             "of the variance", 0.02),
    ]  # fmt: skip
    rises = Result("C2", "the learned p_n rises with log n", slope, "a1", slope.verdict("above"))
    return [rises, *_judged("C2", pairs, squares, what="values of n", unit="of the variance")]


def _claim_3() -> list[Result]:
    sizes = [10**power for power in range(1, 6)]
    steps = np.diff([z_max_needed(n, 1.0) for n in sizes])
    most = max(z_max_needed(n, ssmax_factor(n)) for n in sizes)
    return [
        _computed("C3", "the z_max that softmax needs grows with every tenfold n to 100,000",
                  min(steps), "above", "a step"),
        _computed("C3", "the z_max that SSMax needs never exceeds 1 + 1/s",
                  most - (1 + 1 / FIGURE_1_S), "below", "over 1 + 1/s"),
    ]  # fmt: skip


def _claim_4(findings: Findings) -> list[Result]:
    pairs = [
        Pair("b", "below", "a", "(b) learns below (a)"),
        Pair("c", "below", "a", "(c) learns below (a)"),
        Pair("d", "below", "a", "(d) learns below (a)"),
        Pair("d", "below", "b", "(d) is the lowest: below (b)"),
        Pair("d", "below", "c", "(d) is the lowest: below (c)"),
        Pair("c", "near", "b", f"(c) is equal to (b) within {NEAR_NATS} nats", NEAR_NATS),
        Pair("b", "below", CONTROL, "(b) learns below the control"),
    ]
    items = _items(findings.curves, stretches)
    return _judged("C4", pairs, items, what="stretches of the run", unit="nats")


def _claim_5(findings: Findings) -> list[Result]:
    def judged(
        losses: ByReplica[PositionLoss], pairs: list[Pair], *, is_long: bool
    ) -> list[Result]:
        length = findings.train_length
        items = _items(losses, lambda one: losses_of_documents(one, length, is_long=is_long))
        return _judged("C5", pairs, items, what="documents", unit="nats")

    def loses_less(first: str, second: str, where: str = BEYOND, *, is_papers: bool = True) -> Pair:
        text = f"{where} {called(first)} loses less than {called(second)}"
        return Pair(first, "below", second, text, is_papers=is_papers)

    far = [
        loses_less("b", "a"),
        loses_less("c", "a"),
        Pair("d", "above", "b", f"{BEYOND} (d) is degraded: above (b)"),
        Pair("f", "above", "b", f"{BEYOND} (f) does not quite reach (b)"),
        loses_less("f", "a"),
        loses_less("b", CONTROL),
    ]
    for name, one in CONFIGURATIONS.items():
        if name in findings.position_losses:
            far += [loses_less(name, other, is_papers=False) for other in one.loses_less_than]
            far += [loses_less(other, name, is_papers=False) for other in one.loses_more_than]
    near = [Pair("e", "above", "a", "within the training length (e) loses more than (a)")]
    same_theta = [
        loses_less("b", name, f"{BEYOND}, theta unchanged,", is_papers=False)
        for name in ("a", CONTROL)
    ]
    return [
        *judged(findings.position_losses, far, is_long=True),
        *judged(findings.position_losses, near, is_long=False),
        *judged(findings.same_theta_losses, same_theta, is_long=True),
    ]


def _claim_6(findings: Findings) -> list[Result]:
    def accuracy(keep: Callable[[int], bool]) -> dict[str, Items]:
        def whole(trials: list[NeedleTrial]) -> list[float]:
            return [float(trial.is_whole) for trial in trials if keep(trial.length)]

        return _items(findings.trials, whole)

    length = findings.train_length
    pairs = _above(f"{BEYOND} the needle retrieval accuracy of (b) is above that of {{}}")
    far = accuracy(lambda size: size > length)
    results = _judged("C6", pairs, far, what="trials", unit="of the numbers")
    if "b" in findings.trials:
        # The size nearest to ten times the training length.
        sizes = sorted({trial.length for trial in next(iter(findings.trials["b"].values()))})
        nearest = min(sizes, key=lambda size: abs(size - 10 * length))
        found = accuracy(lambda size: size == nearest)["b"]
        half = {seed: [0.5] * len(values) for seed, values in found.items()}
        text = f"the needle retrieval accuracy of (b) is above a half at {nearest:,} tokens"
        results += _judged("C6", [Pair("b", "above", "half", text)], {"b": found, "half": half},
                           what="trials", unit="over a half")  # fmt: skip
    return results


def _claim_7(findings: Findings) -> list[Result]:
    pairs = _above("(b)'s top heads weigh the paper's needle more than {}'s")
    items = _items(findings.papers_needle, lambda found: list(map(top_heads_score, found)))
    return _judged("C7", pairs, items, what="haystacks", unit="of the weight")


def _claim_8(findings: Findings) -> list[Result]:
    pairs = _above("the top needle score of (b) is above that of {}")
    pairs += [Pair(name, "above", "a", f"({name}) lies above (a)") for name in ("c", "d", "e", "f")]
    items = _items(findings.scores, lambda scores: list(map(top_score, scores)))
    return _judged("C8", pairs, items, what="trials", unit="of the weight")


def _above(
    text: str, others: Sequence[str] = ("a", "c", "d", "e", "f", CONTROL), *, is_papers: bool = True
) -> list[Pair]:
    """Expect (b) above each of the others, whose names go into the text."""
    return [
        Pair("b", "above", name, text.format(called(name)), is_papers=is_papers) for name in others
    ]


def _items(found: ByReplica[Record], values: Callable[[Record], list[float]]) -> dict[str, Items]:
    return {
        name: {replica: values(record) for replica, record in by_replica.items()}
        for name, by_replica in found.items()
    }


def _judged(
    claim: str, pairs: Sequence[Pair], items: Mapping[str, Items], *, what: str, unit: str
) -> list[Result]:
    made = [_judge_pair(claim, pair, items, what=what, unit=unit) for pair in pairs]
    # A claim of which nothing was measured is left out whole.
    return made if any(result.verdict != NOT_MEASURED for result in made) else []


def _judge_pair(
    claim: str, pair: Pair, items: Mapping[str, Items], *, what: str, unit: str
) -> Result:
    """Make a comparison; one that cannot be made says why, and holds back its claim's verdict."""
    missing = [name for name in (pair.first, pair.second) if name not in items]
    try:
        if missing:
            verb = "was" if len(missing) == 1 else "were"
            raise UsageError(f"{' and '.join(map(called, missing))} {verb} not measured")
        interval = _interval(items[pair.first], items[pair.second], what=what)
    except UsageError as error:
        return Result(claim, pair.text, str(error), unit, NOT_MEASURED, pair.is_ours)
    verdict = interval.verdict(pair.expected, pair.margin)
    return Result(claim, pair.text, interval, unit, verdict, pair.is_ours)


def _interval(first: Items, second: Items, *, what: str) -> Interval:
    """Compare over the seeds that both have, where they are three; else over what every run has.

    Pairs share seed and part. Of a seed that several parts have the mean counts, once: it started
    from the same weights and saw the same batches in each.
    """
    pairs = sorted(first.keys() & second.keys())
    if not pairs:
        raise UsageError("no seed was measured of both, side by side")
    seeds = sorted({pair.seed for pair in pairs})
    parts = {pair.part for pair in pairs}
    if len(seeds) >= 3:

        def by_seed(items: Items) -> list[float]:
            return [
                float(np.mean([np.mean(items[pair]) for pair in pairs if pair.seed == seed]))
                for seed in seeds
            ]

        interval = over_seeds(by_seed(first), by_seed(second))
        within = f" within {len(parts)} parts" if len(parts) > 1 else ""
        return dataclasses.replace(interval, basis=interval.basis + within)
    words = f"{len(pairs)} seeds" if len(seeds) == len(pairs) else f"{len(pairs)} runs side by side"
    return hull([over_items(first[pair], second[pair], what=what) for pair in pairs], of=words)
