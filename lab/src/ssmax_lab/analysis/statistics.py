"""Is one smaller than the other? An effect, a 95 % interval, and what may be concluded.

Seeds alone are samples of models, so only an interval over seeds can give a verdict. Documents,
needles, values of n, heads and stretches of one curve know nothing of what another seed would have
given: inside a study of several seeds, intervals over them were decisive for the wrong sign.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax_lab.records import Comparison

Side = Literal["below", "above"]

EXACT = "computed exactly"
"""What a comparison is over in which there is no chance."""
FEWEST_SEEDS = 3
"""Of fewer there is an effect, and no verdict."""
LEVEL = 0.05
NEGLIGIBLE = 1e-3
"""Nats, or shares: nobody would see it, though seeds may agree on it."""

SUPPORTED, CONTRADICTED, NO_DIFFERENCE, INCONCLUSIVE, TOO_FEW_SEEDS, TOO_SMALL, NOT_MEASURED = (
    "supported", "contradicted", "no difference", "inconclusive", "too few seeds",
    "model too small", "not measured",
)  # fmt: skip
SECONDARY = "secondary"
"""Stands where a verdict would: the comparison is printed, and decides nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The mean of paired differences, first minus second, and where it may lie."""

    effect: float
    """NaN where nothing could be compared."""
    basis: str
    """What it is an interval over, in words; or why there is none."""
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """How likely seeds would differ as much if there were no effect; two-sided."""

    @property
    def is_measured(self) -> bool:
        """Whether there is an effect at all."""
        return not math.isnan(self.effect)

    def verdict(self, expected: Side, *, margin: float = 0.0, p: float | None = None) -> str:
        """Judge whether the first is on its side of the second, p adjusted for what else is read.

        Off 0 it is supported or contradicted; else, if the whole interval is within the margin,
        there is no larger difference (stricter than two one-sided tests, whose interval is of
        90 %); else nothing is known.
        """
        if not self.is_measured:
            return NOT_MEASURED
        if self.low is None or self.high is None:
            return TOO_FEW_SEEDS
        is_exact = self.basis == EXACT
        is_off = is_exact or (p is not None and p <= LEVEL and abs(self.effect) >= NEGLIGIBLE)
        if is_off and self.effect != 0.0:
            return SUPPORTED if (self.effect < 0.0) == (expected == "below") else CONTRADICTED
        if -margin < self.low and self.high < margin:
            return f"{NO_DIFFERENCE} larger than {margin:g}"
        return INCONCLUSIVE


def over_seeds(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Compare one value for each seed, the same seeds in the same order, by Student's t."""
    a, b = np.asarray(first, float), np.asarray(second, float)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise UsageError(f"what is compared must come in pairs, got {a.shape} and {b.shape} values")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UsageError("what is compared must be finite")
    differences, count = a - b, a.size
    mean, basis = float(differences.mean()), f"{count} seed{'s' * (count > 1)}"
    if count < FEWEST_SEEDS:
        return Interval(effect=mean, basis=basis)
    # Imported here because it takes a second.
    t = require("scipy.stats", install="ssmax-lab", purpose="an interval of Student's t").t
    error = float(differences.std(ddof=1) / np.sqrt(count))
    half = float(t.ppf(1 - LEVEL / 2, count - 1)) * error
    # All seeds may give the very same, such as no number at all.
    p = float(2 * t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0.0)
    return Interval(effect=mean, low=mean - half, high=mean + half, p=p, basis=basis)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of comparisons that are read together, by Holm's method."""
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.asarray(p_values, float)[order] * factors)
    return np.minimum(adjusted, 1.0).tolist()


def exact(effect: float) -> Interval:
    """Make the interval of a number that no chance is in."""
    return Interval(effect=effect, low=effect, high=effect, basis=EXACT)


def overall(verdicts: Sequence[str]) -> str:
    """Judge a claim by its primary comparisons alone: what all of them say, or that it is open."""
    told = list(dict.fromkeys(one for one in verdicts if one != SECONDARY))
    if len(told) <= 1:
        return told[0] if told else NOT_MEASURED
    decisive = (CONTRADICTED, TOO_SMALL, TOO_FEW_SEEDS)
    return next((word for word in decisive if word in told), INCONCLUSIVE)


def verdict_of(claim: str, comparisons: Sequence[Comparison]) -> str:
    """Tell the verdict of a claim, the one that stands everywhere."""
    return overall([one.verdict for one in comparisons if one.claim == claim])
