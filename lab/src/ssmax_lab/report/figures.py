"""The paper's eight figures and those of a study beside them, each defined once, from records."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ssmax_lab.analysis.findings import ByReplica, Findings
from ssmax_lab.analysis.formulas import (
    FIGURE_1_S,
    FIGURE_3_SIZES,
    figure1_output,
    figure3_output,
    first_s,
    fit_table,
    ssmax_factor,
)
from ssmax_lab.analysis.measures import (
    Curve,
    accuracy_at,
    accuracy_map,
    by_octave,
    by_rank,
    differences,
    last_seen_and_last,
    last_tenth,
    learned,
    mean_between,
    octave_differences,
    pooled,
    retrieval_accuracy,
    said_word,
    smoothed,
    top_score,
    usual_word,
)
from ssmax_lab.configurations import CONTROL, MEASURED, called, look
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, RetrievalGrid, Sharpness
from ssmax_lab.report.charts import Mark, Row, Series, curves, heat_map, over_runs, series_of, short
from ssmax_lab.report.style import Figure, Panel
from ssmax_lab.report.tables import Table, percent

FIRST_SHOWN = ("a", "b", CONTROL)
IN_TITLES = {"a": "softmax", "b": "SSMax", CONTROL: "a learned temperature"}
LESS, LOSS = "loss less (a)'s, nats", "loss, nats"
POINTS = 120
"""Of a curve, at most."""
QUANTILES = 50
"""Of the trials of figure 8."""


def study_figures(findings: Findings) -> dict[str, Figure]:
    """Define the figures of what was measured, by number or name."""
    length, factor = findings.train_length, findings.study["theta_factor"]
    found: dict[str, Figure | None] = {"1": figure1(), "3": figure3()}
    if findings.tables:
        found["2"] = figure2(findings.tables)
    if findings.curves:
        found["4"] = figure4(findings.curves)
    by_base = {
        f"RoPE base x {factor:g} at test time": findings.position_losses,
        "unchanged RoPE base": findings.same_theta_losses,
    }
    if factor == 1 or not findings.study["pretraining"]["model"]["theta"]:
        by_base = {"": findings.position_losses}
    limits = dict(zip(by_base, (findings.rope_limit,), strict=False))
    if by_base := {base: losses for base, losses in by_base.items() if losses}:
        found["5"] = figure5(by_base, train_length=length, rope_limits=limits)
    if findings.trials:
        found["6"] = figure6(pooled(findings.trials))
        found["_retrieval"] = retrieval(findings.trials, train_length=length)
    if findings.papers_needle:
        found["7"] = figure7(pooled(findings.papers_needle))
    if findings.scores:
        found["8"] = figure8(pooled(findings.scores))
    if findings.sharpness:
        found["1_in_heads"] = sharpness(findings.sharpness, train_length=length)
    if findings.grids:
        found["_grid"] = retrieval_grid(findings.grids, train_length=length)
    found["_s"] = scales(findings.scales, train_length=length)
    return {name: figure for name, figure in found.items() if figure is not None}


def figure1(sizes: Sequence[int] | None = None) -> Figure:
    """Draw C1: softmax's largest output falls with n, SSMax's does not."""
    sizes = sizes or [round(10 ** (power / 8)) for power in range(3, 41)]
    series = [
        Series(name="a", label="softmax", colour=look("a").colour),
        Series(name="b", label=f"SSMax, s = {FIGURE_1_S}", colour=look("b").colour),
    ]
    rows = [
        {"name": name, "n": n, "y": short(figure1_output(n, factor(n)))}
        for name, factor in (("a", lambda n: 1.0), ("b", ssmax_factor))
        for n in sizes
    ]
    return Figure(
        title="Softmax's largest output falls to 0 as the input grows; SSMax's stays near 1",
        panels=[
            curves(
                rows, series, x="n", y="largest output", log_x=True, domain=(0, 1), toggles=False
            )
        ],
    )


def figure2(tables: Mapping[Any, Sequence[float]]) -> Figure:
    """Draw C2: the learned p_n against n, with every fit and its R^2; the reader picks the seed."""
    rows: list[Row] = []
    shares: dict[str, list[float]] = {}
    fitted = []
    for replica, table in tables.items():
        measure, fits = f"learned p_n, {replica}", fit_table(table)
        points = {"p": table, **{fit.shape: [math.nan, *fit.curve] for fit in fits}}
        rows += [
            {"name": name, "n": n, "y": short(values[n - 1]), "measure": measure}
            for name, values in points.items()
            for n in np.unique(np.geomspace(2, len(table), POINTS).round().astype(int)).tolist()
        ]
        for fit in fits:
            shares.setdefault(fit.shape, []).append(fit.r2)
            cells = (f"{value:.4g}" for value in (fit.a1, fit.a2, fit.r2))
            fitted.append([measure, fit.name, *cells])
    means = {shape: float(np.mean(share)) for shape, share in shares.items()}
    words = {"power": "the best power of n"}
    colours = {"log n": look("b").colour, "power": "#0072b2", "sqrt n": "#009e73", "n": "#cc79a7"}
    series = [
        Series(name="p", label="learned p_n", colour=look("a").colour),
        *(
            Series(
                name=shape,
                label=f"{words.get(shape, shape)}: R² = {means[shape]:.3f}",
                colour=colours[shape],
                dash="-" if shape == "log n" else "--",
            )
            for shape in sorted(means, key=lambda shape: -means[shape])
        ),
    ]
    title = "The learned p_n is the same for every n"
    if math.isfinite(means["log n"]):
        rival = max(sorted(means.keys() - {"log n"}), key=means.__getitem__)
        title = (
            f"A line in log n explains {percent(means['log n'])} of the learned p_n's variance, "
            f"{words.get(rival, rival)} {percent(means[rival])}"
        )
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    panel = curves(rows, series, x="n", y="", log_x=True, measures=measures)
    fits = Table(header=["seed", "fit", "a1", "a2", "R²"], rows=fitted)
    return Figure(title=title, panels=[dataclasses.replace(panel, tables=[fits, *panel.tables])])


def figure3() -> Figure:
    """Draw C3: what z_max a vector (0 ... 1, z_max) needs before the largest output leads."""
    tops = [round(top, 2) for top in np.linspace(0.0, 20.0, 81).tolist()]
    shades = {
        "softmax": ("#949aa5", "#7a828e", "#545c69", look("a").colour),
        f"SSMax, s = {FIGURE_1_S}": ("#eba76f", "#e68a45", "#de6f1e", look("b").colour),
    }
    panels = []
    for title, colours in shades.items():
        is_ssmax = title != "softmax"
        series = [
            Series(name=f"{n}", label=f"n = {n:,}", colour=colour)
            for n, colour in zip(FIGURE_3_SIZES, colours, strict=True)
        ]
        rows = [
            {
                "name": f"{n}",
                "z_max": top,
                "y": short(figure3_output(n, top, ssmax_factor(n) if is_ssmax else 1.0)),
            }
            for n in FIGURE_3_SIZES
            for top in tops
        ]
        marks = [Mark(x=1 + 1 / FIGURE_1_S, text="1 + 1/s", is_low=True)] if is_ssmax else []
        panels.append(
            curves(
                rows, series, x="z_max", y="output of z_max", title=title, domain=(0, 1),
                marks=marks, toggles=False,
            )
        )  # fmt: skip
    return Figure(
        title="Softmax needs a lead that grows with n; SSMax one of about 1/s, whatever n is",
        panels=panels,
        width=360,
    )


def figure4(found: ByReplica[Curve]) -> Figure:
    """Draw C4: training loss by step, less (a)'s of the same seed and as it is."""
    panel = _loss_panel(
        found,
        series_of(found, FIRST_SHOWN),
        whole=lambda curve: smoothed(*curve),
        less=lambda base, own: smoothed(*_less_by_step(base, own)),
        x="step",
    )
    told = _told_difference("In the last tenth of training", _less(found, last_tenth))
    return Figure(title=told or "Training loss by step", panels=[panel], note=_notes([found]))


def figure5(
    by_base: Mapping[str, ByReplica[PositionLoss]],
    *,
    train_length: int,
    rope_limits: Mapping[str, float | None] | None = None,
) -> Figure:
    """Draw C5: test loss by position, a panel for each RoPE base at test time."""
    every: dict[str, dict[Any, Any]] = {}
    for found in by_base.values():
        for name, runs in found.items():
            every.setdefault(name, {}).update(runs)
    series = series_of(every, FIRST_SHOWN)
    panels, told = [], []
    for base, found in by_base.items():
        limit = (rope_limits or {}).get(base)
        marks = [Mark(x=train_length, text="training length")]
        if limit is not None:
            marks.append(Mark(x=round(limit), text="RoPE limit"))
        panels.append(
            _loss_panel(
                found,
                series,
                whole=lambda record: by_octave(record.mean),
                less=octave_differences,
                x="position",
                title=base,
                log_x=True,
                marks=marks,
            )
        )
        end = limit if limit and len(by_base) > 1 else min(4 * train_length, limit or math.inf)
        where = f"From {train_length:,} to {end:,.0f} tokens" + (f", {base}," if base else "")
        told.append(_told_difference(where, _less(found, mean_between(train_length, round(end)))))
    return Figure(
        title=next(filter(None, told), "Test loss by position"),
        panels=panels,
        width=400 if len(panels) > 1 else 560,
        note=_notes(list(by_base.values())),
    )


def _loss_panel(
    found: ByReplica[Any],
    series: Sequence[Series],
    *,
    whole: Callable[[Any], Any],
    less: Callable[[Any, Any], Any],
    x: str,
    **options: Any,
) -> Panel:
    """Draw losses less (a)'s, where there is such, and on request as they are."""
    by_measure = {
        LESS: differences(found, less),
        LOSS: {name: list(map(whole, runs.values())) for name, runs in found.items()},
    }
    measures = [measure for measure, curves_of in by_measure.items() if curves_of]
    rows: list[Row] = []
    for measure in measures:
        for name, runs in by_measure[measure].items():
            rows += over_runs(name, x, *_aligned(runs), measure=measure)
    form = "+.3f" if len(measures) > 1 else ".3f"
    return curves(rows, series, x=x, y="", measures=measures, form=form, **options)


def _notes(every: Sequence[ByReplica[Any]]) -> str:
    """Say what bands are, and of which configurations there is no difference from (a)."""
    has_bands = any(len(runs) > 1 for found in every for runs in found.values())
    notes = ["Bands reach from the lowest to the highest seed."] if has_bands else []
    for found in every:
        less = differences(found, lambda base, own: None)
        left_out = [called(name) for name in found if less and name not in less]
        if left_out:
            notes.append(
                f"{', '.join(left_out)} shares no seed and part with a run of (a), and has no "
                "difference from it."
            )
    return " ".join(dict.fromkeys(notes))


def _aligned(runs: Sequence[tuple[Sequence[int], Any]]) -> tuple[list[int], np.ndarray]:
    """Cut curves to the places that all have, at most POINTS of them."""
    shared = sorted(set.intersection(*(set(x) for x, _ in runs)))
    keep = np.unique(np.linspace(0, len(shared) - 1, min(POINTS, len(shared))).round().astype(int))
    places = [shared[i] for i in keep]
    found = [dict(zip(x, y, strict=True)) for x, y in runs]
    return places, np.array([[one[place] for place in places] for one in found])


def _less_by_step(base: Curve, own: Curve) -> Curve:
    """Subtract (a)'s training loss at every step that both have."""
    of_base, of_own = dict(zip(*base, strict=True)), dict(zip(*own, strict=True))
    steps = sorted(of_base.keys() & of_own.keys())
    return steps, [of_own[step] - of_base[step] for step in steps]


def _less(found: ByReplica[Any], value: Callable[[Any], float]) -> list[float]:
    """Compute a value of every run of (b), less that of (a) of the same replica."""
    pairs = differences(found, lambda base, own: value(own) - value(base)).get("b", [])
    return [pair for pair in pairs if math.isfinite(pair)]


def _told_difference(where: str, values: Sequence[float]) -> str:
    """Say how far SSMax is from softmax, and of how many seeds; nothing where there are none."""
    if not values:
        return ""
    begin, mean = f"{where} SSMax's loss is", float(np.mean(values))
    seeds = f"{len(values)} seed{'s' * (len(values) > 1)}"
    if min(values) < 0 < max(values):
        return f"{begin} {mean:+.3f} nats from softmax's; seeds differ in sign ({seeds})"
    return f"{begin} {abs(mean):.3f} nats {'below' if mean < 0 else 'above'} softmax's ({seeds})"


def figure6(trials: Mapping[str, Sequence[NeedleTrial]]) -> Figure:
    """Draw C6: accuracy by context size and depth, in percent, a map for each configuration."""
    first = [name for name in trials if name in FIRST_SHOWN] or list(trials)[:3]
    panels, titles = [], []
    for name in [*first, *(name for name in trials if name not in first)]:
        lengths, depths, whole = accuracy_map(trials[name])
        digit = [dataclasses.replace(one, is_whole=one.first_digit) for one in trials[name]]
        of_digit = accuracy_map(digit)[2]
        rows = [
            {
                "context": f"{length:,}",
                "depth": f"{depth:.0%}",
                "share": short(whole[row, column]),
                "text": f"{100 * whole[row, column]:.0f}",
                "first digit": percent(of_digit[row, column]),
                "whole number": percent(whole[row, column]),
                "trials": len(trials[name]) // (len(lengths) * len(depths)),
            }
            for row, depth in enumerate(depths)
            for column, length in enumerate(lengths)
        ]
        titles.append(f"{look(name).label}: {percent(float(whole.mean()))}")
        panels.append(
            heat_map(
                rows, x="context", y="depth", title=titles[-1],
                tooltip=("whole number", "first digit", "trials"),
            )
        )  # fmt: skip
    return Figure(
        title=f"Needle retrieval accuracy over all contexts and depths: {'; '.join(titles[:3])}",
        panels=panels,
        columns=3,
        width=250,
        num_first=len(first),
    )


def retrieval(found: ByReplica[list[NeedleTrial]], *, train_length: int) -> Figure:
    """Draw needle retrieval accuracy against the length of the context."""
    rows: list[Row] = []
    beyond: dict[str, str] = {}
    mean_beyond = retrieval_accuracy(train_length, is_long=True)
    for name, runs in found.items():
        lengths = sorted({one.length for trials in runs.values() for one in trials})
        shares = [[accuracy_at(length)(one) for length in lengths] for one in runs.values()]
        rows += over_runs(name, "context", lengths, shares)
        beyond[name] = percent(float(np.mean([mean_beyond(trials) for trials in runs.values()])))
    chart = curves(
        rows, series_of(found, FIRST_SHOWN), x="context", y="needle retrieval accuracy",
        log_x=True, domain=(0, 1), marks=[Mark(x=train_length, text="training length")], dots=True,
        form=".0%",
    )  # fmt: skip
    words = {"a": "softmax finds", "b": "SSMax"}
    told = ", ".join(f"{words[name]} {beyond[name]}" for name in words if name in beyond)
    return Figure(
        title=f"Beyond the training length {told} of the hidden numbers"
        if told
        else "Needle retrieval accuracy by context",
        panels=[chart],
    )


def retrieval_grid(found: ByReplica[RetrievalGrid], *, train_length: int) -> Figure:
    """Draw retrieval of numbers that were taught in short documents: accuracy, and the best head.

    It opens at the RoPE base at which (a) is farthest from finding all and from finding nothing.
    """
    base_runs = list((found.get("a") or next(iter(found.values()))).values())
    taught, factors = base_runs[0].taught_length, base_runs[0].base_factors
    means = [np.mean([grid.accuracy[i][1:] for grid in base_runs]) for i in range(len(factors))]
    order = sorted(range(len(factors)), key=lambda i: abs(means[i] - 0.5))
    measures = [f"RoPE base x {factors[i]:g}" for i in order]
    accuracies: list[Row] = []
    weights: list[Row] = []
    told: dict[str, str] = {}
    for name, by_replica in found.items():
        for i, measure in zip(order, measures, strict=True):
            cells = [
                (one.lengths, one.accuracy[k], [float(np.max(heads)) for heads in one.weights[k]])
                for one in by_replica.values()
                if factors[i] in one.base_factors
                for k in [one.base_factors.index(factors[i])]
            ]
            if not cells:
                continue
            lengths, shares, tops = zip(*cells, strict=True)
            accuracies += over_runs(name, "context", lengths[0], shares, measure=measure)
            weights += over_runs(name, "context", lengths[0], tops, measure=measure)
            if i == order[0]:
                mean = percent(float(np.mean([share[1:] for share in shares])))
                told[name] = f"{mean} ({len(cells)} seeds)"
    series = series_of(found, FIRST_SHOWN)
    marks = [Mark(x=taught, text="taught to"), Mark(x=train_length, text="training length")]
    panels = [
        curves(
            rows, series, x="context", y="", title=title, log_x=True, domain=(0, 1), marks=marks,
            measures=measures, dots=True, form=".2f",
        )
        for rows, title in (
            (accuracies, "Needle retrieval accuracy"),
            (weights, "Weight of the best head on the number"),
        )
    ]  # fmt: skip
    words = {**IN_TITLES, "a": "softmax finds"}
    said = ", ".join(f"{words[name]} {told[name]}" for name in words if name in told)
    return Figure(
        title=f"Numbers taught to {taught:,} tokens and asked for beyond, {measures[0]}: {said}",
        panels=panels,
        width=400,
        note="Dots are means over seeds, bands reach from the lowest to the highest seed.",
    )


def figure7(scores: Mapping[str, Sequence[NeedleScore]]) -> Figure:
    """Draw C7: the needle scores of the top heads for the paper's needle, means over haystacks."""
    ranked = {name: by_rank(trials) for name, trials in scores.items()}
    rows: list[Row] = []
    for name, values in ranked.items():
        rows += over_runs(name, "head by rank", range(1, len(values) + 1), [values])
    series = [
        dataclasses.replace(one, label=f"{one.label}: {usual_word(scores[one.name])}")
        for one in series_of(list(scores), FIRST_SHOWN)
    ]
    begin = "The head that looks most at the number gives it a weight of"
    return Figure(
        title=_two(begin, {name: float(values[0]) for name, values in ranked.items()}),
        panels=[curves(rows, series, x="head by rank", y="needle score", zero=True, dots=True)],
        note=f"Context of {_context(scores)} tokens; behind a name what most trials answered.",
    )


def figure8(scores: Mapping[str, Sequence[NeedleScore]]) -> Figure:
    """Draw C8: the top needle score of every trial, sorted; the marker says what was answered.

    By the share of the trials: a configuration of three runs has three times those of one.
    """
    rows: list[Row] = []
    middles = {}
    for name, trials in scores.items():
        ranked = sorted(trials, key=lambda trial: -top_score(trial))
        middles[name] = float(np.median(list(map(top_score, ranked))))
        for place in np.unique(np.linspace(1, len(ranked), QUANTILES).round().astype(int)):
            one = ranked[place - 1]
            share, top = short(100 * place / len(ranked)), short(top_score(one))
            rows.append({"name": name, "trials, %": share, "y": top, "answer": said_word(one)})
    chart = curves(
        rows, series_of(list(scores), FIRST_SHOWN), x="trials, %", y="top needle score", zero=True,
        form=".3f", points=rows,
    )  # fmt: skip
    cells = [
        [look(row["name"]).label, f"{row['trials, %']:g}", f"{row['y']:.3f}", row["answer"]]
        for row in rows
    ]
    header = ["configuration", "trials, %", "top needle score", "answer"]
    return Figure(
        title=_two("In the median trial the top needle score is", middles),
        panels=[dataclasses.replace(chart, tables=[Table(header=header, rows=cells)])],
        note=f"Context of {_context(scores)} tokens. Circle: whole number; triangle: its first "
        "digit; cross: wrong.",
    )


def _context(scores: Mapping[str, Sequence[NeedleScore]]) -> str:
    return f"{next(iter(scores.values()))[0].length:,}"


def _two(begin: str, values: Mapping[str, float]) -> str:
    told = " and ".join(
        f"{values[name]:.2f} with {IN_TITLES[name]}" for name in ("a", "b") if name in values
    )
    if told:
        return f"{begin} {told}"
    name, value = max(values.items(), key=lambda one: one[1])
    return f"{begin} at most {value:.2f}, with {called(name)}"


def sharpness(found: ByReplica[Sharpness], *, train_length: int) -> Figure:
    """Draw C1 in a model: the largest weight and the entropy of queries that see n keys."""
    weights: list[Row] = []
    entropies: list[Row] = []
    ratios: dict[str, str] = {}
    for name, by_replica in found.items():
        runs = list(by_replica.values())
        n = runs[0].num_keys
        largest = [np.mean(one.largest, axis=(0, 1)) for one in runs]
        weights += over_runs(name, "n", n, largest)
        entropies += over_runs(name, "n", n, [np.mean(one.entropy, axis=(0, 1)) for one in runs])
        before, after = last_seen_and_last(runs[0], train_length)
        mean = np.mean(largest, axis=0)
        ratios[name] = percent(float(mean[after] / mean[before]) - 1, sign="+")
    series = series_of(found, FIRST_SHOWN)
    marks = [Mark(x=train_length, text="training length")]
    panels = [
        curves(rows, series, x="n", y=y, log_x=True, log_y=log, marks=marks)
        for rows, y, log in (
            (weights, "largest attention weight", True),
            (entropies, "entropy, nats", False),
        )
    ]
    last = max(one.num_keys[-1] for runs in found.values() for one in runs.values())
    told = [f"{ratios[name]} with {words}" for name, words in IN_TITLES.items() if name in ratios]
    told = told or [f"{ratio} with {called(name)}" for name, ratio in ratios.items()][:1]
    return Figure(
        title=f"From {train_length:,} to {last:,} keys the mean largest attention weight changes "
        f"by {', '.join(told)}",
        panels=panels,
        width=400,
    )


def scales(found: ByReplica[dict[str, list[float]]], *, train_length: int) -> Figure | None:
    """Draw the learned s, and b, of every head of the first run; None where none is learned."""
    panels: list[Panel] = []
    told = []
    for name, by_replica in found.items():
        replica = min(by_replica)
        for parameter in ("s", "bias"):
            grid = np.array(learned(by_replica[replica], parameter))
            if not grid.size or name not in MEASURED:
                continue
            start = first_s(look(name).rule, train_length) if parameter == "s" else 0.0
            most = max(float(np.abs(grid - start).max()), 1e-9)
            rows = [
                {
                    "layer": f"{layer + 1}",
                    "head": f"{head + 1}",
                    "share": short(0.5 + float(grid[layer, head] - start) / (2 * most)),
                    "text": f"{grid[layer, head]:.2f}".replace("-", "\u2212"),
                }
                for layer, head in np.ndindex(*grid.shape)
            ]
            title = f"{parameter} of {look(name).label}, {replica}, start {start:.3g}"
            panels.append(heat_map(rows, x="head", y="layer", title=title, scheme="blueorange"))
            above = f"{(grid > start).sum()} of {grid.size} heads end above their start"
            told.append(f"{parameter} of {called(name)}: {above}")
    if not panels:
        return None
    title = next((one for one in told if one.startswith("s of (b)")), told[0])
    return Figure(title=title, panels=panels, width=400, num_first=2)
