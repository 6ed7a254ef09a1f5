"""The paper's claims as comparisons with numbers: what is expected, what was measured, a verdict.

A claim is never tuned to pass. What the paper says of two configurations is one comparison, with an
effect and an interval; where this scale cannot tell, it says so.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.records import Comparison, Fading, NeedleScore, NeedleTrial, PositionLoss, Provenance
from ssmax_lab.report.captions import NEAR_NATS
from ssmax_lab.report.curves import places_beyond, top_score
from ssmax_lab.report.figures import (
    FIGURE_1_S,
    figure1_output,
    figure3_input,
    softmax_output_of_last,
)
from ssmax_lab.report.findings import ByReplica, Findings, Replica
from ssmax_lab.report.fits import fit_table
from ssmax_lab.study.presets import FAMILY, HELD, MEAN_LOG, RIVALS
from ssmax_lab.study.statistics import Interval, Side, exact, hull, over_items, over_seeds

CONTROL = "temperature"
NOT_MEASURED = "not measured"
STRETCHES = 5
"""A learning curve is compared in so many stretches after its first tenth, the warm-up; few and
long, since neighbouring steps of a run differ alike."""
TOP_SHARE = 25 / 144
"""The share of the heads that figure 7 shows."""

Items = dict[Replica, list[float]]
"""A value for every document, trial or stretch, the same ones for every configuration."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What the paper says of two configurations."""

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
    """Every comparison that what was measured allows."""
    results = [*_claim_1(findings), *_claim_2(findings), *_claim_3()]
    for claim in (_claim_4, _claim_5, _claim_6, _claim_7, _claim_8):
        results += claim(findings)
    return [
        Comparison(
            claim=result.claim,
            text=result.text,
            **_told(result.interval),
            unit=result.unit,
            verdict=result.verdict,
            is_ours=result.is_ours,
            provenance=provenance,
        )
        for result in results
    ]


def _told(interval: Interval | str) -> dict[str, Any]:
    if isinstance(interval, str):
        return {"effect": None, "low": None, "high": None, "basis": interval}
    return dataclasses.asdict(interval)


def _claim_1(findings: Findings) -> list[Result]:
    sizes = [2**power for power in range(1, 17)]
    faded = exact(figure1_output(sizes[-1], 1.0) - figure1_output(sizes[0], 1.0))
    least = exact(min(figure1_output(n, FIGURE_1_S * math.log(n)) for n in sizes) - 0.8)
    return [
        Result("C1", "softmax's largest output falls between n = 2 and n = 65,536", faded,
               "of the weight", faded.verdict("below")),
        Result("C1", "SSMax's (s = 0.43) stays above 0.8 for every n between", least,
               "over 0.8", least.verdict("above")),
        *_in_the_heads(findings),
    ]  # fmt: skip


def _in_the_heads(findings: Findings) -> list[Result]:
    """What the vectors of claim 1 are in a model: does a head's largest weight fall with n?"""
    length = findings.train_length

    def falls(record: Fading) -> list[float]:
        before, after = places_beyond(record, length)
        weights = np.asarray(record.largest)
        return (weights[:, :, after] - weights[:, :, before]).ravel().tolist()

    items = {
        name: {seed: falls(record) for seed, record in by_seed.items()}
        for name, by_seed in findings.fading.items()
    }
    pairs = [
        Pair("b", "above", name, "beyond the training length the largest weight of (b)'s heads "
             f"falls less than {_called(name)}'s", is_papers=False)
        for name in ("a", CONTROL)
    ]  # fmt: skip
    return _judged("C1", pairs, items, what="heads", unit="of the weight")


def _claim_2(findings: Findings) -> list[Result]:
    if not findings.tables:
        return []
    fits = {seed: fit_table(table) for seed, table in findings.tables.items()}
    squares: dict[str, Items] = {"log n": {}, "n": {}, "sqrt n": {}, "power": {}}
    for seed, table in findings.tables.items():
        for fit in fits[seed]:
            off = np.asarray(table[1:]) - np.asarray(fit.curve)
            name = fit.name if fit.name in squares else "power"
            squares[name][seed] = (off**2 / max(np.var(table[1:]), 1e-30)).tolist()
    slopes = [fit.a1 for found in fits.values() for fit in found if fit.name == "log n"]
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
    def needed(n: int, scaled: bool) -> float:
        """The z_max whose output is a half."""
        factor = FIGURE_1_S * math.log(n) if scaled else 1.0
        low, high = 0.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            is_enough = softmax_output_of_last(figure3_input(n, middle), factor) >= 0.5
            low, high = (low, middle) if is_enough else (middle, high)
        return high

    sizes = [10**power for power in range(1, 6)]
    softmax, ssmax = ([needed(n, scaled) for n in sizes] for scaled in (False, True))
    grows = exact(min(np.diff(softmax)))
    bounded = exact(max(ssmax) - (1 + 1 / FIGURE_1_S))
    return [
        Result("C3", "the z_max that softmax needs grows with every tenfold n to 100,000", grows,
               "a step", grows.verdict("above")),
        Result("C3", "the z_max that SSMax needs never exceeds 1 + 1/s", bounded,
               "over 1 + 1/s", bounded.verdict("below")),
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
    curves = {
        name: {seed: _stretches(losses) for seed, (_, losses) in by_seed.items()}
        for name, by_seed in findings.curves.items()
    }
    return _judged("C4", pairs, curves, what="stretches of the run", unit="nats")


def _stretches(losses: Sequence[float]) -> list[float]:
    kept = np.asarray(losses[len(losses) // 10 :], float)
    return [float(part.mean()) for part in np.array_split(kept, min(STRETCHES, kept.size))]


def _claim_5(findings: Findings) -> list[Result]:
    length = findings.train_length

    def mean(record: PositionLoss, is_long: bool) -> list[float]:
        edges = np.asarray(record.edges)
        # A range that holds the training length is on neither side.
        columns = edges[:-1] >= length if is_long else edges[1:] <= length
        if not columns.any():
            return []
        widths = np.diff(edges).astype(float)
        values, widths = np.asarray(record.binned)[:, columns], widths[columns]
        return (values * widths / widths.sum()).sum(1).tolist()

    def items(losses: ByReplica[PositionLoss], *, is_long: bool) -> dict[str, Items]:
        return {
            name: {seed: mean(record, is_long) for seed, record in by_seed.items()}
            for name, by_seed in losses.items()
        }

    far = [
        Pair("b", "below", "a", "beyond the training length (b) loses less than (a)"),
        Pair("c", "below", "a", "beyond the training length (c) loses less than (a)"),
        Pair("d", "above", "b", "beyond the training length (d) is degraded: above (b)"),
        Pair("f", "above", "b", "beyond the training length (f) does not quite reach (b)"),
        Pair("f", "below", "a", "beyond the training length (f) loses less than (a)"),
        Pair("b", "below", CONTROL, "beyond the training length (b) loses less than the control"),
    ]
    near = [Pair("e", "above", "a", "within the training length (e) loses more than (a)")]
    same_theta = [
        Pair("b", "below", name, "beyond the training length, theta unchanged, (b) loses less than "
             f"{_called(name)}", is_papers=False)
        for name in ("a", CONTROL)
    ]  # fmt: skip
    losses, unchanged = findings.position_losses, findings.same_theta_losses
    for name in (name for name in FAMILY if name in losses):
        under = f"under {'a ' * (name == 'constant')}{name}, put in after training"
        far += [
            Pair(name, "below", "a", f"beyond the training length (a) loses less {under}, than "
                 "under softmax", is_papers=False),
            Pair("b", "below", name, f"beyond the training length (b) loses less than (a) {under}",
                 is_papers=False),
        ]  # fmt: skip
    far += [
        Pair("b", "below", name, f"beyond the training length (b) loses less than {name}, trained",
             is_papers=False)
        for name in RIVALS
        if name in losses
    ]  # fmt: skip
    if MEAN_LOG in losses:
        far += [
            Pair("c", "below", MEAN_LOG, "beyond the training length (c) loses less than what was "
                 "trained with a constant, its mean", is_papers=False),
            Pair(MEAN_LOG, "below", "a", "beyond the training length what was trained with a "
                 "constant, (c)'s mean, loses less than (a)", is_papers=False),
        ]  # fmt: skip
    held = "loses less than with n held at the training length"
    far += [
        Pair(base, "below", name, f"beyond the training length ({base}) {held}", is_papers=False)
        for name, base in HELD.items()
        if name in losses
    ]
    return [
        *_judged("C5", far, items(losses, is_long=True), what="documents", unit="nats"),
        *_judged("C5", near, items(losses, is_long=False), what="documents", unit="nats"),
        *_judged("C5", same_theta, items(unchanged, is_long=True), what="documents", unit="nats"),
    ]


def _claim_6(findings: Findings) -> list[Result]:
    def whole(trials: Sequence[NeedleTrial], keep: Callable[[int], bool]) -> list[float]:
        return [float(trial.is_whole) for trial in trials if keep(trial.length)]

    length = findings.train_length
    far = {
        name: {seed: whole(trials, lambda size: size > length) for seed, trials in found.items()}
        for name, found in findings.trials.items()
    }
    pairs = [
        Pair(
            "b",
            "above",
            name,
            f"beyond the training length (b) finds more numbers than {_called(name)}",
        )
        for name in ("a", "c", "d", "e", "f", CONTROL)
    ]
    results = _judged("C6", pairs, far, what="trials", unit="of the numbers")
    if "b" in findings.trials:
        # The size nearest to ten times the training length.
        sizes = sorted({trial.length for trial in next(iter(findings.trials["b"].values()))})
        size = min(sizes, key=lambda size: abs(size - 10 * length))
        found = {
            seed: whole(trials, lambda one: one == size)
            for seed, trials in findings.trials["b"].items()
        }
        half = {seed: [0.5] * len(values) for seed, values in found.items()}
        text = f"(b) still finds more than half of the numbers at {size:,} tokens"
        pair = Pair("b", "above", "half", text)
        results += _judged(
            "C6", [pair], {"b": found, "half": half}, what="trials", unit="over a half"
        )
    return results


def _claim_7(findings: Findings) -> list[Result]:
    def top(score: NeedleScore) -> float:
        ranked = sorted((value for row in score.number_scores for value in row), reverse=True)
        return float(np.mean(ranked[: max(1, round(TOP_SHARE * len(ranked)))]))

    items = {
        name: {seed: [top(score) for score in scores] for seed, scores in by_seed.items()}
        for name, by_seed in findings.papers_needle.items()
    }
    pairs = [
        Pair(
            "b",
            "above",
            name,
            f"(b)'s top heads weigh the paper's needle more than {_called(name)}'s",
        )
        for name in ("a", "c", "d", "e", "f", CONTROL)
    ]
    return _judged("C7", pairs, items, what="haystacks", unit="of the weight")


def _claim_8(findings: Findings) -> list[Result]:
    items = {
        name: {seed: [top_score(score) for score in scores] for seed, scores in by_seed.items()}
        for name, by_seed in findings.scores.items()
    }
    pairs = [
        Pair("b", "above", name, f"the top needle score of (b) is above that of {_called(name)}")
        for name in ("a", "c", "d", "e", "f", CONTROL)
    ]
    pairs += [Pair(name, "above", "a", f"({name}) lies above (a)") for name in ("c", "d", "e", "f")]
    return _judged("C8", pairs, items, what="trials", unit="of the weight")


def _called(name: str) -> str:
    return "the control" if name == CONTROL else f"({name})"


def _judged(
    claim: str, pairs: Sequence[Pair], items: dict[str, Items], *, what: str, unit: str
) -> list[Result]:
    made = [_judge_pair(claim, pair, items, what=what, unit=unit) for pair in pairs]
    # A claim of which nothing was measured is left out whole.
    return made if any(result.verdict != NOT_MEASURED for result in made) else []


def _judge_pair(claim: str, pair: Pair, items: dict[str, Items], *, what: str, unit: str) -> Result:
    """A comparison; one that cannot be made says why, and holds back its claim's verdict."""
    missing = [name for name in (pair.first, pair.second) if name not in items]
    try:
        if missing:
            verb = "was" if len(missing) == 1 else "were"
            raise UsageError(f"{' and '.join(map(_called, missing))} {verb} not measured")
        interval = _interval(items[pair.first], items[pair.second], what=what)
    except UsageError as error:
        return Result(claim, pair.text, str(error), unit, NOT_MEASURED, pair.is_ours)
    verdict = interval.verdict(pair.expected, pair.margin)
    return Result(claim, pair.text, interval, unit, verdict, pair.is_ours)


def _interval(first: Items, second: Items, *, what: str) -> Interval:
    """Over the seeds that both have, where they are three; else over what every run has.

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
