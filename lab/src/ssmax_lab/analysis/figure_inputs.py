"""The inputs of the paper's figures 1 and 3, and what softmax makes of them."""

import math

import numpy as np

FIGURE_1_S = 0.43
"""The s of the paper's first figure; not an initial value."""
FIGURE_3_SIZES = (10, 100, 1000, 10_000)


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
