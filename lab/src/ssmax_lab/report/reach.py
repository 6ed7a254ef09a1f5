"""How far rotary positions carry a model: by arithmetic, and where its loss breaks."""

import math
from collections.abc import Sequence

import numpy as np

BROKEN = 0.25
"""Nats above the loss just past the training length."""


def carries_to(train_length: int, *, pairs: int, theta: float, factor: float) -> float:
    """The position up to which `theta` times `factor` shows no pair an angle it was not trained at.

    Pairs that make a whole turn within the training length have seen all angles. Of the others the
    fastest is slowed least, by factor^(i / pairs): the critical dimension of Liu et al., "Scaling
    Laws of RoPE-based Extrapolation", arXiv 2310.05209. Infinite where all make a whole turn.
    """
    turns = [train_length * theta ** (-i / pairs) / math.tau for i in range(pairs)]
    first = next((i for i, whole in enumerate(turns) if whole < 1.0), None)
    return math.inf if first is None else train_length * factor ** (first / pairs)


def breaks_at(losses: Sequence[float], train_length: int) -> int | None:
    """The position from which on the loss stays `BROKEN` above that just past the training length.

    It is averaged over the half of that length that ends there; None where it does not break.
    """
    level = float(np.mean(losses[train_length : 2 * train_length]))
    width = train_length // 2
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    last = int(np.flatnonzero(smooth <= level + BROKEN)[-1])
    return None if last == len(smooth) - 1 else last + width
