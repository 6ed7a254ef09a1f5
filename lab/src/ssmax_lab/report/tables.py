"""Numbers as text, and tables that the page writes as HTML and the docs as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ssmax_lab.records import Comparison

MAX_ROWS = 30
NONE = "\u2013"
COMPARED = ("comparison", "effect [95 %]", "over", "verdict")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def said(one: Comparison) -> str:
    """Write a comparison in words, marked where it is not the paper's."""
    return one.text + (" [ours]" if one.is_ours else "")


def effect(one: Comparison) -> str:
    """Write its effect with interval and unit."""
    return "-" if one.effect is None else f"{one.interval(3)} {one.unit}"


def compared(one: Comparison) -> list[str]:
    """Write the cells of COMPARED."""
    return [said(one), effect(one), one.over, one.verdict]


def number(value: float | None, digits: int = 4) -> str:
    """Write significant digits, thousands separated, a real minus."""
    if value is None:
        return NONE
    if isinstance(value, int) or abs(value) >= 10**digits:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "\u2212")


def percent(share: float, *, sign: Literal["", "+"] = "") -> str:
    """Write a share in whole percent, to a tenth where that would hide what is missing."""
    near_end = 0.99 < share < 1 or 0 < share < 0.01
    return f"{100 * share:{sign}.{1 if near_end else 0}f} %".replace("-", "\u2212")


def thin(values: Sequence[Any]) -> list[Any]:
    """Keep at most MAX_ROWS of the values, evenly spread, with both ends."""
    if len(values) <= MAX_ROWS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]


def wide_table(
    rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str], x: str, *, caption: str = ""
) -> Table:
    """Make a table with a column for each curve, at places that all have where there are such."""
    columns: dict[str, dict[Any, float]] = {}
    for row in rows:
        columns.setdefault(row["name"], {})[row[x]] = row["y"]
    called = {name: label for name, label in labels.items() if name in columns}
    shared = set.intersection(*map(set, columns.values())) if columns else set()
    places = thin(sorted(shared or set().union(*columns.values())))
    cells = [
        [number(place), *(number(columns[name].get(place)) for name in called)] for place in places
    ]
    return Table(header=[x, *called.values()], rows=cells, caption=caption)
