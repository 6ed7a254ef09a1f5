"""The numbers behind every figure as HTML tables, readable without JavaScript."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ssmax_lab.analysis.figure_inputs import (
    FIGURE_1_S,
    FIGURE_3_SIZES,
    figure1_output,
    figure3_output,
    ssmax_factor,
)

MAX_ROWS = 30
NONE = "&ndash;"
Payload = Mapping[str, Any]


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
    """Keep at most MAX_ROWS of the values, evenly spread, with both ends."""
    if len(values) <= MAX_ROWS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]


def columns_table(
    x_title: str,
    columns: Mapping[str, Mapping[Any, Any]],
    *,
    is_shared: bool = True,
    write: Callable[[Any], str] = number,
    caption: str = "",
) -> str:
    """Make a table of a column each; of rows that all have, where there are such and it is asked.

    A column has its values by what stands in the first cell of a row.
    """
    shared = set.intersection(*map(set, columns.values())) if is_shared else set()
    rows = [
        [
            number(place),
            *(write(column[place]) if place in column else NONE for column in columns.values()),
        ]
        for place in thin(sorted(shared or set().union(*columns.values())))
    ]
    return table([x_title, *columns], rows, caption=caption)


def label(payload: Payload, name: str, drawn: Payload) -> str:
    """Label a configuration where its runs are drawn, in HTML."""
    always = payload.get("looks", {}).get(name, {}).get("label", name)
    return escape(drawn.get("label", always))


def curves_table(
    payload: Payload,
    curves: Payload,
    x_title: str,
    *,
    x: str = "x",
    y: str = "y",
    caption: str = "",
) -> str:
    """Make a column for each configuration's curve."""
    columns = {
        label(payload, name, curve): dict(zip(curve[x], curve[y], strict=True))
        for name, curve in curves.items()
    }
    return columns_table(x_title, columns, caption=caption)


def figure1_table(payload: Payload) -> str:
    """Make the table of the largest output for the paper's first input."""
    sizes = [digit * 10**power for power in range(6) for digit in (1, 2, 5)][1:-2]
    columns = {
        "softmax": {n: figure1_output(n, 1.0) for n in sizes},
        f"SSMax, s = {FIGURE_1_S}": {n: figure1_output(n, ssmax_factor(n)) for n in sizes},
    }
    return columns_table("n", columns)


def figure2_table(payload: Payload) -> str:
    """Make the tables of the fits, and of each seed's learned values."""
    data = payload["figures"]["2"]
    fits = [
        [f"{escape(seed)}, {escape(fit['name'])}", *(number(fit[k]) for k in ("a1", "a2", "r2"))]
        for seed, found in data.get("fits", {}).items()
        for fit in found
    ]
    header = ["fit", "a<sub>1</sub>", "a<sub>2</sub>", "R<sup>2</sup>"]
    learned = {
        f"p<sub>n</sub>, {escape(seed)}": dict(enumerate(values, data.get("first", 1)))
        for seed, values in data["tables"].items()
    }
    return (table(header, fits) if fits else "") + columns_table("n", learned, is_shared=False)


def figure3_table(payload: Payload) -> str:
    """Make the table of the output of z_max for the paper's second input."""
    tops = np.linspace(0.0, 20.0, 21).tolist()
    columns = {
        f"{kind}, n = {n:,}": {top: figure3_output(n, top, factor(n)) for top in tops}
        for kind, factor in (("softmax", lambda n: 1.0), ("SSMax", ssmax_factor))
        for n in FIGURE_3_SIZES
    }
    return columns_table("z<sub>max</sub>", columns)


def figure4_table(payload: Payload) -> str:
    """Make the table of training loss by step."""
    return losses_tables(payload, payload["figures"]["4"], "step")


def figure5_table(payload: Payload) -> str:
    """Make the tables of test loss by position, at each theta."""
    figure = payload["figures"]["5"]
    return "".join(
        losses_tables(payload, losses, "position", which=f"rotary base {number(losses['theta'])}")
        for losses in (figure, figure.get("same_theta"))
        if losses
    )


def losses_tables(payload: Payload, losses: Payload, x_title: str, *, which: str = "") -> str:
    """Make tables of losses as they are and, where there is something to compare, less (a)'s."""
    tables = curves_table(payload, losses["curves"], x_title, caption=which)
    if less := losses.get("less"):
        caption = ", ".join(filter(None, (which, f"less (a): {escape(less['note'])}")))
        tables += curves_table(payload, less["curves"], x_title, caption=caption)
    return tables


def figure6_table(payload: Payload) -> str:
    """Make a table for each configuration: whole numbers and first digits in percent."""
    tables = []
    for name, found in payload["figures"]["6"]["maps"].items():
        rows = [
            [f"{depth:.0%}", *(f"{100 * w:.0f} / {100 * f:.0f}" for w, f in zip(*row, strict=True))]
            for depth, *row in zip(found["depths"], found["whole"], found["first"], strict=True)
        ]
        trials = f"{found['trials']} trials a cell"
        caption = f"{label(payload, name, found)}: whole number / first digit, %; {trials}"
        tables.append(table(["depth", *map(number, found["lengths"])], rows, caption=caption))
    return "".join(tables)


def figure7_table(payload: Payload) -> str:
    """Make the table of the top scores by rank, under what was answered."""
    heads = payload["figures"]["7"]["heads"]
    columns = {
        f"{label(payload, name, head)}: {escape(head['answer'])}": dict(enumerate(head["y"], 1))
        for name, head in heads.items()
    }
    return columns_table("rank", columns, is_shared=False)


def figure8_table(payload: Payload) -> str:
    """Make the table of the top score of each trial by rank, with what was answered."""
    columns = {
        label(payload, name, one): dict(enumerate(zip(one["y"], one["answers"], strict=True), 1))
        for name, one in payload["figures"]["8"]["trials"].items()
    }

    def write(pair: tuple[float, str]) -> str:
        return f"{number(pair[0], 3)} {escape(pair[1])}"

    return columns_table("rank", columns, is_shared=False, write=write)


def scales_table(payload: Payload) -> str:
    """Make the tables of the learned s, and b where there is one, by layer and head."""
    return "".join(
        _by_head(values, f"{label(payload, name, found)}: {parameter}, start {start}")
        for name, found in payload["scales"].items()
        for parameter, start in (("s", number(found["start"])), ("b", "0"))
        if (values := found.get(parameter))
    )


def sharpness_table(payload: Payload) -> str:
    """Make the tables of mean largest weight and entropy by n."""
    return "".join(
        curves_table(payload, payload["sharpness"], "n", x="n", y=key, caption=caption)
        for key, caption in (("largest", "mean largest weight"), ("entropy", "entropy, nats"))
    )


def sharpness_by_head_table(payload: Payload) -> str:
    """Make the tables of every head's weight and entropy at the training length and the last n."""
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


FIGURE_TABLES: dict[str, Callable[[Payload], str]] = {
    "1": figure1_table,
    "2": figure2_table,
    "3": figure3_table,
    "4": figure4_table,
    "5": figure5_table,
    "6": figure6_table,
    "7": figure7_table,
    "8": figure8_table,
}
