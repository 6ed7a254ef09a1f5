"""The figures of docs/results.md, from all recorded studies: a message each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ssmax_lab.analysis.findings import ByReplica, Findings
from ssmax_lab.analysis.measures import (
    differences,
    mean_between,
    octave_differences,
    paired,
    retrieval_accuracy,
)
from ssmax_lab.analysis.rope import breaks_at
from ssmax_lab.analysis.statistics import over_seeds
from ssmax_lab.configurations import CONTROL, look
from ssmax_lab.records import PositionLoss
from ssmax_lab.report.charts import (
    DASHES,
    Mark,
    Row,
    Series,
    curves,
    over_runs,
    series_of,
    short,
)
from ssmax_lab.report.figures import LESS, retrieval_grid
from ssmax_lab.report.style import INK, LINE, QUIET, Figure, Panel, altair

FIVE = ("a", "b", "mean_log", "constant", CONTROL)
"""Softmax, SSMax, a constant in training and at test time, and the control."""
GROUPS = {
    "trained, the factor grows with n": ("b", "d", "sqrt_log", "b_held", "c", "polylog"),
    "trained, no n": ("mean_log", CONTROL),
    "at test time": ("e", "constant", "clamp", "yarn"),
}
"""The twelve interventions of the forest plot."""
FEW_KEYS = 8
"""From here on the learned factor is compared; before it a weight has too few rivals."""
RIGHT = 130


def unchanged(findings: Findings) -> tuple[str, ByReplica[PositionLoss], int]:
    """Tell the base, the losses, and where the primary stretch at the unchanged base ends."""
    return "unchanged RoPE base", findings.same_theta_losses, 4 * findings.train_length


def raised(findings: Findings) -> tuple[str, ByReplica[PositionLoss], int]:
    """Likewise at the larger base, to the RoPE limit."""
    end = round(findings.rope_limit or 4 * findings.train_length)
    return f"RoPE base x {findings.study['theta_factor']:g}", findings.position_losses, end


def loss_at_length(findings: Findings) -> Figure:
    """Draw the loss less (a)'s by position, five configurations at both bases."""
    length = findings.train_length
    series = series_of([name for name in FIVE if name in findings.position_losses], FIVE)
    panels, told = [], []
    for base, losses, end in (unchanged(findings), raised(findings)):
        rows: list[Row] = []
        for one in series:
            pairs = differences(losses, octave_differences).get(one.name, [])
            if pairs:
                rows += over_runs(one.name, "position", pairs[0][0], [y for _, y in pairs])
        last = max(row["position"] for row in rows)
        marks = [Mark(x=length, text="training length"), Mark(x=end, text="4T")]
        if base != "unchanged RoPE base":
            marks[1] = Mark(x=end, text="RoPE limit")
        panels.append(
            curves(
                [row for row in rows if row["position"] >= length / 4 or last < length],
                series, x="position", y=LESS, title=base, log_x=True, marks=marks, height=320,
            )
        )  # fmt: skip
        told.append({name: np.mean(_less(losses, length, end, name)) for name in ("b", "constant")})
    return Figure(
        title=f"From T to 4T at the unchanged base SSMax changes the loss by "
        f"{_moves(told[0]['b'])}, a constant by {_moves(told[0]['constant'])}; at the larger "
        f"base, to the RoPE limit, by "
        f"{_moves(told[1]['b'])} and {_moves(told[1]['constant'])}",
        panels=panels,
        width=400,
        right=RIGHT,
    )


def _moves(nats: float | np.floating) -> str:
    return f"{nats:+.3f} nats".replace("-", "\u2212")


def _less(losses: ByReplica[PositionLoss], start: int, stop: int, name: str) -> Sequence[float]:
    mean = mean_between(start, stop)
    return [mean(own) - mean(base) for base, own in paired(losses).get(name, [])]


def forest(findings: Findings) -> Figure:
    """Draw twelve interventions, loss less (a)'s with intervals over seeds, at both bases."""
    alt = altair()
    panels = []
    names = [name for group in GROUPS.values() for name in group]
    for place, (base, losses, end) in enumerate((unchanged(findings), raised(findings))):
        rows = []
        for group, members in GROUPS.items():
            for name in members:
                pairs = _less(losses, findings.train_length, end, name)
                if pairs:
                    found = over_seeds(pairs, [0.0] * len(pairs))
                    rows.append(
                        {
                            "configuration": _in_forest(name),
                            "group": group,
                            "effect": short(found.effect),
                            "low": short(found.effect if found.low is None else found.low),
                            "high": short(found.effect if found.high is None else found.high),
                        }
                    )
        order = [_in_forest(name) for name in names]
        data = alt.Chart()
        up = alt.Y(
            "configuration:N",
            sort=order,
            title=None,
            axis=alt.Axis(labels=place == 0, labelLimit=220, ticks=False, domain=False),
        )
        colour = alt.Color("group:N", legend=None).scale(
            domain=list(GROUPS), range=[look("b").colour, look(CONTROL).colour, "#6b7280"]
        )
        stretch = f"T to {'4T' if place == 0 else 'the RoPE limit'}"
        at = alt.X("effect:Q", title=LESS, axis=alt.Axis(grid=True, tickCount=6))
        zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(color=LINE)
        chart = alt.layer(
            zero.encode(alt.X("zero:Q")),
            data.mark_rule(strokeWidth=2).encode(
                alt.X("low:Q", title=LESS), alt.X2("high"), up, colour
            ),
            data.mark_point(filled=True, size=55, opacity=1).encode(at, up, colour),
        )
        panels.append(Panel(chart.properties(title=f"{base}, {stretch}", height=300), rows))
    groups = "Orange: " + "; blue: ".join(list(GROUPS)[:2]) + f"; grey: {list(GROUPS)[2]}."
    return Figure(
        title="Unchanged base: only training with a learned, growing factor lowers the loss; "
        "larger base: almost any sharpening does",
        panels=panels,
        width=300,
        note=groups,
    )


def _in_forest(name: str) -> str:
    return look(name).label.removeprefix("(a), ").removeprefix("control: ")


def sharpness_against_loss(findings: Findings) -> Figure:
    """Draw how sharpness at 4T and the loss from T to 4T go together, a dot a configuration."""
    alt = altair()
    length = findings.train_length
    rows = []
    for name, runs in findings.sharpness.items():
        pairs = _less(findings.position_losses, length, 4 * length, name)
        changes = []
        for one in runs.values():
            weights = np.asarray(one.largest).mean((0, 1))
            before, after = (one.num_keys.index(n) for n in (length, 4 * length))
            changes.append(weights[after] / weights[before] - 1)
        if pairs:
            rows.append(
                {
                    "configuration": _in_forest(name),
                    "change": short(float(np.mean(changes))),
                    "loss": short(float(np.mean(pairs))),
                    "colour": look(name).colour,
                    "name": name,
                }
            )
    rho = _spearman([row["change"] for row in rows], [row["loss"] for row in rows])
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


NAMED: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("b", "mean_log", "polylog", CONTROL, "constant", "c"), {"align": "left", "dx": 8}),
    (("a",), {"align": "right", "dx": -8}),
    (("b_held",), {"align": "left", "dx": -4, "dy": -12}),
)
"""Dots of the scatter plot that have a label, and where it stands clear of the others."""


def _spearman(x: Sequence[float], y: Sequence[float]) -> float:
    first, second = (np.argsort(np.argsort(values)).astype(float) for values in (x, y))
    return float(np.corrcoef(first, second)[0, 1])


def learned_factor(findings: Findings) -> Figure:
    """Draw the factor that each rule has learned against n, over that at a few keys."""
    length = findings.train_length
    n = np.unique(np.geomspace(FEW_KEYS, length, 100).round().astype(int))
    rows: list[Row] = []
    for name, runs in findings.scales.items():
        found = []
        for values in runs.values():
            means = {key: _mean(values, key) for key in ("s", "bias", "beta", "gamma")}
            table = values.get("table.p")
            factor = _factor(look(name).rule, n, means, table)
            if factor is not None:
                found.append(factor / factor[0])
        if found:
            rows += over_runs(name, "n", n.tolist(), found)
    series = [
        Series(name="b", label="(b) SSMax: log n", colour=look("b").colour),
        Series(name="d", label=look("d").label, colour=look("d").colour, dash=look("d").dash),
        Series(name="sqrt_log", label="sqrt(log n)", colour=look("sqrt_log").colour, dash="--"),
        Series(name="probe", label="left free: p_n", colour=INK),
        Series(name="polylog", label="polylog", colour=look("polylog").colour, dash="-."),
    ]
    ends = {
        name: [row for row in rows if row["name"] == name][-1]
        for name in ("b", "probe")
        if any(row["name"] == name for row in rows)
    }
    free = ends["probe"]
    chart = curves(
        rows, series, x="n", y=f"learned factor, over that at n = {FEW_KEYS}", log_x=True,
        marks=[Mark(x=length, text="training length")], height=320,
    )  # fmt: skip
    return Figure(
        title=f"Left free, the factor grows x {free['low']:.1f} to {free['high']:.1f} from "
        f"{FEW_KEYS} keys to T, along a line in log n; SSMax's grows x {ends['b']['y']:.1f}",
        panels=[chart],
        width=560,
        right=RIGHT,
    )


def _mean(values: Mapping[str, Sequence[float]], parameter: str) -> float:
    found = [one for name, one in values.items() if name.endswith(f".{parameter}")]
    return float(np.mean(found)) if found else 0.0


def _factor(
    rule: str, n: np.ndarray, means: Mapping[str, float], table: Sequence[float] | None
) -> np.ndarray | None:
    """Compute a rule's factor at n with its parameters' means over heads."""
    if rule == "probe" and table is not None:
        return means["s"] * np.array([table[k - 1] for k in n]) + means["bias"]
    if rule in ("ssmax", "ssmax_bias"):
        return means["s"] * np.log(n) + means["bias"]
    if rule == "sqrt_log":
        return means["s"] * np.sqrt(np.log(n))
    if rule == "polylog":
        return 1 + means["beta"] * np.log(n) ** means["gamma"]
    return None


def retrieval_by_length(findings: Findings) -> Figure:
    """Draw needle retrieval accuracy against length, a dot for each seed."""
    alt = altair()
    length = findings.train_length
    rows = []
    for name in ("a", "b"):
        for replica, trials in findings.trials.get(name, {}).items():
            for context in sorted({one.length for one in trials}):
                found = [one.is_whole for one in trials if one.length == context]
                rows.append(
                    {
                        "name": name,
                        "label": look(name).label,
                        "seed": f"{replica}",
                        "context": context,
                        "accuracy": short(float(np.mean(found))),
                        # The seeds of two configurations stand beside each other.
                        "place": short(context * (0.97 if name == "a" else 1.03)),
                    }
                )
    beyond = {
        name: [retrieval_accuracy(length, is_long=True)(one) for one in runs.values()]
        for name, runs in findings.trials.items()
        if name in ("a", "b")
    }
    gap = over_seeds(
        *(
            [
                retrieval_accuracy(length, is_long=True)(pair[side])
                for pair in paired(findings.trials)["b"]
            ]
            for side in (1, 0)
        )
    )
    scale = {"type": "log", "base": 2, "nice": False}
    data = alt.Chart()
    colour = alt.Color("name:N", legend=None).scale(
        domain=["a", "b"], range=[look("a").colour, look("b").colour]
    )
    at = alt.X("place:Q", title="context, tokens", axis=alt.Axis(format=",d")).scale(**scale)
    up = alt.Y("accuracy:Q", title=None, axis=alt.Axis(format=".0%")).scale(domain=[0, 1])
    means = data.transform_aggregate(accuracy="mean(accuracy)", groupby=["name", "context"])
    mean_at = alt.X("context:Q", title="context, tokens").scale(**scale)
    marks = alt.Chart(alt.Data(values=[{"place": length}]))
    last = max(row["context"] for row in rows)
    names = [
        {"label": f"{look(name).label}: {np.mean(values):.0%} beyond T", "name": name,
         "at": 0.5 - 0.07 * line}
        for line, (name, values) in enumerate(beyond.items())
    ]  # fmt: skip
    chart = alt.layer(
        marks.mark_rule(color=LINE, strokeDash=[3, 3]).encode(alt.X("place:Q").scale(**scale)),
        marks.mark_text(align="left", dx=4, y=308, color=QUIET, text="training length").encode(
            alt.X("place:Q").scale(**scale)
        ),
        means.mark_line(strokeWidth=2).encode(mean_at, up, colour),
        data.mark_point(size=34, strokeWidth=1.4, opacity=0.8).encode(at, up, colour),
        alt.Chart(alt.Data(values=names))
        .mark_text(align="left", x=12, fontSize=12)
        .encode(alt.Y("at:Q"), alt.Text("label:N"), colour),
    )
    interval = (
        ""
        if gap.low is None or gap.high is None
        else f" [{100 * gap.low:+.0f}, {100 * gap.high:+.0f}]"
    )
    return Figure(
        title=f"From T to {last:,} tokens SSMax finds {100 * gap.effect:+.0f} points{interval} "
        f"more of the numbers than softmax ({gap.basis})".replace("-", "\u2212"),
        panels=[Panel(chart.properties(height=320), rows)],
        width=560,
    )


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
                    rows.append(
                        {
                            "study": study,
                            "name": name,
                            "limit": round(findings.rope_limit),
                            "breaks": place,
                        }
                    )
    ratios = [row["breaks"] / row["limit"] for row in rows]
    low, high = np.quantile(ratios, (0.1, 0.9))
    ends = [min(row["limit"] for row in rows) * 0.8, max(row["breaks"] for row in rows) * 1.2]
    scale = {"type": "log", "base": 2, "nice": False, "domain": [short(end) for end in ends]}
    line = alt.Chart(alt.Data(values=[{"x": end, "y": end} for end in ends]))
    data = alt.Chart()
    colour = alt.Color("name:N", legend=None).scale(
        domain=["a", "b"], range=[look("a").colour, look("b").colour]
    )
    axis = alt.Axis(format=",d", tickCount=7, grid=True)
    chart = alt.layer(
        line.mark_line(color=LINE, strokeDash=DASHES["--"], strokeWidth=1.5).encode(
            alt.X("x:Q").scale(**scale), alt.Y("y:Q").scale(**scale)
        ),
        data.mark_point(size=60, strokeWidth=1.8, opacity=0.9).encode(
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


def variants(
    losses: Mapping[str, Mapping[str, Sequence[float]]],
    found: Mapping[str, Mapping[str, Sequence[float]]],
) -> Figure:
    """Draw configurations under every variant of a preset: means and ranges of runs."""
    alt = altair()
    panels = []
    names = [name for name in FIVE if any(name in one for one in losses.values())]
    colour = alt.Color("name:N", legend=None).scale(
        domain=names, range=[look(name).colour for name in names]
    )
    for place, (title, panel) in enumerate(
        (("loss beyond T, nats", losses), ("needle retrieval accuracy beyond T", found))
    ):
        rows = [
            {
                "variant": variant,
                "name": name,
                "mean": short(float(np.mean(values))),
                "low": short(min(values)),
                "high": short(max(values)),
            }
            for variant, by_name in panel.items()
            for name, values in by_name.items()
            if name in names and values
        ]
        data = alt.Chart()
        up = alt.Y(
            "variant:N",
            sort=list(losses),
            title=None,
            axis=alt.Axis(labels=place == 0, ticks=False, domain=False, grid=True),
        )
        shift = alt.YOffset("name:N", sort=names)
        at = alt.X("mean:Q", title=title, axis=alt.Axis(grid=True)).scale(zero=place == 1)
        chart = alt.layer(
            data.mark_rule(strokeWidth=2).encode(
                alt.X("low:Q", title=title), alt.X2("high"), up, shift, colour
            ),
            data.mark_point(filled=True, size=45, opacity=1).encode(at, up, shift, colour),
        )
        panels.append(Panel(chart.properties(height=34 * len(losses)), rows))
    words = ", ".join(f"{look(name).label}" for name in names)
    return Figure(
        title="What position code, windows and size change, configuration by configuration",
        panels=panels,
        width=320,
        note=f"From above: {words}.",
    )


def every(results: Mapping[str, Findings]) -> dict[str, Figure]:
    """Define all of them, by the name of their file."""
    newest = {
        findings.study["preset"]: findings
        for _, findings in sorted(results.items())
        if ":" not in findings.study["preset"]
    }
    small = newest["small"]
    # A study in which retrieval can fail says more than one in which it cannot.
    unsaturated = [one for _, one in sorted(results.items()) if one.grids]
    return {
        "results-loss-at-length": loss_at_length(small),
        "results-forest": forest(small),
        "results-sharpness": sharpness_against_loss(small),
        "results-factor": learned_factor(small),
        "results-retrieval": (
            retrieval_grid(unsaturated[-1].grids, train_length=unsaturated[-1].train_length)
            if unsaturated
            else retrieval_by_length(small)
        ),
        "results-rope-limit": rope_limits(results),
    }
