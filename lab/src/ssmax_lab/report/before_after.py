"""Is the longer context of an extended model worth having? In plain sentences."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ssmax_lab.analysis.measures import retrieval_accuracy

NOTICEABLE = 0.01
"""Nats of loss below which two models are called equal."""
FOUND = 0.2
"""Of needles beyond the trained length: how many more have to be found to be worth something."""


def extension_verdict(
    before: Sequence[Any], after: Sequence[Any], *, train_length: int
) -> list[str]:
    """Say what is lost inside the trained length and gained beyond it, on the same texts.

    Of each model: its loss, then its needles.
    """
    edges = np.array(after[0].edges)
    inside, beyond = edges[1:] <= train_length, edges[:-1] >= train_length
    if not inside.any() or not beyond.any():
        return []
    losses = [np.mean(loss.binned, 0) for loss, *_ in (before, after)]
    near, far = (
        [float(np.average(one[part], weights=np.diff(edges)[part])) for one in losses]
        for part in (inside, beyond)
    )
    accuracy = retrieval_accuracy(train_length, is_long=True)
    found = [accuracy(trials) for _, *trials in (before, after)]
    name, last = before[0].run, int(np.flatnonzero(inside)[-1])
    cut, (start, stop) = float(losses[0][last]), list(itertools.pairwise(edges.tolist()))[last]
    window = (
        f"{name} has {cut:.3f} at positions {start:,} to {stop:,}, so cutting texts "
        f"to their last {train_length:,} tokens predicts"
    )
    needles = (
        f"{found[1]:.0%} of the needles beyond the trained length are found, {found[0]:.0%} before"
    )
    change, lost = near[1] - near[0], f"({near[1]:.3f} nats, {near[0]:.3f} before)"
    told = f"you {'lose' if change > 0 else 'gain'} {abs(change):.2f} nats"
    if abs(change) < NOTICEABLE:
        told = "nothing is lost"
    if far[1] < min(cut, far[0]) - NOTICEABLE:
        verdict = f"Worth having: {window} worse."
    elif found[1] - found[0] >= FOUND:
        verdict = (
            f"Worth having to find what is far back ({needles}), not to predict text: "
            f"{window} as well or better."
        )
    else:
        verdict = f"Not worth having: {window} as well or better, and {needles}."
    return [
        f"Inside {train_length:,} tokens {told} {lost}.",
        f"Beyond them the loss is {far[1]:.3f}; {name} has {far[0]:.3f} there.",
        verdict,
    ]
