"""The paper's eight figures and two of ours, a function each, from records alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.analysis.figure_inputs import (
    FIGURE_1_S,
    FIGURE_3_SIZES,
    figure1_output,
    figure3_output,
    ssmax_factor,
)
from ssmax_lab.analysis.fits import fit_table
from ssmax_lab.analysis.measures import (
    accuracy_map,
    by_position,
    by_rank,
    said_word,
    smoothed,
    top_score,
    usual_word,
)
from ssmax_lab.configurations import MEASURED, look
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, Sharpness
from ssmax_lab.report.style import new_figure

Labels = Mapping[str, str] | None
"""What a legend calls configurations, where it is not what it always calls them."""

MOST_NAMES_WITHIN = 6
"""Of a legend."""
WIDTH_OF_NAMES = 2.2
"""Of a legend beside a drawing, in inches."""


def figure1(sizes: Sequence[int] | None = None) -> Any:
    """Draw C1: softmax's largest output fades with n, SSMax's does not."""
    sizes = sizes or [round(10 ** (power / 8)) for power in range(3, 41)]
    figure, axis = new_figure()
    softmax = [figure1_output(n, 1.0) for n in sizes]
    ssmax = [figure1_output(n, ssmax_factor(n)) for n in sizes]
    called = {"a": "softmax", "b": f"SSMax, s = {FIGURE_1_S}"}
    for name, values in (("a", softmax), ("b", ssmax)):
        _curve(axis, name, called, sizes, values)
    axis.set(xscale="log", ylim=(0, 1.02), xlabel="input vector size n", ylabel="largest output")
    _legend(axis)
    return figure


def figure1_in_heads(
    sharpness: Mapping[str, Sequence[Sharpness]], *, train_length: int, labels: Labels = None
) -> Any:
    """Draw C1 in a model: the largest weight of queries that see n keys, means over heads."""
    figure, axis = new_figure()
    for name, records in sharpness.items():
        largest = np.mean([record.largest for record in records], axis=(0, 1, 2))
        _curve(axis, name, labels, records[0].num_keys, largest)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = [share for share in (0.05, 0.1, 0.2, 0.5, 1.0) if share >= axis.get_ylim()[0]]
    axis.set_yticks(ticks, [f"{share:g}" for share in ticks])
    axis.minorticks_off()
    _mark(axis, train_length, "training length")
    axis.set(xlabel="n", ylabel="largest weight, mean over heads")
    _legend(axis)
    return figure


def figure2(tables: Mapping[str, Sequence[float]]) -> Any:
    """Draw C2: the learned p_n against n, with a1 log n + a2 and its R^2; one table for each seed.

    Over log n, in the second panel, what the claim says is a straight line.
    """
    figure, axes = new_figure(9.0, 4.0, columns=2)
    for axis in axes[0]:
        for name, table in tables.items():
            n = np.arange(2, len(table) + 1)
            axis.plot(n, table[1:], ".", markersize=2, alpha=0.6, label=f"p_n, {name}")
            (log_fit,) = (fit for fit in fit_table(table) if fit.name == "log n")
            label = f"{log_fit.a1:.3g} log n + {log_fit.a2:.3g}, R$^2$ = {log_fit.r2:.3f}"
            axis.plot(n, log_fit.curve, color="#D55E00", label=label)
        axis.set(xlabel="number of keys n", ylabel="learned p_n")
    axes[0, 1].set_xscale("log")
    _legend(axes[0, 0])
    return figure


def figure3() -> Any:
    """Draw C3: what z_max a vector (0 ... 1, z_max) needs before the largest output leads."""
    figure, (axes,) = new_figure(9.0, 4.0, columns=2)
    tops = np.linspace(0.0, 20.0, 201)
    shades = np.linspace(0.35, 1.0, len(FIGURE_3_SIZES))
    for axis, name, title in zip(axes, "ab", ("softmax", f"SSMax, s = {FIGURE_1_S}"), strict=True):
        for shade, n in zip(shades, FIGURE_3_SIZES, strict=True):
            factor = 1.0 if name == "a" else ssmax_factor(n)
            largest = [figure3_output(n, top, factor) for top in tops]
            axis.plot(tops, largest, color=look(name).colour, alpha=shade, label=f"n = {n:,}")
        axis.set(xlabel="z_max", ylabel="output of z_max", ylim=(0, 1.02), title=title)
    axes[1].axvline(1.0 + 1.0 / FIGURE_1_S, color="#777777", linestyle=":", label="1 + 1/s")
    for axis in axes:
        _legend(axis)
    return figure


def figure4(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], *, labels: Labels = None
) -> Any:
    """Draw C4: learning curves, steps and losses by configuration, smoothed over a fiftieth."""
    figure, axis = new_figure()
    for name, (steps, losses) in curves.items():
        _curve(axis, name, labels, *smoothed(steps, losses), linewidth=1.2)
    axis.set(xlabel="step", ylabel="training loss")
    _legend(axis)
    return figure


def figure5(
    losses: Mapping[str, Sequence[PositionLoss]],
    *,
    train_length: int,
    rope_limit: float | None = None,
    labels: Labels = None,
) -> Any:
    """Draw C5: loss at every position, training length and RoPE limit marked; means over runs."""
    figure, axis = new_figure()
    for name, records in losses.items():
        _curve(axis, name, labels, *by_position(records))
    _mark(axis, train_length, "training length")
    if rope_limit is not None:
        _mark(axis, rope_limit, "RoPE limit", line=1)
    axis.set(xlabel="position", ylabel="test loss")
    _legend(axis)
    return figure


def figure6(trials: Mapping[str, Sequence[NeedleTrial]], *, labels: Labels = None) -> Any:
    """Draw C6: accuracy by context size and depth, in percent, a map for each configuration."""
    if not trials:
        raise UsageError("figure 6 needs the trials of at least one configuration")
    columns = min(3, len(trials))
    rows = math.ceil(len(trials) / columns)
    figure, axes = new_figure(3.2 * columns, 2.9 * rows, columns=columns, rows=rows)
    grid = np.atleast_1d(np.asarray(axes, dtype=object)).ravel()
    for axis, (name, found) in zip(grid, trials.items(), strict=False):
        lengths, depths, accuracy = accuracy_map(found)
        axis.imshow(accuracy, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=60, fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=7)
        axis.set_title(_label(name, labels), fontsize=9)
        axis.set(xlabel="context size", ylabel="depth")
        for (row, column), value in np.ndenumerate(accuracy):
            axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=5,
                      color="white" if value < 0.6 else "black")  # fmt: skip
    for axis in grid[len(trials) :]:
        axis.set_visible(False)
    figure.colorbar(grid[0].images[0], ax=grid.tolist(), label="accuracy", shrink=0.8)
    return figure


def figure7(scores: Mapping[str, Sequence[NeedleScore]], *, labels: Labels = None) -> Any:
    """Draw C7: the needle scores of the top heads for the paper's needle, means over haystacks."""
    figure, axis = new_figure()
    for name, trials in scores.items():
        ranked = by_rank(trials)
        called = {name: f"{_label(name, labels)}: {usual_word(trials)}"}
        _curve(axis, name, called, range(1, len(ranked) + 1), ranked, marker="o", markersize=3)
    axis.set(xlabel="head, by rank", ylabel="needle score", ylim=(0, None))
    _legend(axis, fontsize=8)
    return figure


def figure8(scores: Mapping[str, Sequence[NeedleScore]], *, labels: Labels = None) -> Any:
    """Draw C8: the top needle score of every trial, sorted; the marker says what was answered.

    By the share of the trials: a configuration of three runs has three times those of one.
    """
    markers = {"whole number": "o", "first digit": "^", "wrong": "x"}
    figure, axis = new_figure()
    for name, trials in scores.items():
        ranked = sorted(trials, key=lambda trial: -top_score(trial))
        places = [100 * rank / len(ranked) for rank in range(1, len(ranked) + 1)]
        tops = list(map(top_score, ranked))
        _curve(axis, name, labels, places, tops, linewidth=1)
        for word, marker in markers.items():
            said = [i for i, trial in enumerate(ranked) if said_word(trial) == word]
            axis.plot([places[i] for i in said], [tops[i] for i in said], marker,
                      color=look(name).colour, markersize=4, linestyle="none")  # fmt: skip
    for word, marker in markers.items():
        axis.plot([], [], marker, color="#555555", linestyle="none", label=word)
    axis.set(xlabel="trial, by rank, % of all", ylabel="top needle score", ylim=(0, None))
    _legend(axis, fontsize=8)
    return figure


def variants(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> Any:
    """Draw every configuration under every variant of a study, a panel for each measure.

    By panel, variant and configuration: a value for each run. A dot is their mean, its line goes
    from the least to the largest. A mean far above all others is written at the edge, so that it
    does not press them together.
    """
    rows = max(len(varied) for varied in panels.values())
    figure, axes = new_figure(4.8 * len(panels), 1.2 + 0.8 * rows, columns=len(panels))
    for axis, (title, varied) in zip(np.ravel(axes), panels.items(), strict=True):
        far = _far([np.mean(values) for found in varied.values() for values in found.values()])
        for row, found in enumerate(varied.values()):
            names = [name for name in MEASURED if found.get(name)]
            for place, name in enumerate(names):
                height = row + 0.8 * ((place + 0.5) / len(names) - 0.5)
                _mean_and_range(axis, found[name], height, look(name).colour, far=far)
        axis.set_yticks(range(len(varied)), list(varied))
        axis.invert_yaxis()
        axis.set_xlabel(title)
    last = np.ravel(axes)[-1]
    drawn = {name for varied in panels.values() for found in varied.values() for name in found}
    for style in (look(name) for name in MEASURED if name in drawn):
        last.plot([], [], "o-", color=style.colour, markersize=4, label=style.label)
    last.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _mean_and_range(
    axis: Any, values: Sequence[float], height: float, colour: str, *, far: float
) -> None:
    mean = np.mean(values)
    if mean > far:
        words, edge = f"{mean:.1f} \N{RIGHTWARDS ARROW}", axis.get_yaxis_transform()
        axis.text(
            1, height, words, transform=edge, color=colour, fontsize=8, ha="right", va="center"
        )
    else:
        axis.plot((min(values), max(values)), (height, height), color=colour)
        axis.plot(mean, height, "o", color=colour, markersize=4)


def _far(means: Sequence[np.floating]) -> float:
    """Above it a mean has left the others: ten times the width of their middle half."""
    low, high = np.quantile(means, (0.25, 0.75)) if means else (0.0, 0.0)
    return float(high + 10 * (high - low)) if high > low else math.inf


def _curve(axis: Any, name: str, labels: Labels, x: Any, y: Any, **options: Any) -> None:
    style = look(name)
    axis.plot(x, y, color=style.colour, linestyle=style.dash, label=_label(name, labels), **options)


def _label(name: str, labels: Labels) -> str:
    return (labels or {}).get(name, look(name).label)


def _mark(axis: Any, place: float, words: str, *, line: int = 0) -> None:
    axis.axvline(place, color="#777777", linestyle=":")
    axis.annotate(
        words,
        (place, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -10 - 12 * line),
        textcoords="offset points",
        fontsize=8,
        color="#555555",
    )


def _legend(axis: Any, **options: Any) -> None:
    """Put names within the drawing; beside it where so many would cover it."""
    if len(axis.get_legend_handles_labels()[1]) > MOST_NAMES_WITHIN:
        options |= {"loc": "upper left", "bbox_to_anchor": (1, 1), "fontsize": 8}
        # The drawing keeps its width.
        axis.figure.set_figwidth(axis.figure.get_figwidth() + WIDTH_OF_NAMES)
    axis.legend(frameon=False, **options)
