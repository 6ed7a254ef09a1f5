"""The paper's eight figures, one function each, from records alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ssmax.records import NeedleScore, NeedleTrial, PositionLoss
from ssmax.report.fits import fit_table, softmax_largest
from ssmax.report.style import look, new_figure

FIGURE_1_S = 0.43
"""The s of the paper's first figure; not an initial value."""


def figure1(sizes: Sequence[int] | None = None) -> Any:
    """C1: softmax's largest output fades with n, SSMax's does not."""
    sizes = sizes or [round(10 ** (power / 8)) for power in range(3, 41)]
    figure, axis = new_figure()
    softmax, ssmax = [], []
    for n in sizes:
        z = np.full(n, -2.0)
        z[-1] = 3.0
        softmax.append(softmax_largest(z))
        ssmax.append(softmax_largest(z, FIGURE_1_S * math.log(n)))
    for name, values in (("a", softmax), ("b", ssmax)):
        style = look(name)
        label = "softmax" if name == "a" else f"SSMax, s = {FIGURE_1_S}"
        axis.plot(sizes, values, color=style.colour, linestyle=style.dash, label=label)
    axis.set(xscale="log", ylim=(0, 1.02), xlabel="input vector size n", ylabel="largest output")
    axis.legend(frameon=False)
    return figure


def figure2(tables: Mapping[str, Sequence[float]]) -> Any:
    """C2: the learnt p_n against n, with a1 log n + a2 and its R^2; one table for each seed."""
    figure, axis = new_figure()
    for name, table in tables.items():
        n = np.arange(2, len(table) + 1)
        axis.plot(n, table[1:], ".", markersize=2, alpha=0.6, label=f"p_n, {name}")
        (log_fit,) = (fit for fit in fit_table(table) if fit.name == "log n")
        label = f"{log_fit.a1:.3g} log n + {log_fit.a2:.3g}, R$^2$ = {log_fit.r2:.3f}"
        axis.plot(n, log_fit.curve, color="#D55E00", label=label)
    axis.set(xlabel="number of keys n", ylabel="learnt p_n")
    axis.legend(frameon=False)
    return figure


def figure3(sizes: Sequence[int] = (10, 100, 1000, 10_000), s: float = FIGURE_1_S) -> Any:
    """C3: what z_max a vector (0 ... 1, z_max) needs before the largest output leads."""
    figure, axes = new_figure(9.0, 4.0, columns=2)
    tops = np.linspace(0.0, 20.0, 201)
    for column, name in enumerate(("a", "b")):
        axis = axes[0, column]
        for shade, n in zip(np.linspace(0.35, 1.0, len(sizes)), sizes, strict=True):
            factor = 1.0 if name == "a" else s * math.log(n)
            largest = [softmax_output_of_last(figure3_input(n, top), factor) for top in tops]
            axis.plot(tops, largest, color=look(name).colour, alpha=shade, label=f"n = {n:,}")
        axis.set(xlabel="z_max", ylabel="output of z_max", ylim=(0, 1.02))
        axis.set_title("softmax" if name == "a" else f"SSMax, s = {s}")
        if name == "b":
            axis.axvline(1.0 + 1.0 / s, color="#777777", linestyle=":", label="1 + 1/s")
        axis.legend(frameon=False)
    return figure


def figure3_input(n: int, z_max: float) -> np.ndarray:
    """(0, 1/(n-2), ..., 1, z_max): n entries."""
    return np.append(np.linspace(0.0, 1.0, n - 1), z_max)


def softmax_output_of_last(z: np.ndarray, factor: float) -> float:
    """The last output of softmax over factor z."""
    scaled = factor * (z - z.max())
    weights = np.exp(scaled)
    return float(weights[-1] / weights.sum())


def figure4(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> Any:
    """C4: learning curves, steps and losses by configuration, smoothed over a fiftieth."""
    figure, axis = new_figure()
    for name, (steps, losses) in curves.items():
        style = look(name)
        width = max(1, len(losses) // 50)
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axis.plot(
            list(steps)[width - 1 :],
            smooth,
            color=style.colour,
            linestyle=style.dash,
            label=style.label,
            linewidth=1.2,
        )
    axis.set(xlabel="step", ylabel="training loss")
    axis.legend(frameon=False)
    return figure


def figure5(losses: Mapping[str, PositionLoss], *, train_length: int) -> Any:
    """C5: loss at every position, the training length marked; means over bins of 1 % each."""
    figure, axis = new_figure()
    for name, record in losses.items():
        style = look(name)
        width = max(1, len(record.mean) // 100)
        count = len(record.mean) // width
        bins = np.asarray(record.mean[: count * width]).reshape(count, width).mean(1)
        places = (np.arange(count) + 0.5) * width
        axis.plot(places, bins, color=style.colour, linestyle=style.dash, label=style.label)
    axis.axvline(train_length, color="#777777", linestyle=":")
    axis.annotate(
        "training length",
        (train_length, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -10),
        textcoords="offset points",
        fontsize=8,
        color="#555555",
    )
    axis.set(xlabel="position", ylabel="test loss")
    axis.legend(frameon=False)
    return figure


def figure6(trials: Mapping[str, Sequence[NeedleTrial]]) -> Any:
    """C6: accuracy by context size and depth, in percent, one map for each configuration."""
    if not trials:
        raise ValueError("figure 6 needs the trials of at least one configuration")
    columns = min(3, len(trials))
    rows = math.ceil(len(trials) / columns)
    figure, axes = new_figure(3.2 * columns, 2.9 * rows, columns=columns, rows=rows)
    grid = np.atleast_1d(np.asarray(axes, dtype=object)).ravel()
    for axis, (name, found) in zip(grid, trials.items(), strict=False):
        lengths, depths, accuracy = accuracy_map(found)
        axis.imshow(accuracy, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=60, fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=7)
        axis.set_title(look(name).label, fontsize=9)
        axis.set(xlabel="context size", ylabel="depth")
        for row in range(len(depths)):
            for column in range(len(lengths)):
                value = accuracy[row, column]
                axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=5,
                          color="white" if value < 0.6 else "black")  # fmt: skip
    for axis in grid[len(trials) :]:
        axis.set_visible(False)
    figure.colorbar(grid[0].images[0], ax=grid.tolist(), label="accuracy", shrink=0.8)
    return figure


def accuracy_map(trials: Sequence[NeedleTrial]) -> tuple[list[int], list[float], np.ndarray]:
    """Context sizes, depths, and the share of whole numbers: (depths, sizes)."""
    lengths = sorted({trial.length for trial in trials})
    depths = sorted({trial.depth for trial in trials})
    total = np.zeros((2, len(depths), len(lengths)))
    for trial in trials:
        place = depths.index(trial.depth), lengths.index(trial.length)
        total[0][place] += trial.is_whole
        total[1][place] += 1
    return lengths, depths, total[0] / np.maximum(total[1], 1)


def figure7(scores: Mapping[str, NeedleScore], *, heads: int = 25) -> Any:
    """C7: the needle scores of the top heads, for the paper's needle."""
    figure, axis = new_figure()
    for name, record in scores.items():
        style = look(name)
        ranked = sorted((s for row in record.number_scores for s in row), reverse=True)[:heads]
        places = range(1, len(ranked) + 1)
        axis.plot(places, ranked, color=style.colour, linestyle=style.dash, marker="o",
                  markersize=3, label=f"{style.label}: {said_word(record)}")  # fmt: skip
    axis.set(xlabel="head, by rank", ylabel="needle score", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return figure


def figure8(scores: Mapping[str, Sequence[NeedleScore]]) -> Any:
    """C8: the top needle score of every trial, sorted; the marker says what was answered."""
    markers = {"whole number": "o", "first digit": "^", "wrong": "x"}
    figure, axis = new_figure()
    for name, trials in scores.items():
        style = look(name)
        ranked = sorted(trials, key=lambda trial: -top_score(trial))
        axis.plot(
            range(1, len(ranked) + 1),
            [top_score(trial) for trial in ranked],
            color=style.colour,
            linestyle=style.dash,
            label=style.label,
            linewidth=1,
        )
        for word, marker in markers.items():
            places = [i for i, trial in enumerate(ranked, 1) if said_word(trial) == word]
            values = [top_score(ranked[place - 1]) for place in places]
            axis.plot(places, values, marker, color=style.colour, markersize=4, linestyle="none")
    for word, marker in markers.items():
        axis.plot([], [], marker, color="#555555", linestyle="none", label=word)
    axis.set(xlabel="trial, by rank", ylabel="top needle score", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return figure


def top_score(trial: NeedleScore) -> float:
    """The largest needle score of all heads."""
    return max(score for row in trial.number_scores for score in row)


def said_word(trial: NeedleScore | NeedleTrial) -> str:
    """What a trial came to, in words."""
    if trial.is_whole:
        return "whole number"
    return "first digit" if trial.first_digit else "wrong"
