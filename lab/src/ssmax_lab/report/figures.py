"""The paper's eight figures and those of a study beside them, each defined once, from records."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ssmax_lab.analysis.figure_inputs import (
    FIGURE_1_S,
    FIGURE_3_SIZES,
    figure1_output,
    figure3_output,
    ssmax_factor,
)
from ssmax_lab.analysis.findings import ByReplica
from ssmax_lab.analysis.fits import fit_table
from ssmax_lab.analysis.measures import (
    Curve,
    accuracy_map,
    by_octave,
    by_rank,
    differences,
    last_seen_and_last,
    last_tenth,
    learned,
    mean_between,
    octave_differences,
    retrieval_accuracy,
    said_word,
    smoothed,
    top_score,
    usual_word,
)
from ssmax_lab.analysis.rope import first_s
from ssmax_lab.configurations import CONTROL, MEASURED, called, labels, look
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, RetrievalGrid, Sharpness
from ssmax_lab.report.charts import (
    Mark,
    Row,
    Series,
    curves,
    heat_map,
    over_runs,
    right_of,
    series_of,
    short,
)
from ssmax_lab.report.style import Figure
from ssmax_lab.report.tables import percent, rows_table, wide_table

FIRST_SHOWN = ("a", "b", CONTROL)
LESS, LOSS = "loss less (a)'s, nats", "loss, nats"
POINTS = 120
"""Of a curve, at most."""
QUANTILES = 50
"""Of the trials of figure 8."""


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
    chart = curves(
        rows, series, x="n", y="largest output", log_x=True, domain=(0, 1), toggles=False
    )
    return Figure(
        title="Softmax's largest output falls to 0 as the input grows; SSMax's stays near 1",
        panels=[chart],
        right=right_of(series),
        tables=[wide_table(rows, series, "n")],
    )


def figure2(tables: Mapping[Any, Sequence[float]]) -> Figure:
    """Draw C2: the learned p_n against n, with every fit and its R^2; the reader picks the seed."""
    measures = [f"learned p_n, {replica}" for replica in tables]
    rows: list[Row] = []
    shares: dict[str, list[float]] = {}
    fitted = []
    for measure, table in zip(measures, tables.values(), strict=True):
        n = _log_spaced(2, len(table))
        points = {"p": table, **{fit.shape: [math.nan, *fit.curve] for fit in fit_table(table)}}
        for name, values in points.items():
            rows += [
                {"name": name, "n": k, "y": short(values[k - 1]), "measure": measure} for k in n
            ]
        for fit in fit_table(table):
            shares.setdefault(fit.shape, []).append(fit.r2)
            cells = (f"{value:.4g}" for value in (fit.a1, fit.a2, fit.r2))
            fitted.append([measure, fit.name, *cells])
    ranked = sorted(shares, key=lambda shape: -float(np.mean(shares[shape])))
    words = {"power": "the best power of n"}
    series = [
        Series(name="p", label="learned p_n", colour=look("a").colour),
        *(
            Series(
                name=shape,
                label=f"{words.get(shape, shape)}: R² = {np.mean(shares[shape]):.3f}",
                colour={"log n": look("b").colour, "power": "#0072b2", "sqrt n": "#009e73"}.get(
                    shape, "#cc79a7"
                ),
                dash="-" if shape == "log n" else "--",
            )
            for shape in ranked
        ),
    ]
    means = {shape: float(np.mean(share)) for shape, share in shares.items()}
    title = "The learned p_n is the same for every n"
    if math.isfinite(means["log n"]):
        rival = max(sorted(means.keys() - {"log n"}), key=means.__getitem__)
        title = (
            f"A line in log n explains {percent(means['log n'])} of the learned p_n's variance, "
            f"{words.get(rival, rival)} {percent(means[rival])}"
        )
    chart = curves(rows, series, x="n", y="", log_x=True, measures=measures)
    return Figure(
        title=title,
        panels=[chart],
        right=right_of(series),
        tables=[
            rows_table(["seed", "fit", "a1", "a2", "R²"], fitted),
            *(
                wide_table(
                    [row for row in rows if row["measure"] == measure], series, "n", caption=measure
                )
                for measure in measures
            ),
        ],
    )


def figure3() -> Figure:
    """Draw C3: what z_max a vector (0 ... 1, z_max) needs before the largest output leads."""
    tops = [round(top, 2) for top in np.linspace(0.0, 20.0, 81).tolist()]
    shades = {
        "softmax": ("#b3b8bf", "#8b929c", "#5a6270", INK_OF_A),
        f"SSMax, s = {FIGURE_1_S}": ("#f6c19a", "#ee9a5c", "#e27427", look("b").colour),
    }
    panels, tables, series = [], [], []
    for title, colours in shades.items():
        series = [
            Series(name=f"{n}", label=f"n = {n:,}", colour=colour)
            for n, colour in zip(FIGURE_3_SIZES, colours, strict=True)
        ]
        rows = [
            {
                "name": f"{n}",
                "z_max": top,
                "y": short(figure3_output(n, top, 1.0 if title == "softmax" else ssmax_factor(n))),
            }
            for n in FIGURE_3_SIZES
            for top in tops
        ]
        marks = (
            [] if title == "softmax" else [Mark(x=1 + 1 / FIGURE_1_S, text="1 + 1/s", is_low=True)]
        )
        panels.append(
            curves(
                rows, series, x="z_max", y="output of z_max", title=title, domain=(0, 1),
                marks=marks, toggles=False,
            )
        )  # fmt: skip
        tables.append(wide_table(rows, series, "z_max", caption=title))
    return Figure(
        title="Softmax needs a lead that grows with n; SSMax one of about 1/s, whatever n is",
        panels=panels,
        width=360,
        right=right_of(series),
        tables=tables,
    )


INK_OF_A = look("a").colour


def figure4(found: ByReplica[Curve]) -> Figure:
    """Draw C4: training loss by step, less (a)'s of the same seed and as it is."""
    less = {
        name: [smoothed(*curve) for curve in pairs]
        for name, pairs in differences(found, _less_by_step).items()
    }
    whole = {name: [smoothed(*curve) for curve in runs.values()] for name, runs in found.items()}
    return _losses(
        [("", "step", less, whole, ())],
        found,
        title=_told_difference(
            "In the last tenth of training SSMax's loss is", _less(found, last_tenth, "b")
        )
        or "Training loss by step",
        log_x=False,
    )


def figure5(
    by_base: Mapping[str, ByReplica[PositionLoss]],
    *,
    train_length: int,
    rope_limits: Mapping[str, float | None] | None = None,
) -> Figure:
    """Draw C5: test loss by position, a panel for each RoPE base at test time."""
    panels, told = [], []
    for base, found in by_base.items():
        limit = (rope_limits or {}).get(base)
        marks = [Mark(x=train_length, text="training length")]
        if limit is not None:
            marks.append(Mark(x=round(limit), text="RoPE limit"))
        less = differences(found, octave_differences)
        whole = {
            name: [by_octave(record.mean) for record in runs.values()]
            for name, runs in found.items()
        }
        panels.append((base, "position", less, whole, marks))
        end = min(4 * train_length, limit or math.inf)
        if limit and len(by_base) > 1 and base == next(iter(by_base)):
            end = limit
        values = _less(found, mean_between(train_length, round(end)), "b")
        where = f"From {train_length:,} to {end:,.0f} tokens" + (f", {base}," if base else "")
        if text := _told_difference(f"{where} SSMax's loss is", values):
            told.append(text)
    every: dict[str, dict[Any, Any]] = {}
    for found in by_base.values():
        for name, runs in found.items():
            every.setdefault(name, {}).update(runs)
    return _losses(panels, every, title=told[0] if told else "Test loss by position", log_x=True)


def _losses(
    panels: Sequence[tuple[str, str, Mapping[str, Any], Mapping[str, Any], Sequence[Mark]]],
    found: ByReplica[Any],
    *,
    title: str,
    log_x: bool,
) -> Figure:
    """Draw losses in panels (title, x, less (a)'s, as they are, marks) that share their series."""
    names = list(found)
    series = series_of(names, FIRST_SHOWN)
    charts, tables, notes = [], [], []
    for head, x, less, whole, marks in panels:
        rows: list[Row] = []
        measures = [LESS, LOSS] if less else [LOSS]
        for measure in measures:
            of_measure = []
            for name, runs in (less if measure == LESS else whole).items():
                shared, values = _aligned(runs)
                of_measure += over_runs(name, x, shared, values, measure=measure)
            rows += of_measure
            caption = ", ".join(filter(None, (head, measure)))
            tables.append(wide_table(of_measure, _counted(series, found), x, caption=caption))
        left_out = [called(name) for name in whole if less and name not in less]
        if left_out:
            notes.append(
                f"{', '.join(left_out)} shares no seed and part with a run of (a), and has no "
                "difference from it."
            )
        charts.append(
            curves(
                rows, series, x=x, y="", title=head, log_x=log_x, marks=marks, measures=measures,
                form="+.3f" if less else ".3f",
            )
        )  # fmt: skip
    counts = {name: len(runs) for name, runs in found.items()}
    bands = "Bands reach from the lowest to the highest seed." if max(counts.values()) > 1 else ""
    return Figure(
        title=title,
        panels=charts,
        width=400 if len(charts) > 1 else 560,
        right=right_of(series),
        tables=tables,
        note=" ".join([*filter(None, [bands]), *dict.fromkeys(notes)]),
    )


def _counted(series: Sequence[Series], found: ByReplica[Any]) -> list[Series]:
    """Label series with their numbers of runs where these are not the same."""
    told = labels({name: len(runs) for name, runs in found.items()})
    return [dataclasses.replace(one, label=told.get(one.name, one.label)) for one in series]


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


def _less(found: ByReplica[Any], value: Callable[[Any], float], name: str) -> list[float]:
    """Compute a value of every run of a configuration, less that of (a) of the same replica."""
    pairs = differences(found, lambda base, own: value(own) - value(base)).get(name, [])
    return [pair for pair in pairs if math.isfinite(pair)]


def _told_difference(begin: str, values: Sequence[float]) -> str:
    """Say how far SSMax is from softmax, and of how many seeds; nothing where there are none."""
    if not values:
        return ""
    seeds = f"{len(values)} seed{'s' * (len(values) > 1)}"
    mean = float(np.mean(values))
    if min(values) < 0 < max(values):
        return f"{begin} {mean:+.3f} nats from softmax's; seeds differ in sign ({seeds})"
    return f"{begin} {abs(mean):.3f} nats {'below' if mean < 0 else 'above'} softmax's ({seeds})"


def figure6(
    trials: Mapping[str, Sequence[NeedleTrial]], *, shown: Sequence[str] = FIRST_SHOWN
) -> Figure:
    """Draw C6: accuracy by context size and depth, in percent, a map for each configuration."""
    first = [name for name in trials if name in shown] or list(trials)[:3]
    names = [*first, *(name for name in trials if name not in first)]
    panels, tables, means = [], [], []
    for name in names:
        lengths, depths, whole = accuracy_map(trials[name])
        digit = [dataclasses.replace(one, is_whole=one.first_digit) for one in trials[name]]
        of_digit = accuracy_map(digit)[2]
        count = len(trials[name]) // (len(lengths) * len(depths))
        rows = [
            {
                "context": f"{length:,}",
                "depth": f"{depth:.0%}",
                "share": short(whole[row, column]),
                "text": f"{100 * whole[row, column]:.0f}",
                "first digit": percent(of_digit[row, column]),
                "whole number": percent(whole[row, column]),
                "trials": count,
            }
            for row, depth in enumerate(depths)
            for column, length in enumerate(lengths)
        ]
        title = f"{look(name).label}: {percent(float(whole.mean()))}"
        means.append(title)
        panels.append(
            heat_map(
                rows, x="context", y="depth", title=title,
                tooltip=("whole number", "first digit", "trials"),
            )
        )  # fmt: skip
        cells = [
            [row["depth"], row["context"], f"{row['whole number']}", row["first digit"]]
            for row in rows
        ]
        header = ["depth", "context", "whole number", "first digit"]
        tables.append(rows_table(header, cells, f"{look(name).label}; {count} trials a cell"))
    return Figure(
        title=f"Needle retrieval accuracy over all contexts and depths: {'; '.join(means[:3])}",
        panels=panels,
        columns=3,
        width=250,
        tables=tables,
        num_first=len(first),
    )


def retrieval(found: ByReplica[list[NeedleTrial]], *, train_length: int) -> Figure:
    """Draw needle retrieval accuracy against the length of the context."""
    rows: list[Row] = []
    beyond: dict[str, float] = {}
    mean_beyond = retrieval_accuracy(train_length, is_long=True)
    for name, runs in found.items():
        lengths = sorted({one.length for trials in runs.values() for one in trials})
        shares = [[_accuracy(trials, length) for length in lengths] for trials in runs.values()]
        rows += over_runs(name, "context", lengths, shares)
        beyond[name] = float(np.mean([mean_beyond(trials) for trials in runs.values()]))
    series = series_of(list(found), FIRST_SHOWN)
    chart = curves(
        rows, series, x="context", y="needle retrieval accuracy", log_x=True, domain=(0, 1),
        marks=[Mark(x=train_length, text="training length")], dots=True, form=".0%",
    )  # fmt: skip
    told = ", ".join(
        f"{words} {percent(beyond[name])}"
        for name, words in (("a", "softmax finds"), ("b", "SSMax"))
        if name in beyond
    )
    return Figure(
        title=f"Beyond the training length {told} of the hidden numbers"
        if told
        else "Needle retrieval accuracy by context",
        panels=[chart],
        right=right_of(series),
        tables=[wide_table(rows, _counted(series, found), "context")],
    )


def retrieval_grid(found: ByReplica[RetrievalGrid], *, train_length: int) -> Figure:
    """Draw retrieval of numbers that were taught in short documents: accuracy, and the best head.

    It opens at the RoPE base at which (a) is farthest from finding all and from finding nothing.
    """
    grids = next(iter(found.values()))
    taught = next(iter(grids.values())).taught_length
    base_runs = list(found.get("a", grids).values())
    factors = base_runs[0].base_factors
    means = [np.mean([grid.accuracy[i][1:] for grid in base_runs]) for i in range(len(factors))]
    order = sorted(range(len(factors)), key=lambda i: abs(means[i] - 0.5))
    accuracies: list[Row] = []
    weights: list[Row] = []
    first: dict[str, list[float]] = {}
    for name, by_replica in found.items():
        for i in order:
            runs = [one for one in by_replica.values() if factors[i] in one.base_factors]
            measure = f"RoPE base x {factors[i]:g}"
            at = [one.base_factors.index(factors[i]) for one in runs]
            shares = [one.accuracy[k] for one, k in zip(runs, at, strict=True)]
            tops = [
                [float(np.max(heads)) for heads in one.weights[k]]
                for one, k in zip(runs, at, strict=True)
            ]
            if runs:
                lengths = runs[0].lengths
                accuracies += over_runs(name, "context", lengths, shares, measure=measure)
                weights += over_runs(name, "context", lengths, tops, measure=measure)
            if i == order[0]:
                first[name] = [float(np.mean(share[1:])) for share in shares]
    series = series_of(list(found), FIRST_SHOWN)
    measures = [f"RoPE base x {factors[i]:g}" for i in order]
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
    told = ", ".join(
        f"{words} {percent(float(np.mean(first[name])))} ({len(first[name])} seeds)"
        for name, words in (("a", "softmax finds"), ("b", "SSMax"), (CONTROL, "a learned "
                            "temperature"))
        if first.get(name)
    )  # fmt: skip
    return Figure(
        title=f"Numbers taught to {taught:,} tokens and asked for beyond, {measures[0]}: {told}",
        panels=panels,
        width=400,
        right=right_of(series),
        tables=[
            wide_table(
                [row for row in rows if row["measure"] == measure],
                _counted(series, found), "context", caption=f"{what}, {measure}",
            )
            for rows, what in ((accuracies, "accuracy"), (weights, "weight of the best head"))
            for measure in measures
        ],
        note="Dots are means over seeds, bands reach from the lowest to the highest seed.",
    )  # fmt: skip


def _accuracy(trials: Sequence[NeedleTrial], length: int) -> float:
    found = [one.is_whole for one in trials if one.length == length]
    return float(np.mean(found)) if found else math.nan


def figure7(scores: Mapping[str, Sequence[NeedleScore]]) -> Figure:
    """Draw C7: the needle scores of the top heads for the paper's needle, means over haystacks."""
    rows: list[Row] = []
    tops = {}
    for name, trials in scores.items():
        ranked = by_rank(trials)
        tops[name] = float(ranked[0])
        rows += over_runs(name, "head by rank", range(1, len(ranked) + 1), [ranked])
    series = [
        dataclasses.replace(one, label=f"{one.label}: {usual_word(scores[one.name])}")
        for one in series_of(list(scores), FIRST_SHOWN)
    ]
    chart = curves(rows, series, x="head by rank", y="needle score", zero=True, dots=True)
    length = next(iter(scores.values()))[0].length
    return Figure(
        title=_two("The head that looks most at the number gives it a weight of", tops, ".2f"),
        panels=[chart],
        right=right_of(series),
        tables=[wide_table(rows, series, "head by rank")],
        note=f"Context of {length:,} tokens; behind a name what most trials answered.",
    )


def figure8(scores: Mapping[str, Sequence[NeedleScore]]) -> Figure:
    """Draw C8: the top needle score of every trial, sorted; the marker says what was answered.

    By the share of the trials: a configuration of three runs has three times those of one.
    """
    rows: list[Row] = []
    middles, cells = {}, []
    for name, trials in scores.items():
        ranked = sorted(trials, key=lambda trial: -top_score(trial))
        middles[name] = float(np.median(list(map(top_score, ranked))))
        for place in np.unique(np.linspace(1, len(ranked), QUANTILES).round().astype(int)):
            one = ranked[place - 1]
            share = short(100 * place / len(ranked))
            top = short(top_score(one))
            rows.append({"name": name, "trials, %": share, "y": top, "answer": said_word(one)})
            cells.append([look(name).label, f"{share:g}", f"{top:.3f}", said_word(one)])
    series = series_of(list(scores), FIRST_SHOWN)
    chart = curves(
        rows, series, x="trials, %", y="top needle score", zero=True, form=".3f", shape="answer"
    )
    length = next(iter(scores.values()))[0].length
    return Figure(
        title=_two("In the median trial the top needle score is", middles, ".2f"),
        panels=[chart],
        right=right_of(series),
        tables=[rows_table(["configuration", "trials, %", "top needle score", "answer"], cells)],
        note=f"Context of {length:,} tokens. Circle: whole number; triangle: its first digit; "
        "cross: wrong.",
    )


def _two(begin: str, values: Mapping[str, float], form: str) -> str:
    told = " and ".join(
        f"{values[name]:{form}} with {words}"
        for name, words in (("a", "softmax"), ("b", "SSMax"))
        if name in values
    )
    if told:
        return f"{begin} {told}"
    name, value = max(values.items(), key=lambda one: one[1])
    return f"{begin} at most {value:{form}}, with {called(name)}"


def sharpness(found: ByReplica[Sharpness], *, train_length: int) -> Figure:
    """Draw C1 in a model: the largest weight and the entropy of queries that see n keys."""
    weights: list[Row] = []
    entropies: list[Row] = []
    ratios: dict[str, float] = {}
    for name, by_replica in found.items():
        runs = list(by_replica.values())
        n = runs[0].num_keys
        largest = [np.mean(one.largest, axis=(0, 1)) for one in runs]
        weights += over_runs(name, "n", n, largest)
        entropies += over_runs(name, "n", n, [np.mean(one.entropy, axis=(0, 1)) for one in runs])
        before, after = last_seen_and_last(runs[0], train_length)
        mean = np.mean(largest, axis=0)
        ratios[name] = float(mean[after] / mean[before]) - 1
    series = series_of(list(found), FIRST_SHOWN)
    marks = [Mark(x=train_length, text="training length")]
    panels = [
        curves(rows, series, x="n", y=y, log_x=True, log_y=log, marks=marks)
        for rows, y, log in (
            (weights, "largest attention weight", True),
            (entropies, "entropy, nats", False),
        )
    ]
    last = max(one.num_keys[-1] for runs in found.values() for one in runs.values())
    told = ", ".join(
        f"{percent(ratios[name], sign='+')} {words}"
        for name, words in (("a", "with softmax"), ("b", "with SSMax"), (CONTROL, "with a learned "
                            "temperature"))
        if name in ratios
    )  # fmt: skip
    return Figure(
        title=f"From {train_length:,} to {last:,} keys the mean largest attention weight changes "
        f"by {told or percent(max(ratios.values()), sign='+')}",
        panels=panels,
        width=400,
        right=right_of(series),
        tables=[
            wide_table(rows, _counted(series, found), "n", caption=caption)
            for rows, caption in ((weights, "mean largest weight"), (entropies, "entropy, nats"))
        ],
    )


def sharpness_by_head(found: ByReplica[Sharpness], *, train_length: int) -> Figure | None:
    """Draw how every head's sharpness changes from the training length to the last n.

    None where nothing longer was measured.
    """
    rows: list[Row] = []
    faded: dict[str, str] = {}
    measures = ("largest weight, times", "entropy, nats more")
    for name, by_replica in found.items():
        replica = min(by_replica)
        record = by_replica[replica]
        before, after = last_seen_and_last(record, train_length)
        if before == after:
            continue
        title = f"{look(name).label}, {replica}"
        weights, entropy = np.asarray(record.largest), np.asarray(record.entropy)
        factors = weights[:, :, after] / weights[:, :, before]
        gains = entropy[:, :, after] - entropy[:, :, before]
        faded[name] = f"{(factors <= 0.5).sum()} of {factors.size} with {called(name)}"
        most = max(float(np.abs(gains).max()), 1e-9)
        for measure, grid, share, form in (
            (measures[0], factors, 0.5 + np.log2(np.maximum(factors, 1e-6)) / 4, ".2f"),
            (measures[1], gains, 0.5 - gains / (2 * most), "+.1f"),
        ):
            rows += by_head(grid, share, form, configuration=title, measure=measure)
    if not rows:
        return None
    titles = list(dict.fromkeys(row["configuration"] for row in rows))
    chart = heat_map(
        rows, x="head", y="layer", scheme="blueorange",
        choices={"configuration": titles, "measure": measures}, tooltip=("text",),
    )  # fmt: skip
    told = [faded[name] for name in ("a", "b") if name in faded] or list(faded.values())[:2]
    return Figure(
        title=f"Heads whose largest weight falls to half or less: {'; '.join(told)}",
        panels=[chart],
        tables=grids(rows, titles),
    )


def scales(found: ByReplica[dict[str, list[float]]], *, train_length: int) -> Figure | None:
    """Draw the learned s, and b, of every head of the first run; None where none is learned."""
    rows: list[Row] = []
    told = []
    for name, by_replica in found.items():
        if name not in MEASURED:
            continue
        replica = min(by_replica)
        for parameter in ("s", "bias"):
            grid = np.array(learned(by_replica[replica], parameter))
            if not grid.size:
                continue
            start = first_s(look(name).rule, train_length) if parameter == "s" else 0.0
            most = max(float(np.abs(grid - start).max()), 1e-9)
            title = f"{parameter} of {look(name).label}, {replica}, start {start:.3g}"
            rows += by_head(grid, 0.5 + (grid - start) / (2 * most), ".2f", parameter=title)
            above = f"{(grid > start).sum()} of {grid.size} heads end above their start"
            told.append(f"{parameter} of {called(name)}: {above}")
    if not rows:
        return None
    titles = list(dict.fromkeys(row["parameter"] for row in rows))
    chart = heat_map(
        rows, x="head", y="layer", scheme="blueorange", choices={"parameter": titles},
        tooltip=("text",),
    )  # fmt: skip
    return Figure(
        title=next((one for one in told if one.startswith("s of (b)")), told[0]),
        panels=[chart],
        tables=grids(rows, titles),
    )


def by_head(grid: np.ndarray, share: np.ndarray, form: str, **more: str) -> list[Row]:
    """Make the rows of a map of layers and heads."""
    return [
        {
            "layer": f"{layer + 1}",
            "head": f"{head + 1}",
            "share": short(float(np.clip(share[layer, head], 0, 1))),
            "text": f"{grid[layer, head]:{form}}".replace("-", "\u2212"),
            **more,
        }
        for layer in range(grid.shape[0])
        for head in range(grid.shape[1])
    ]


def grids(rows: Sequence[Row], titles: Sequence[str]) -> list[Any]:
    """Make a table of layers and heads for each title and measure."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        title = row.get("configuration") or row["parameter"]
        table = found.setdefault((title, row.get("measure", "")), {})
        table.setdefault(row["layer"], []).append(row["text"])
    return [
        rows_table(
            ["layer", *(f"head {place + 1}" for place in range(len(next(iter(table.values())))))],
            [[layer, *cells] for layer, cells in table.items()],
            ", ".join(filter(None, key)),
        )
        for key, table in found.items()
        if key[0] in titles
    ]


def _log_spaced(first: int, last: int) -> list[int]:
    """Pick about POINTS whole numbers, evenly over their logarithms."""
    return np.unique(np.geomspace(first, last, POINTS).round().astype(int)).tolist()
