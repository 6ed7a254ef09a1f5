"""The figures of docs/results.md, from all recorded studies: a message each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ssmax_lab.analysis.findings import ByReplica, Findings
from ssmax_lab.analysis.formulas import breaks_at
from ssmax_lab.analysis.measures import (
    differences,
    learned,
    mean_differences,
    octave_differences,
)
from ssmax_lab.analysis.statistics import over_seeds
from ssmax_lab.configurations import CONTROL, PILOT_SEED, called, look
from ssmax_lab.records import PositionLoss
from ssmax_lab.report.charts import DASHES, Mark, Row, Series, curves, over_runs, series_of, short
from ssmax_lab.report.figures import LESS
from ssmax_lab.report.study_page import parameters
from ssmax_lab.report.style import INK, LINE, Figure, Panel, altair

FIVE = ("a", "b", "mean_log", "constant", CONTROL)
"""Softmax, SSMax, a constant in training and at test time, and the control."""
GROUPS = {
    "trained, the factor grows with n": ("b", "d", "sqrt_log", "b_held", "c", "polylog"),
    "trained, no n": ("mean_log", CONTROL),
    "at test time": ("e", "constant", "clamp", "yarn"),
}
"""The twelve interventions of the forest plot."""
NAMED: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("b", "mean_log", "polylog", CONTROL, "constant", "c"), {"align": "left", "dx": 8}),
    (("a",), {"align": "right", "dx": -8}),
    (("b_held",), {"align": "left", "dx": -4, "dy": -12}),
)
"""Dots of the scatter plot that have a label, and where it stands clear of the others."""
FEW_KEYS = 8
"""From here on the learned factor is compared; before it a weight has too few rivals."""
RETRIEVING = {"a": "softmax", "b": "SSMax", "constant": "a constant", "b_held": "n held"}
"""Softmax, SSMax, and what of their difference a constant and the growth beyond it make."""
_UNSATURATED = "where softmax retrieves neither all nor nothing,"
MORE_THAN_SOFTMAX = {
    name: f"{_UNSATURATED} {called(name)} retrieves more than (a)" for name in ("b", "constant")
}
"""Comparisons of retrieval, where it can fail, with (a)'s."""
MORE_THAN_HELD = f"{_UNSATURATED} (b) retrieves more than {called('b_held')}"


def every(results: Mapping[str, Findings]) -> dict[str, Figure]:
    """Define all of them, by the name of their file."""
    newest = {
        findings.study["preset"]: findings
        for _, findings in sorted(results.items())
        if ":" not in findings.study["preset"]
    }
    small = newest["small"]
    return {
        "results-loss-at-length": loss_at_length(small),
        "results-forest": forest(small),
        "results-sharpness": sharpness_against_loss(small),
        "results-factor": learned_factor(small),
        "results-retrieval": retrieval_by_length(
            [one for _, one in sorted(results.items()) if one.grids]
        ),
        "results-rope-limit": rope_limits(results),
    }


def _bases(findings: Findings) -> list[tuple[str, ByReplica[PositionLoss], int, str]]:
    """Tell both bases: the losses, where the primary stretch from T on ends, and its name."""
    length = findings.train_length
    limit = round(findings.rope_limit or 4 * length)
    return [
        ("unchanged RoPE base", findings.same_theta_losses, 4 * length, "4T"),
        (
            f"RoPE base x {findings.study['theta_factor']:g}",
            findings.position_losses,
            limit,
            "RoPE limit",
        ),
    ]


def loss_at_length(findings: Findings) -> Figure:
    """Draw the loss less (a)'s by position, five configurations at both bases."""
    length = findings.train_length
    series = series_of([name for name in FIVE if name in findings.position_losses], FIVE)
    panels, told = [], []
    for base, losses, end, words in _bases(findings):
        less = differences(losses, octave_differences)
        rows: list[Row] = []
        for one in series:
            if pairs := less.get(one.name):
                rows += over_runs(one.name, "position", pairs[0][0], [y for _, y in pairs])
        marks = [Mark(x=length, text="training length"), Mark(x=end, text=words)]
        panels.append(
            curves(
                [row for row in rows if row["position"] >= length / 4], series, x="position",
                y=LESS, title=base, log_x=True, marks=marks, height=320,
            )
        )  # fmt: skip
        means = mean_differences(losses, length, end)
        moves = {name: f"{np.mean(means[name]):+.3f} nats" for name in ("b", "constant")}
        told.append({name: move.replace("-", "\u2212") for name, move in moves.items()})
    return Figure(
        title=f"From T to 4T at the unchanged base SSMax changes the loss by "
        f"{told[0]['b']}, a constant at test time by {told[0]['constant']}; at the larger "
        f"base, to the RoPE limit, by {told[1]['b']} and {told[1]['constant']}",
        panels=panels,
        width=400,
    )


def forest(findings: Findings) -> Figure:
    """Draw twelve interventions, loss less (a)'s with intervals over seeds, at both bases."""
    alt = altair()
    panels: list[Panel] = []
    names = [name for group in GROUPS.values() for name in group]
    colour = alt.Color("group:N", legend=None).scale(
        domain=list(GROUPS), range=[look("b").colour, look(CONTROL).colour, "#6b7280"]
    )
    for base, losses, end, words in _bases(findings):
        less = mean_differences(losses, findings.train_length, end)
        rows = []
        for group, members in GROUPS.items():
            for name in members:
                if pairs := less.get(name):
                    found = over_seeds(pairs, [0.0] * len(pairs))
                    ends = (found.low, found.high)
                    low, high = (found.effect if end is None else end for end in ends)
                    rows.append(
                        {"configuration": _in_short(name), "group": group,
                         "effect": short(found.effect), "low": short(low), "high": short(high)}
                    )  # fmt: skip
        data = alt.Chart()
        axis = alt.Axis(labels=not panels, labelLimit=220, ticks=False, domain=False)
        up = alt.Y("configuration:N", sort=list(map(_in_short, names)), title=None, axis=axis)
        at = alt.X("effect:Q", title=LESS, axis=alt.Axis(grid=True, tickCount=6))
        zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(color=LINE)
        chart = alt.layer(
            zero.encode(alt.X("zero:Q")),
            data.mark_rule(strokeWidth=2).encode(
                alt.X("low:Q", title=LESS), alt.X2("high"), up, colour
            ),
            data.mark_point(filled=True, size=55, opacity=1).encode(at, up, colour),
        )
        title = f"{base}, T to {'the ' if words != '4T' else ''}{words}"
        panels.append(Panel(chart.properties(title=title, height=300), rows))
    groups = "Orange: " + "; blue: ".join(list(GROUPS)[:2]) + f"; grey: {list(GROUPS)[2]}."
    return Figure(
        title="Unchanged base: only training with a learned, growing factor lowers the loss; "
        "larger base: almost any sharpening does",
        panels=panels,
        width=300,
        note=groups,
    )


def _in_short(name: str) -> str:
    return look(name).label.removeprefix("(a), ").removeprefix("control: ")


def sharpness_against_loss(findings: Findings) -> Figure:
    """Draw how sharpness at 4T and the loss from T to 4T go together, a dot a configuration."""
    alt = altair()
    length = findings.train_length
    less = mean_differences(findings.position_losses, length, 4 * length)
    rows = []
    for name in (name for name in findings.sharpness if name in less):
        changes = []
        for one in findings.sharpness[name].values():
            weights = np.asarray(one.largest).mean((0, 1))
            before, after = (one.num_keys.index(n) for n in (length, 4 * length))
            changes.append(weights[after] / weights[before] - 1)
        rows.append(
            {"configuration": _in_short(name), "change": short(float(np.mean(changes))),
             "loss": short(float(np.mean(less[name]))), "colour": look(name).colour, "name": name}
        )  # fmt: skip
    ranks = [np.argsort(np.argsort([row[key] for row in rows])) for key in ("change", "loss")]
    rho = float(np.asarray(np.corrcoef(ranks))[0, 1])
    data = alt.Chart()
    at = alt.X(
        "change:Q",
        title="change of the mean largest attention weight from T to 4T keys",
        axis=alt.Axis(format="+.0%", grid=True),
    )
    up = alt.Y("loss:Q", title="loss less (a)'s from T to 4T, nats").scale(padding=12)
    colour = alt.Color("colour:N", scale=None)
    chart = alt.layer(
        data.mark_point(filled=True, size=70, opacity=1).encode(at, up, colour),
        *(
            data.transform_filter(alt.FieldOneOfPredicate("name", list(names)))
            .mark_text(fontSize=12, **place)
            .encode(at, up, alt.Text("configuration:N"), colour)
            for names, place in NAMED
        ),
    )
    verb = "goes with" if abs(rho) >= 0.5 else "does not predict"
    return Figure(
        title=f"How sharp attention stays from T to 4T {verb} the loss there (Spearman {rho:+.2f} "
        f"over {len(rows)} configurations, larger base)".replace("-", "\u2212"),
        panels=[Panel(chart.properties(height=340), rows)],
        width=560,
    )


def learned_factor(findings: Findings) -> Figure:
    """Draw the factor that each rule has learned against n, over that at a few keys."""
    length = findings.train_length
    n = np.unique(np.geomspace(FEW_KEYS, length, 100).round().astype(int))
    rows: list[Row] = []
    for name, runs in findings.scales.items():
        factors = (_factor(look(name).rule, n, values) for values in runs.values())
        found = [factor / factor[0] for factor in factors if factor is not None]
        if found:
            rows += over_runs(name, "n", n.tolist(), found)
    series = [
        Series(name="b", label="(b) SSMax: log n", colour=look("b").colour),
        Series(name="d", label=look("d").label, colour=look("d").colour, dash=look("d").dash),
        Series(name="sqrt_log", label="sqrt(log n)", colour=look("sqrt_log").colour, dash="--"),
        Series(name="probe", label="left free: p_n", colour=INK),
        Series(name="polylog", label="polylog", colour=look("polylog").colour, dash="-."),
    ]
    ends = {row["name"]: row for row in rows}
    chart = curves(
        rows, series, x="n", y=f"learned factor, over that at n = {FEW_KEYS}", log_x=True,
        marks=[Mark(x=length, text="training length")], height=320,
    )  # fmt: skip
    return Figure(
        title=f"Left free, the factor grows x {ends['probe']['low']:.1f} to "
        f"{ends['probe']['high']:.1f} from {FEW_KEYS} keys to T, along a line in log n; SSMax's "
        f"grows x {ends['b']['y']:.1f}",
        panels=[chart],
        width=560,
    )


def _factor(rule: str, n: np.ndarray, values: Mapping[str, Sequence[float]]) -> np.ndarray | None:
    """Compute a rule's factor at n with its parameters' means over heads."""

    def mean(parameter: str) -> float:
        return float(np.mean(learned(values, parameter) or 0.0))

    match rule:
        case "probe":
            return mean("s") * np.asarray(values["table.p"])[n - 1] + mean("bias")
        case "ssmax" | "ssmax_bias":
            return mean("s") * np.log(n) + mean("bias")
        case "sqrt_log":
            return mean("s") * np.sqrt(np.log(n))
        case "polylog":
            return 1 + mean("beta") * np.log(n) ** mean("gamma")
    return None


def retrieval_by_length(studies: Sequence[Findings]) -> Figure:
    """Draw needle retrieval accuracy by length where it can fail, a dot for each seed.

    Of the first study at the unchanged RoPE base, of the last at the middle one too.
    """
    last = studies[-1]
    bases = next(iter(last.grids["a"].values())).base_factors
    shown = [*((findings, 1.0) for findings in studies), (last, bases[len(bases) // 2])]
    panels = [_retrieval_panel(findings, factor) for findings, factor in shown]
    told = "; ".join(
        f"{parameters(findings.study)} parameters: SSMax {_points(findings, 'b')}, a constant on "
        f"softmax's queries {_points(findings, 'constant')}"
        for findings in studies
    )
    return Figure(
        title=f"Points more of the numbers than softmax where it can fail, {told}",
        panels=panels,
        columns=len(panels),
        width=240,
        note="Dots are seeds of softmax and SSMax; bands reach over the seeds of the others.",
    )


def _points(findings: Findings, name: str) -> str:
    one = next(one for one in findings.comparisons if one.text == MORE_THAN_SOFTMAX[name])
    assert one.effect is not None and one.low is not None and one.high is not None
    found = f"{100 * one.effect:+.0f} [{100 * one.low:+.0f}, {100 * one.high:+.0f}]"
    return found.replace("-", "\u2212")


def _retrieval_panel(findings: Findings, factor: float) -> Panel:
    series = [
        Series(name=name, label=label, colour=look(name).colour, dash=look(name).dash)
        for name, label in RETRIEVING.items()
        if name in findings.grids
    ]
    rows: list[Row] = []
    seeds: list[Row] = []
    for one in series:
        grids = [grid for run, grid in findings.grids[one.name].items() if run.seed != PILOT_SEED]
        found = [grid.accuracy[grid.base_factors.index(factor)] for grid in grids]
        if one.name in ("a", "b"):
            for accuracy in found:
                seeds += over_runs(one.name, "context", grids[0].lengths, [accuracy])
            found = [np.mean(found, 0)]
        rows += over_runs(one.name, "context", grids[0].lengths, found)
    base = "base unchanged" if factor == 1 else f"base x {factor:g}"
    return curves(
        rows, series, x="context", y="needle retrieval accuracy",
        title=f"{parameters(findings.study)} parameters, {base}", log_x=True, domain=(0, 1),
        marks=[Mark(x=findings.train_length, text="T")], points=seeds, toggles=False,
    )  # fmt: skip


def rope_limits(results: Mapping[str, Findings]) -> Figure:
    """Draw where the loss breaks against where arithmetic says that RoPE gives out."""
    alt = altair()
    rows = []
    for study, findings in sorted(results.items()):
        model = findings.study["pretraining"]["model"]
        if findings.rope_limit is None or model["rotary_dim"] is not None or model["window"]:
            continue
        for name in ("a", "b"):
            for one in findings.position_losses.get(name, {}).values():
                place = breaks_at(one.mean, findings.train_length)
                if place is not None:
                    limit = round(findings.rope_limit)
                    rows.append({"study": study, "name": name, "limit": limit, "breaks": place})
    low, high = np.quantile([row["breaks"] / row["limit"] for row in rows], (0.1, 0.9))
    ends = [min(row["limit"] for row in rows) * 0.8, max(row["breaks"] for row in rows) * 1.2]
    scale = {"type": "log", "base": 2, "nice": False, "domain": [short(end) for end in ends]}
    axis = alt.Axis(format=",d", tickCount=7, grid=True)
    colour = alt.Color("name:N", legend=None).scale(
        domain=["a", "b"], range=[look("a").colour, look("b").colour]
    )
    chart = alt.layer(
        alt.Chart(alt.Data(values=[{"x": end, "y": end} for end in ends]))
        .mark_line(color=LINE, strokeDash=DASHES["--"], strokeWidth=1.5)
        .encode(alt.X("x:Q").scale(**scale), alt.Y("y:Q").scale(**scale)),
        alt.Chart()
        .mark_point(size=60, strokeWidth=1.8, opacity=0.9)
        .encode(
            alt.X("limit:Q", title="RoPE limit, computed", axis=axis).scale(**scale),
            alt.Y("breaks:Q", title="position where the loss breaks", axis=axis).scale(**scale),
            colour,
        ),
    )
    count = len({row["study"] for row in rows})
    return Figure(
        title=f"The loss breaks at {low:.1f} to {high:.1f} times the computed RoPE limit "
        f"({len(rows)} runs of {count} studies)",
        panels=[Panel(chart.properties(height=360), rows)],
        width=420,
        note="Black: softmax; orange: SSMax; dashed: equal.",
    )
