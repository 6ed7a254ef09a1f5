"""Is one smaller than the other? An effect, a 95 % interval, and a verdict that may be "unknown".

Over three seeds or more the interval is that of the paired differences between seeds (Student's t).
With fewer it is over test documents or trials, and says so: it knows nothing of what another seed
would have given. It is a paired bootstrap, but Student's t again where there are less than 30 of
them: of five a bootstrap holds the truth five times in six. Of two seeds both must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ssmax._extras import require
from ssmax.errors import UsageError

Verdict = Literal["supported", "contradicted", "not resolved"]
Side = Literal["below", "above", "near"]

EXACT = "computed exactly"
"""What a comparison is over in which there is no chance."""
NEAR_NATS = 0.02
"""Two losses that differ by less are called about equal; our choice."""
NEGLIGIBLE = 1e-3
"""Nats, or shares: nobody would see it, though paired trials of one run can tell it from 0."""
BOOTSTRAP_DRAWS = 10_000
FEWEST_DRAWN_FROM = 30
"""Of fewer a bootstrap's interval is too narrow."""
_MOST_AT_ONCE = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The mean of paired differences, first minus second, and where it may lie."""

    effect: float
    low: float
    high: float
    basis: str
    """What it is an interval over, in words."""

    def verdict(self, expected: Side, margin: float = 0.0) -> Verdict:
        """Judge whether the first is on its side of the second.

        Only an interval off 0 decides, and only of an effect that is not negligible.
        `near` means within the margin: an interval inside of it supports, one outside contradicts.
        """
        if expected == "near":
            if -margin < self.low and self.high < margin:
                return "supported"
            is_off = self.high < -margin or self.low > margin
            return "contradicted" if is_off else "not resolved"
        below, above = self.high < 0.0, self.low > 0.0
        if not (below or above) or abs(self.effect) < NEGLIGIBLE:
            return "not resolved"
        return "supported" if below == (expected == "below") else "contradicted"


def over_seeds(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Compare one value for each seed, the same seeds in the same order."""
    differences = _differences(first, second)
    if differences.size < 3:
        raise UsageError(f"an interval over seeds needs at least 3 of them, got {differences.size}")
    return _students(differences, basis=f"{differences.size} seeds")


def _students(differences: np.ndarray, *, basis: str) -> Interval:
    # Imported here because it takes a second.
    scipy_stats = require("scipy.stats", install="ssmax-lab", purpose="an interval of Student's t")
    # Rounded as in printed tables, by which the records in results/ were judged.
    quantile = round(scipy_stats.t.ppf(0.975, differences.size - 1), 3)
    half = float(quantile * differences.std(ddof=1) / np.sqrt(differences.size))
    mean = float(differences.mean())
    return Interval(effect=mean, low=mean - half, high=mean + half, basis=basis)


def over_items(
    first: Sequence[float], second: Sequence[float], *, what: str, seed: int = 0
) -> Interval:
    """Compare one value for each document or trial of one seed, the same ones in the same order."""
    differences = _differences(first, second)
    if differences.size < 2:
        raise UsageError(f"an interval needs at least 2 {what}, got {differences.size}")
    if differences.size < FEWEST_DRAWN_FROM:
        return _students(differences, basis=f"{differences.size} {what}, one seed")
    generator = np.random.default_rng(seed)
    # A few draws at a time: thousands of trials times thousands of draws would fill the memory.
    at_once = max(1, _MOST_AT_ONCE // differences.size)
    means = [
        differences[generator.integers(0, differences.size, (draws, differences.size))].mean(1)
        for draws in _parts(BOOTSTRAP_DRAWS, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(
        effect=float(differences.mean()),
        low=float(low),
        high=float(high),
        basis=f"bootstrap over {differences.size} {what}, one seed",
    )


def hull(intervals: Sequence[Interval], *, of: str) -> Interval:
    """Join the intervals of a few runs, `of` in words: the mean effect, and all that any allows.

    So seeds that disagree decide nothing, however many documents they were measured on.
    """
    if len(intervals) == 1:
        return intervals[0]
    return Interval(
        effect=float(np.mean([one.effect for one in intervals])),
        low=min(one.low for one in intervals),
        high=max(one.high for one in intervals),
        basis=intervals[0].basis.replace("one seed", f"the hull of {of}"),
    )


def exact(effect: float) -> Interval:
    """Make the interval of a number that no chance is in."""
    return Interval(effect=effect, low=effect, high=effect, basis=EXACT)


def _parts(total: int, most: int) -> list[int]:
    """Split a number into such as are at most so large."""
    return [min(most, total - start) for start in range(0, total, most)]


def _differences(first: Sequence[float], second: Sequence[float]) -> np.ndarray:
    a, b = np.asarray(first, float), np.asarray(second, float)
    if a.shape != b.shape or a.ndim != 1:
        raise UsageError(f"what is compared must come in pairs, got {a.shape} and {b.shape} values")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UsageError("what is compared must be finite")
    return a - b


def overall(verdicts: Sequence[str]) -> str:
    """Judge a claim by the verdicts of its comparisons; it is as strong as its weakest."""
    if not verdicts:
        return "not measured"
    if "contradicted" in verdicts:
        return "contradicted"
    # Also one that could not be made holds a claim back.
    return "supported" if set(verdicts) == {"supported"} else "not resolved"
