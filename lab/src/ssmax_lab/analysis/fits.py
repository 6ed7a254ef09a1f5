"""What shape a curve has: the logarithm against its rivals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ssmax.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """a1 f(n) + a2, and how much of the variance it explains."""

    name: str
    shape: str
    """A key of `SHAPES`, or "power"."""
    a1: float
    a2: float
    r2: float
    curve: list[float]


SHAPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "log n": np.log,
    "n": lambda n: n,
    "sqrt n": np.sqrt,
}
POWERS = [power / 100 for power in range(2, 200, 2)]


def fit_shapes(n: Sequence[int], values: Sequence[float]) -> list[Fit]:
    """Fit each shape by least squares, and by the best power of n, the best fit first."""
    x, y = np.asarray(n, float), np.asarray(values, float)
    if x.size != y.size or x.size < 3 or x.min() < 1:
        raise UsageError(f"a fit needs at least 3 values at n >= 1, got {x.size} and {y.size}")
    fits = [_fit(name, name, shape(x), y) for name, shape in SHAPES.items()]
    powers = (_fit(f"n^{p:g}", "power", x**p, y) for p in POWERS)
    fits.append(max(powers, key=lambda fit: fit.r2))
    return sorted(fits, key=lambda fit: -fit.r2)


def fit_table(table: Sequence[float], first: int = 2) -> list[Fit]:
    """Fit the probe's p_n by every shape, from n = 2 on.

    A single key has weight 1 whatever p_1 is, so that p_1 never learns.
    """
    return fit_shapes(range(first, len(table) + 1), table[first - 1 :])


def _fit(name: str, shape: str, x: np.ndarray, y: np.ndarray) -> Fit:
    design = np.stack((x, np.ones_like(x)), axis=1)
    (a1, a2), *_ = np.linalg.lstsq(design, y, rcond=None)
    curve = a1 * x + a2
    total = float(((y - y.mean()) ** 2).sum())
    r2 = 1.0 - float(((y - curve) ** 2).sum()) / total if total > 0 else math.nan
    return Fit(name=name, shape=shape, a1=float(a1), a2=float(a2), r2=r2, curve=curve.tolist())
