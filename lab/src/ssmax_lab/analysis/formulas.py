"""What is computed without a record: figures 1 and 3, the RoPE limit, where a loss breaks, fits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ssmax.errors import UsageError
from ssmax.ops.length import initial_s, initial_sqrt_log_s, rope_limit

FIGURE_1_S = 0.43
"""The s of the paper's first figure; not an initial value."""
FIGURE_3_SIZES = (10, 100, 1000, 10_000)
BROKEN = 0.25
"""Nats above the loss just past the training length."""


def softmax_output_of_last(z: np.ndarray, factor: float) -> float:
    """Compute the last output of softmax over factor z."""
    scaled = factor * (z - z.max())
    weights = np.exp(scaled)
    return float(weights[-1] / weights.sum())


def figure1_output(n: int, factor: float) -> float:
    """Compute the largest output of softmax over factor (-2, ..., -2, 3): n entries."""
    return softmax_output_of_last(np.append(np.full(n - 1, -2.0), 3.0), factor)


def figure3_input(n: int, z_max: float) -> np.ndarray:
    """Make (0, 1/(n-2), ..., 1, z_max): n entries."""
    return np.append(np.linspace(0.0, 1.0, n - 1), z_max)


def figure3_output(n: int, z_max: float, factor: float) -> float:
    """Compute the last output of softmax over factor times that input."""
    return softmax_output_of_last(figure3_input(n, z_max), factor)


def ssmax_factor(n: int) -> float:
    """Compute s log n at the figures' s."""
    return FIGURE_1_S * math.log(n)


def z_max_needed(n: int, factor: float) -> float:
    """Find the z_max whose output in figure 3 is a half."""
    low, high = 0.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        is_enough = figure3_output(n, middle, factor) >= 0.5
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def first_s(rule: str, train_length: int) -> float:
    """Compute the s that a rule begins with."""
    if rule == "temperature":
        return 1.0
    return (initial_sqrt_log_s if rule == "sqrt_log" else initial_s)(train_length)


def rope_limit_of(train_length: int, base: float, rotary_dim: int, base_factor: float) -> float:
    """Compute the RoPE limit; nothing bounds the positions of a model that rotates no channels."""
    if not rotary_dim:
        return math.inf
    return rope_limit(train_length, base, rotary_dim, base_factor=base_factor)


def breaks_at(losses: Sequence[float], train_length: int) -> int | None:
    """Find the position from which on the loss stays `BROKEN` above that past the training length.

    It is averaged over the half of that length that ends there; None where it does not break.
    """
    level = float(np.mean(losses[train_length : 2 * train_length]))
    width = train_length // 2
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    last = int(np.flatnonzero(smooth <= level + BROKEN)[-1])
    return None if last == len(smooth) - 1 else last + width


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
