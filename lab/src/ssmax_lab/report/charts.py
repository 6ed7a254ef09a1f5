"""The forms that figures are made of: curves with bands and direct labels, and heat maps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ssmax_lab.configurations import labels, look
from ssmax_lab.report.style import CHARACTER, GRID, HEIGHT, HOVER, LINE, QUIET, Panel, altair
from ssmax_lab.report.tables import Table, wide_table

DASHES = {"-": [1, 0], "--": [6, 3], "-.": [6, 2, 1, 2], ":": [2, 2]}
OTHERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
"""Of what is no configuration of the study."""
SHAPES = {"whole number": "circle", "first digit": "triangle-up", "wrong": "cross"}
GAP = 0.055
"""Between two labels at the ends of curves, of the height of what is drawn in a usual panel."""
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """How one curve is called and drawn."""

    name: str
    label: str
    colour: str
    dash: str = "-"
    is_shown: bool = True
    """At first; the others are shown on request."""
    runs: str = ""
    """How many runs it is of, behind its label in tables, where not all are of as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line."""

    x: float
    text: str
    is_low: bool = False
    """Its words stand at the foot, where the curves leave the top."""


def series_of(found: Iterable[str], shown: Sequence[str] = ()) -> list[Series]:
    """Look up how configurations are drawn; `shown` at first, or the first five.

    Where `found` has the runs of each, tables tell how many they are.
    """
    names = list(found)
    first = [name for name in names if name in shown] or names[:5]
    counts = {n: len(runs) for n, runs in found.items()} if isinstance(found, Mapping) else {}
    made = []
    for place, name in enumerate(names):
        known = look(name)
        made.append(
            Series(
                name=name,
                label=known.label.removeprefix("control: "),
                colour=known.colour if known.rule else OTHERS[place % len(OTHERS)],
                dash=known.dash,
                is_shown=name in first,
                runs=labels(counts).get(name, "").removeprefix(known.label),
            )
        )
    return made


def over_runs(name: str, x_name: str, x: Sequence[Any], runs: Any, **more: Any) -> list[Row]:
    """Make the rows of a curve, (runs, points): means, and the least and largest of the runs."""
    values = np.asarray(runs, float)
    low, mean, high = values.min(0), values.mean(0), values.max(0)
    return [
        {"name": name, x_name: place, "y": short(m), "low": short(a), "high": short(b), **more}
        for place, m, a, b in zip(x, mean, low, high, strict=True)
        if math.isfinite(m)
    ]


def short(value: float) -> float:
    """Keep four digits, which is what can be seen and read."""
    return float(f"{value:.4g}")


def curves(
    rows: Sequence[Row],
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    zero: bool = False,
    domain: tuple[float, float] | None = None,
    form: str = ".4f",
    marks: Sequence[Mark] = (),
    measures: Sequence[str] = (),
    dots: bool = False,
    points: Sequence[Row] = (),
    toggles: bool = True,
    height: int = HEIGHT,
) -> Panel:
    """Draw curves that are labelled at their ends, with bands where rows have `low` and `high`.

    A row has its series' `name`, its place under `x`'s own name, and `y`. Of several `measures`, of
    which every row names one, the reader chooses; they stand where the title of the y axis does.
    `points` are drawn beside the curves; an `answer` says what marker one has.
    """
    alt = altair()
    names = [one.name for one in series]
    label_of = {one.name: one.label for one in series}
    values = [
        {"low": row["y"], "high": row["y"], **row, "label": label_of[row["name"]]}
        for row in rows
        if row["name"] in label_of
    ]
    data, beside = alt.Chart(), alt.Chart(alt.Data(values=list(points)))
    params: list[Any] = []
    if len(measures) > 1:
        bind = alt.binding_radio(options=list(measures), name="shown")
        params.append(alt.param(name="measure", value=measures[0], bind=bind))
        data = data.transform_filter("datum.measure == measure")
    if toggles and len(series) > 1:
        params += [
            alt.param(name=f"show_{_word(one.name)}", value=one.is_shown,
                      bind=alt.binding_checkbox(name=one.label))
            for one in series
        ]  # fmt: skip
        shown = ",".join(f"'{name}':show_{_word(name)}" for name in names)
        data, beside = (one.transform_filter(f"{{{shown}}}[datum.name]") for one in (data, beside))
    zoom = alt.selection_interval(
        name=f"zoom_{_word(title or x + y)}",
        bind="scales",
        encodings=["x"],
        zoom="wheel![event.ctrlKey]",
    )
    hover = alt.selection_point(
        name=f"hover_{_word(title or x + y)}", encodings=["x"], nearest=True, on="pointermove",
        clear="pointerout", empty=False,
    )  # fmt: skip
    colour = alt.Color("name:N", legend=None).scale(
        domain=names, range=[one.colour for one in series]
    )
    dash = alt.StrokeDash("name:N", legend=None).scale(
        domain=names, range=[DASHES[one.dash] for one in series]
    )
    at, up, x_scale = _axes(values, x, log_x=log_x, log_y=log_y, zero=zero, domain=domain)
    layers = []
    if has_bands := any(row["low"] != row["high"] for row in values):
        band = data.mark_area(opacity=0.14, clip=True)
        layers.append(band.encode(at, alt.Y("low:Q", title=None), alt.Y2("high"), colour))
    line = data.mark_line(
        strokeWidth=2, clip=True, point=alt.OverlayMarkDef(size=34, filled=True) if dots else False
    )
    layers.append(line.encode(at, up, colour, dash))
    if points:
        drawn = beside.mark_point(size=26, strokeWidth=1.6, opacity=0.9, tooltip=None, clip=True)
        marker = alt.Shape("answer:N", legend=None).scale(
            domain=list(SHAPES), range=list(SHAPES.values())
        )
        layers.append(drawn.encode(at, up, colour, *([marker] if "answer" in points[0] else [])))
    places = [row[x] for row in values]
    for line, mark in enumerate(marks):
        layers.append(
            _mark(alt, mark, line, x_scale, height, is_left=_is_right(mark.x, places, log_x))
        )
    layers.append(
        _labels(data, zoom, x, log_y, zero, domain, GAP * HEIGHT / height).encode(
            at, alt.Y("at:Q", title=None), colour, alt.Text("label:N")
        )
    )
    told = f"format(datum.y, '{form}')"
    if has_bands:
        seeds = f"' (' + format(datum.low, '{form}') + ' to ' + format(datum.high, '{form}') + ')'"
        told += f" + (datum.high > datum.low ? {seeds} : '')"
    read = data.transform_calculate(told=told).transform_pivot(
        "label", value="told", groupby=[x], op="max"
    )
    # An invisible line for every place: the nearest shows itself and what is there.
    layers.append(
        read.mark_rule(color=LINE, tooltip=alt.TooltipContent("data"), clip=True, style=HOVER)
        .encode(at, opacity=alt.condition(hover, alt.value(0.9), alt.value(0)))
        .add_params(zoom, hover)
    )
    layers.append(
        data.transform_filter(hover)
        .mark_point(filled=True, size=45, opacity=1, tooltip=None, clip=True, style=HOVER)
        .encode(at, up, colour)
    )
    layers.append(_y_title(alt, measures, y))
    chart = alt.layer(*layers).add_params(*params).properties(height=height)
    tables = [
        wide_table(
            [row for row in rows if row.get("measure", measure) == measure],
            {one.name: one.label + one.runs for one in series},
            x,
            caption=", ".join(filter(None, (title, measure))),
        )
        for measure in measures or [y]
    ]
    longest = max((len(one.label) for one in series if one.is_shown), default=0)
    return Panel(
        chart.properties(title=title) if title else chart,
        values,
        tables=tables,
        right=min(170, round(10 + CHARACTER * longest)),
    )


def _axes(
    values: Sequence[Row],
    x: str,
    *,
    log_x: bool,
    log_y: bool,
    zero: bool,
    domain: tuple[float, float] | None,
) -> tuple[Any, Any, dict[str, Any]]:
    """Make both axes, and the scale of x, which marks share."""
    alt = altair()
    x_scale: dict[str, Any] = {"type": "log", "base": 2} if log_x else {"zero": False}
    x_scale["nice"] = False
    y_scale: dict[str, Any] = {"type": "log"} if log_y else {"zero": zero}
    if domain is not None:
        y_scale["domain"] = list(domain)
    elif zero:
        y_scale["domainMin"] = 0
    elif log_y:
        y_scale |= {"nice": False, "domainMin": 0.8 * min(row["low"] for row in values)}
    axis = alt.Axis(format=",d", tickCount=7, labelOverlap="greedy")
    if log_x and max(row[x] for row in values) >= 2**17:
        axis.labelOverlap = "parity"
        axis.labelExpr = (
            "datum.value < 1024 ? datum.label : datum.value < 1048576 ? datum.value / 1024 + ' k' "
            ": datum.value / 1048576 + ' M'"
        )
    at = alt.X(f"{x}:Q", title=x, axis=axis).scale(**x_scale)
    ticks = {"values": _decades(values), "format": "~g"} if log_y else {"tickCount": 6}
    up = alt.Y("y:Q", title=None, axis=alt.Axis(**ticks)).scale(**y_scale)
    return at, up, x_scale


def _labels(
    data: Any,
    zoom: Any,
    x: str,
    log: bool,
    zero: bool,
    domain: tuple[float, float] | None,
    gap: float,
) -> Any:
    """Place a label at the last point in view of every curve, no two over each other.

    A running maximum pushes the labels up until they are apart, a running minimum down; halfway
    between the two they are still apart, and near their curves.
    """
    alt = altair()
    order = [alt.SortField("v")]
    bottom = "0" if zero else "datum.bottom"
    height = f"{domain[1] - domain[0]}" if domain else f"max(datum.top - {bottom}, 1e-9)"
    v, low, high = (f"log(datum.{y})" if log else f"datum.{y}" for y in ("y", "low", "high"))
    return (
        data.transform_filter(zoom)
        .transform_calculate(v=v, v_low=low, v_high=high)
        .transform_joinaggregate(last=f"max({x})", groupby=["name"])
        .transform_joinaggregate(top="max(v_high)", bottom="min(v_low)")
        .transform_filter(f"datum['{x}'] == datum.last")
        .transform_calculate(gap=f"{height} * {gap}")
        .transform_window(rank="row_number()", sort=order)
        .transform_joinaggregate(count="count()")
        .transform_calculate(
            above="datum.v - datum.rank * datum.gap",
            below="datum.v + (datum.count - datum.rank) * datum.gap",
        )
        .transform_window(above="max(above)", sort=order, frame=[None, 0])
        .transform_window(below="min(below)", sort=order, frame=[0, None])
        .transform_calculate(
            middle="(datum.above + datum.below + (2 * datum.rank - datum.count) * datum.gap) / 2"
        )
        .transform_calculate(at="exp(datum.middle)" if log else "datum.middle")
        .mark_text(
            align="left",
            baseline="middle",
            dx=6,
            fontSize=12,
            limit=170,
            clip=False,
            tooltip=None,
            style="end",
        )
    )


def _is_right(place: float, places: Sequence[float], log: bool) -> bool:
    """Tell whether words beside a place would leave the drawing."""
    low, high, at = (
        math.log(max(n, 1e-9)) if log else n for n in (min(places), max(places), place)
    )
    return at > low + 0.75 * (high - low)


def _mark(
    alt: Any, mark: Mark, line: int, scale: dict[str, Any], height: int, *, is_left: bool
) -> Any:
    data = alt.Chart(alt.Data(values=[{"place": mark.x, "words": mark.text}]))
    at = alt.X("place:Q").scale(**scale)
    rule = data.mark_rule(color=LINE, strokeDash=[3, 3], tooltip=None, clip=True).encode(at)
    y = height - 16 if mark.is_low else 2 + 13 * line
    words = data.mark_text(
        align="right" if is_left else "left", baseline="top", dx=-4 if is_left else 4, y=y,
        color=QUIET, tooltip=None, clip=True,
    )  # fmt: skip
    return rule + words.encode(at, alt.Text("words:N"))


def _y_title(alt: Any, measures: Sequence[str], y: str) -> Any:
    """Write what is on the y axis above it, where it can be read without turning the head."""
    words = alt.ExprRef("measure") if len(measures) > 1 else (measures[0] if measures else y)
    return alt.Chart(alt.Data(values=[{}])).mark_text(
        align="left", baseline="bottom", x=0, y=-7, text=words, color=QUIET, fontSize=12,
        tooltip=None, clip=False,
    )  # fmt: skip


def _decades(values: Sequence[Row]) -> list[float]:
    """Choose ticks of a logarithmic axis: 1, 2 and 5 of every power of ten."""
    low = min(row["low"] for row in values)
    every = (digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5))
    return [short(tick) for tick in every if tick >= 0.8 * low]


def _word(text: str) -> str:
    """Make a name that expressions can hold."""
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def heat_map(
    rows: Sequence[Row],
    *,
    x: str,
    y: str,
    title: str,
    scheme: Literal["cividis", "blueorange"] = "cividis",
    tooltip: Sequence[str] = (),
) -> Panel:
    """Draw a map whose cells hold numbers: each row has a `share`, from 0 to 1, and a `text`."""
    alt = altair()
    order = list(dict.fromkeys(row[y] for row in rows))
    places = list(dict.fromkeys(row[x] for row in rows))
    angle = -45 if max(map(len, places)) > 3 else 0
    at = alt.X(f"{x}:N", sort=places, axis=alt.Axis(labelAngle=angle, ticks=False, domain=False))
    up = alt.Y(f"{y}:N", sort=order)
    shade = alt.Color("share:Q", legend=None).scale(scheme=scheme, domain=[0.0, 1.0], clamp=True)
    told = [alt.Tooltip(f"{field}:N") for field in (x, y, *tooltip)]
    data = alt.Chart()
    cells = data.mark_rect(stroke=GRID, strokeWidth=0.5).encode(at, up, shade, tooltip=told)
    # cividis is dark at its low end, a diverging scheme at both.
    is_dark = "datum.share < 0.5" if scheme == "cividis" else "abs(datum.share - 0.5) > 0.3"
    words = data.mark_text(fontSize=10).encode(
        at, up, alt.Text("text:N"), tooltip=told,
        color=alt.condition(is_dark, alt.value("white"), alt.value("black")),
    )  # fmt: skip
    lines = [[place, *(row["text"] for row in rows if row[y] == place)] for place in order]
    table = Table(header=[f"{y} \\ {x}", *places], rows=lines, caption=title)
    chart = alt.layer(cells, words).properties(height=240, title=title)
    return Panel(chart, rows, tables=[table])
