"""What a figure is, how it looks, and how it becomes SVG and PNG."""

import colorsys
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ssmax._extras import require
from ssmax._files import whole_file, write_whole
from ssmax_lab.report.tables import Table

INK, QUIET, LINE, GRID = "#24292f", "#6b7280", "#9aa3ad", "#e5e7eb"
"""Of titles; of words on axes; of axes and vertical marks; of the grid."""
WIDTH, HEIGHT = 560, 300
"""Of a panel, in pixels."""
HOVER = "hover"
"""The style of layers that only a pointer shows: no drawing on paper has them."""
CHARACTER = 6.6
"""Width of a letter of a label."""

_ID = re.compile(r"\bclip\d+")
_FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": QUIET, "titleColor": QUIET, "domainColor": LINE, "tickColor": LINE,
        "gridColor": GRID, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal",
        "titlePadding": 8,
    },
    "axisX": {"grid": False, "labelFlush": True, "labelSeparation": 6},
    "axisY": {"domain": False, "ticks": False},
    "header": {"labelColor": INK, "titleColor": QUIET},
    "legend": {"labelColor": QUIET, "titleColor": QUIET, "titleFontWeight": "normal"},
    "text": {"color": QUIET, "fontSize": 11},
    "title": {
        "color": INK, "anchor": "start", "frame": "group", "fontSize": 12, "fontWeight": 600,
        "offset": 22,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of Altair, and the rows that it draws."""

    chart: Any
    rows: Sequence[Mapping[str, Any]] = ()
    tables: Sequence[Table] = ()
    """Its numbers."""
    right: int = 16
    """Pixels beside it that the labels at the ends of curves take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One message, drawn: page, SVG and PNG are made of the same panels."""

    title: str
    """The message."""
    panels: Sequence[Panel]
    """They share parameters of the same name."""
    columns: int = 2
    width: int = WIDTH
    """Of a panel in SVG and PNG; the page gives what it has."""
    num_first: int | None = None
    """How many panels are shown at first; the others on request, and in no SVG. None: all."""
    note: str = ""
    """What holds of the drawing, such as what was left out."""

    @property
    def right(self) -> int:
        """The most pixels beside a panel that labels at the ends of curves take."""
        return max(panel.right for panel in self.panels)

    @property
    def tables(self) -> list[Table]:
        """The numbers."""
        return [table for panel in self.panels for table in panel.tables]

    def spec(self, *, rest: bool = False) -> dict[str, Any]:
        """Write the panels that are shown at first, or the rest, as Vega-Lite without the title."""
        alt = altair()
        first = self.panels[: self.num_first]
        shown = self.panels[len(first) :] if rest else first
        charts, datasets = [], {}
        for place, panel in enumerate(shown):
            chart = panel.chart.properties(width=self.width)
            if panel.rows:
                # By name, as Altair would look at every value again at every step.
                chart = chart.properties(data=alt.NamedData(name=f"rows{place}"))
                datasets[f"rows{place}"] = list(panel.rows)
            charts.append(chart)
        chart = charts[0]
        if len(charts) > 1:
            chart = alt.concat(*charts, columns=self.columns, spacing=28)
            chart = chart.resolve_scale(color="independent", strokeDash="independent")
        padding = {"left": 8, "top": 6, "bottom": 4, "right": 14}
        made = chart.properties(padding=padding).configure(**_CONFIG).to_dict()
        return {**made, "datasets": {**made.get("datasets", {}), **datasets}}


def altair() -> Any:
    """Import Altair, which takes a third of a second."""
    require("altair", install="ssmax-lab", purpose="drawing figures")
    import altair

    altair.data_transformers.disable_max_rows()
    return altair


def as_svg(figure: Figure) -> str:
    """Write the figure as text for both colour schemes; the same records give the same bytes."""
    import vl_convert

    svg = _renumbered(vl_convert.vegalite_to_svg(_titled(figure)))
    head, tag, rest = svg.partition(">")
    style = f"@media (prefers-color-scheme: dark) {{ {dark_rules(svg)} }}"
    words = f"<title>{escape(figure.title)}</title><style>{style}</style>"
    return f"{head}{tag}{words}{rest}\n"


def _renumbered(svg: str) -> str:
    """Count ids from 0: Vega counts them on from one drawing to the next."""
    ids = {name: f"clip{place}" for place, name in enumerate(dict.fromkeys(_ID.findall(svg)))}
    return _ID.sub(lambda found: ids[found[0]], svg)


def save(figure: Figure, folder: Path, name: str) -> str:
    """Write the figure as .svg and .png, and return the .svg."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    svg = as_svg(figure)
    write_whole(folder / f"{name}.svg", svg)
    white = {**_titled(figure), "background": "white"}
    with whole_file(folder / f"{name}.png") as file:
        file.write(vl_convert.vegalite_to_png(white, scale=2))
    return svg


def _titled(figure: Figure) -> dict[str, Any]:
    spec = _still(figure.spec())
    columns = min(figure.columns, figure.num_first or len(figure.panels))
    across = columns * (figure.width + figure.right)
    lines = textwrap.wrap(figure.title, max(30, round(across / 8.2)))
    title = {"text": lines, "fontSize": 15, "frame": "bounds", "offset": 20}
    return {**spec, "title": title}


def _still(spec: Any) -> Any:
    """Leave out what answers to a pointer."""
    if isinstance(spec, list):
        return [_still(one) for one in spec if not _is_pointers(one)]
    if isinstance(spec, dict):
        return {key: one if key == "datasets" else _still(one) for key, one in spec.items()}
    return spec


def _is_pointers(one: Any) -> bool:
    if not isinstance(one, dict):
        return False
    mark, filtered = one.get("mark"), one.get("filter")
    is_hover = isinstance(mark, dict) and mark.get("style") == HOVER
    return is_hover or "select" in one or (isinstance(filtered, dict) and "param" in filtered)


def dark_rules(text: str, scope: str = "") -> str:
    """Write the CSS that turns the colours of a drawing for a dark ground.

    Only colours written as #rrggbb turn: those of heat maps, and the words on them, do not.
    """
    found = sorted({colour.lower() for colour in re.findall(r"#[0-9a-fA-F]{6}\b", text)})
    return " ".join(
        f'{scope}[{what}="{colour}" i]{{{what}:{dark(colour)}}}'
        for colour in found
        for what in ("fill", "stroke")
    )


def dark(colour: str) -> str:
    """Lighten a colour for a dark ground; greys are turned over."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = 1.05 - light if saturation < 0.2 else max(light, 0.6)
    turned = colorsys.hls_to_rgb(hue, min(max(light, 0.2), 0.93), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in turned)
