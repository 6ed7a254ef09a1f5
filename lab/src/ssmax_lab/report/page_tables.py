"""The numbers behind every figure as HTML tables, readable without JavaScript."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ssmax_lab.analysis.vectors import (
    FIGURE_1_S,
    FIGURE_3_SIZES,
    figure1_output,
    figure3_output,
    ssmax_factor,
)

MAX_ROWS = 30
NONE = "&ndash;"


def number(value: float | None, digits: int = 4) -> str:
    """Write in HTML: significant digits, thousands separated, a real minus."""
    if value is None:
        return NONE
    if isinstance(value, int) or abs(value) >= 10**digits:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "&minus;")


def table(header: Iterable[str], rows: Iterable[Sequence[str]], *, caption: str = "") -> str:
    """Make an HTML table of cells that are HTML already; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    title = f"<caption>{caption}</caption>" if caption else ""
    # It scrolls by itself where the screen is narrow, so it must take the keyboard's focus.
    return (
        f'<div class="scroll" tabindex="0"><table>{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def thin(values: Sequence[Any]) -> list[Any]:
    """Keep at most MAX_ROWS of the values, evenly spread, both ends kept."""
    if len(values) <= MAX_ROWS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]


def label(payload: Mapping[str, Any], name: str, drawn: Mapping[str, Any]) -> str:
    """Label a configuration where its runs are drawn, in HTML."""
    always = payload.get("looks", {}).get(name, {}).get("label", name)
    return escape(drawn.get("label", always))


def curves_table(
    payload: Mapping[str, Any],
    curves: Mapping[str, Mapping[str, Sequence[Any]]],
    x_title: str,
    *,
    x: str = "x",
    y: str = "y",
    caption: str = "",
) -> str:
    """Tabulate a column for each configuration; rows where all have a value, if there are such."""
    columns = {name: dict(zip(curve[x], curve[y], strict=True)) for name, curve in curves.items()}
    shared = set.intersection(*(set(column) for column in columns.values()))
    places = shared or {place for column in columns.values() for place in column}
    rows = [
        [number(place), *(number(column.get(place)) for column in columns.values())]
        for place in thin(sorted(places))
    ]
    header = [x_title, *(label(payload, name, curve) for name, curve in curves.items())]
    return table(header, rows, caption=caption)


def figure1_table(payload: Mapping[str, Any]) -> str:
    """Tabulate the largest output for the paper's first input."""
    sizes = [digit * 10**power for power in range(6) for digit in (1, 2, 5)][1:-2]
    rows = [
        [number(n), number(figure1_output(n, 1.0)), number(figure1_output(n, ssmax_factor(n)))]
        for n in sizes
    ]
    return table(["n", "softmax", f"SSMax, s = {FIGURE_1_S}"], rows)


def figure2_table(payload: Mapping[str, Any]) -> str:
    """Tabulate the learned table of each seed, and how well each shape fits it."""
    data = payload["figures"]["2"]
    first = data.get("first", 1)
    last = first + max(len(values) for values in data["tables"].values())
    places = thin(range(first, last))
    rows = [
        [number(n), *(number(dict(enumerate(p, first)).get(n)) for p in data["tables"].values())]
        for n in places
    ]
    learned = table(["n", *(f"p<sub>n</sub>, {escape(seed)}" for seed in data["tables"])], rows)
    fits = [
        [f"{escape(seed)}, {escape(fit['name'])}", *(number(fit[k]) for k in ("a1", "a2", "r2"))]
        for seed, found in data.get("fits", {}).items()
        for fit in found
    ]
    header = ["fit", "a<sub>1</sub>", "a<sub>2</sub>", "R<sup>2</sup>"]
    return (table(header, fits) if fits else "") + learned


def figure3_table(payload: Mapping[str, Any]) -> str:
    """Tabulate the output of z_max for the paper's second input."""
    rows = []
    for z_max in np.linspace(0.0, 20.0, 21).tolist():
        softmax = [figure3_output(n, z_max, 1.0) for n in FIGURE_3_SIZES]
        ssmax = [figure3_output(n, z_max, ssmax_factor(n)) for n in FIGURE_3_SIZES]
        rows.append([number(z_max), *map(number, softmax + ssmax)])
    header = [f"{kind}, n = {n:,}" for kind in ("softmax", "SSMax") for n in FIGURE_3_SIZES]
    return table(["z<sub>max</sub>", *header], rows)


def figure4_table(payload: Mapping[str, Any]) -> str:
    """Tabulate training loss by step."""
    return losses_tables(payload, payload["figures"]["4"], "step")


def figure5_table(payload: Mapping[str, Any]) -> str:
    """Tabulate test loss by position, at each theta."""
    figure = payload["figures"]["5"]
    return "".join(
        losses_tables(payload, losses, "position", which=f"rotary base {number(losses['theta'])}")
        for losses in (figure, figure.get("same_theta"))
        if losses
    )


def losses_tables(
    payload: Mapping[str, Any], losses: Mapping[str, Any], x_title: str, *, which: str = ""
) -> str:
    """Tabulate losses as they are and, where there is something to compare, less (a)'s."""
    tables = curves_table(payload, losses["curves"], x_title, caption=which)
    if less := losses.get("less"):
        caption = ", ".join(filter(None, (which, f"less (a): {escape(less['note'])}")))
        tables += curves_table(payload, less["curves"], x_title, caption=caption)
    return tables


def figure6_table(payload: Mapping[str, Any]) -> str:
    """Tabulate whole numbers and first digits in percent, a table for each configuration."""
    tables = []
    for name, found in payload["figures"]["6"]["maps"].items():
        rows = [
            [f"{depth:.0%}", *(f"{100 * w:.0f} / {100 * f:.0f}" for w, f in zip(*row, strict=True))]
            for depth, *row in zip(found["depths"], found["whole"], found["first"], strict=True)
        ]
        trials = f"{found['trials']} trials a cell"
        caption = f"{label(payload, name, found)}: whole number / first digit, %; {trials}"
        header = ["depth", *(number(length) for length in found["lengths"])]
        tables.append(table(header, rows, caption=caption))
    return "".join(tables)


def figure7_table(payload: Mapping[str, Any]) -> str:
    """Tabulate the top scores by rank, and what was answered."""
    heads = payload["figures"]["7"]["heads"]
    ranked = _ranked({name: head["y"] for name, head in heads.items()}, number)
    answers = ["answer", *(escape(head["answer"]) for head in heads.values())]
    header = ["rank", *(label(payload, name, head) for name, head in heads.items())]
    return table(header, [answers, *ranked])


def figure8_table(payload: Mapping[str, Any]) -> str:
    """Tabulate the top score of each trial by rank, with what was answered."""
    trials = payload["figures"]["8"]["trials"]
    pairs = {name: list(zip(t["y"], t["answers"], strict=True)) for name, t in trials.items()}
    ranked = _ranked(pairs, lambda pair: f"{number(pair[0], 3)} {escape(pair[1])}")
    return table(["rank", *(label(payload, name, one) for name, one in trials.items())], ranked)


def _ranked(columns: Mapping[str, Sequence[Any]], write: Callable[[Any], str]) -> list[list[str]]:
    longest = max(len(column) for column in columns.values())
    return [
        [number(rank + 1), *(write(c[rank]) if rank < len(c) else NONE for c in columns.values())]
        for rank in thin(range(longest))
    ]


def scales_table(payload: Mapping[str, Any]) -> str:
    """Tabulate the learned s, and b where there is one, by layer and head."""
    return "".join(
        _by_head(values, f"{label(payload, name, found)}: {parameter}, start {start}")
        for name, found in payload["scales"].items()
        for parameter, start in (("s", number(found["start"])), ("b", "0"))
        if (values := found.get(parameter))
    )


def sharpness_table(payload: Mapping[str, Any]) -> str:
    """Tabulate mean largest weight and entropy by n."""
    curves = payload["sharpness"]
    return "".join(
        curves_table(payload, curves, "n", x="n", y=key, caption=caption)
        for key, caption in (("largest", "mean largest weight"), ("entropy", "entropy, nats"))
    )


def sharpness_by_head_table(payload: Mapping[str, Any]) -> str:
    """Tabulate every head's largest weight and entropy at the training length and the last n."""
    return "".join(
        _by_head(grid, f"{label(payload, name, heads)}: {what}, n = {number(n)}")
        for name, found in payload["sharpness"].items()
        if (heads := found.get("heads"))
        for key, what in (("largest", "largest weight"), ("entropy", "entropy, nats"))
        for n, grid in zip(heads["n"], heads[key], strict=True)
    )


def _by_head(grid: Sequence[Sequence[float | None]], caption: str) -> str:
    rows = [[f"layer {i}", *map(number, layer)] for i, layer in enumerate(grid, 1)]
    header = ["", *(f"head {i + 1}" for i in range(len(grid[0])))]
    return table(header, rows, caption=caption)


FIGURE_TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "1": figure1_table,
    "2": figure2_table,
    "3": figure3_table,
    "4": figure4_table,
    "5": figure5_table,
    "6": figure6_table,
    "7": figure7_table,
    "8": figure8_table,
}
