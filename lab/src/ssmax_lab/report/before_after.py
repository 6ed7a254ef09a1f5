"""A model before and after its context was extended: a table, and whether it is worth having."""

import itertools
from collections.abc import Sequence

import numpy as np

from ssmax_lab.records import NeedleTrial, PositionLoss

NOTICEABLE = 0.01
"""Nats of loss below which two models are called equal."""
FOUND = 0.2
"""Of needles beyond the trained length: how many more have to be found to be worth something."""


class BeforeAfter:
    """The records of two models on the same texts and needles."""

    def __init__(
        self,
        loss_before: PositionLoss,
        needles_before: Sequence[NeedleTrial],
        loss_after: PositionLoss,
        needles_after: Sequence[NeedleTrial],
        *,
        train_length: int,
    ) -> None:
        self.names = loss_before.run, loss_after.run
        self.train_length = train_length
        self.documents = loss_after.count
        self.ranges = list(itertools.pairwise(loss_after.edges))
        self.losses = [np.mean(one.binned, 0) for one in (loss_before, loss_after)]
        """By range of positions."""
        self.contexts = sorted({one.length for one in needles_after})
        self.found = [
            [
                float(np.mean([one.is_whole for one in trials if one.length == length]))
                for length in self.contexts
            ]
            for trials in (needles_before, needles_after)
        ]
        """Share of needles, by context."""
        self.trials = len(needles_after) // max(1, len(self.contexts))

    def table(self) -> list[str]:
        """Write the losses and the needles, a column for each model and the difference."""
        widths = [max(10, len(name)) for name in self.names]
        before, after = (f"{name:>{width}}" for name, width in zip(self.names, widths, strict=True))
        lines = [f"{'loss at positions':24}  {before}  {after}  difference"]
        for (start, stop), *values in zip(self.ranges, *self.losses, strict=True):
            lines.append(self._line(f"{start:,} to {stop:,}", values, widths, "{:.3f}", start))
        lines.append("")
        lines.append(f"{'needles found, context':24}  {before}  {after}  difference")
        for length, *values in zip(self.contexts, *self.found, strict=True):
            lines.append(self._line(f"{length:,}", values, widths, "{:.2f}", length - 1))
        lines.append(f"{self.documents} texts, {self.trials} needles of each context")
        return lines

    def verdict(self) -> list[str]:
        """Say in plain sentences what is lost inside the trained length and gained beyond it."""
        inside = [i for i, (_, stop) in enumerate(self.ranges) if stop <= self.train_length]
        beyond = [i for i, (start, _) in enumerate(self.ranges) if start >= self.train_length]
        if not inside or not beyond:
            return []
        lines = [self._inside(self._mean(0, inside), self._mean(1, inside))]
        cut = float(self.losses[0][inside[-1]])
        far_before, far_after = self._mean(0, beyond), self._mean(1, beyond)
        lines.append(
            f"Beyond them the loss is {far_after:.3f}; {self.names[0]} has {far_before:.3f} there."
        )
        predicts = far_after < cut - NOTICEABLE
        gained = self._found_beyond(1) - self._found_beyond(0)
        first, last = self.ranges[inside[-1]]
        window = (
            f"{self.names[0]} has {cut:.3f} at positions {first:,} to {last:,}, so cutting texts "
            f"to their last {self.train_length:,} tokens predicts"
        )
        if predicts and far_after < far_before - NOTICEABLE:
            lines.append(f"Worth having: {window} worse.")
        else:
            needles = (
                f"{self._found_beyond(1):.0%} of the needles beyond the trained length are found, "
                f"{self._found_beyond(0):.0%} before"
            )
            if gained >= FOUND:
                lines.append(
                    f"Worth having to find what is far back ({needles}), not to predict text: "
                    f"{window} as well or better."
                )
            else:
                lines.append(f"Not worth having: {window} as well or better, and {needles}.")
        return lines

    def _inside(self, before: float, after: float) -> str:
        what = f"Inside {self.train_length:,} tokens"
        if abs(after - before) < NOTICEABLE:
            return f"{what} nothing is lost ({after:.3f} nats, {before:.3f} before)."
        verb = "lose" if after > before else "gain"
        return (
            f"{what} you {verb} {abs(after - before):.2f} nats ({after:.3f}, {before:.3f} before)."
        )

    def _mean(self, which: int, ranges: Sequence[int]) -> float:
        """Average the loss over the positions of some ranges."""
        widths = [self.ranges[i][1] - self.ranges[i][0] for i in ranges]
        return float(np.average(self.losses[which][list(ranges)], weights=widths))

    def _found_beyond(self, which: int) -> float:
        found = [
            share
            for length, share in zip(self.contexts, self.found[which], strict=True)
            if length > self.train_length
        ]
        return float(np.mean(found)) if found else 0.0

    def _line(
        self, what: str, values: Sequence[float], widths: Sequence[int], style: str, start: int
    ) -> str:
        before, after = values
        cells = [f"{style.format(v):>{w}}" for v, w in zip(values, widths, strict=True)]
        beyond = "  beyond the training" if start >= self.train_length else ""
        change = f"{after - before:+.3f}" if style == "{:.3f}" else f"{after - before:+.2f}"
        return f"{what:24}  {cells[0]}  {cells[1]}  {change:>10}{beyond}"
