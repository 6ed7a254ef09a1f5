"""What follows from a training length: the first s, the RoPE limit, and where a loss breaks."""

import math
from collections.abc import Sequence

import numpy as np

from ssmax.ops.length import initial_s, initial_sqrt_log_s, rope_limit

BROKEN = 0.25
"""Nats above the loss just past the training length."""


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
