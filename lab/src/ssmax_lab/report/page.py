"""Pages as one HTML file that works from disk and makes no request."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from ssmax._extras import require
from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.records import Provenance
from ssmax_lab.report.charts import series_of
from ssmax_lab.report.explorer import explorer
from ssmax_lab.report.style import GRID, INK, LINE, QUIET, Figure, as_svg, dark, dark_rules
from ssmax_lab.report.tables import Table

MISSING = "Not measured in this study"
SYMBOLS = {"supported": "✓", "contradicted": "✕", "no difference": "=", "inconclusive": "?",
           "not measured": "\u2013"}  # fmt: skip
"""No verdict is told by colour alone."""
AXIS = 52
"""Pixels beside a panel that its axis takes."""
LEAST = {"curves": 330, "maps": 270}
"""Width of a panel, below which panels stand under each other."""


def document(title: str, **parts: Any) -> str:
    """Make a page of its parts, which page.html names; the same parts give the same bytes."""
    jinja2 = require("jinja2", install="ssmax-lab", purpose="the page")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined)
    specs: dict[str, Any] = {}
    for name, part in parts.items():
        if name in ("first", "figures", "heads"):
            parts[name] = [_drawn(specs, **one) for one in part]
        elif name == "explorer":
            parts[name] = _drawn(specs, **part)
    data = json.dumps(
        {"specs": specs, "colours": _colours()}, allow_nan=False, separators=(",", ":")
    )
    # What a text holds must not end, or hide the end of, the script that it stands in.
    data = data.replace("</", "<\\/").replace("<!--", "\\u003c!--")
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = "".join(f"{colour} " for colour in (INK, QUIET, LINE, GRID))
    turned = dark_rules(own + data, scope=':root[data-scheme="dark"] .plot ')
    return environment.from_string(_asset("page.html")).render(
        title=title,
        digest=f"sha256-{digest}",
        style=_asset("page.css") + turned,
        data=data,
        script=script,
        symbols=SYMBOLS,
        missing=MISSING,
        **parts,
    )


def explorer_page() -> str:
    """Make the explorer alone, for other pages to hold: explorer.html#dark or #light."""
    shown = {"id": "figure-explorer", "figure": explorer(), "is_untitled": True}
    return document("Softmax and SSMax", explorer=shown, is_alone=True)


def origins(found: Sequence[tuple[str, Provenance]]) -> Table:
    """Make the table of where numbers come from."""
    rows = []
    for what, one in found:
        values = asdict(one)
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        kept = (values[key] for key in ("commit", "config_hash"))
        rows.append([what, *kept, versions, one.device, str(one.seed), one.date])
    header = ["what", "commit", "configuration", "versions", "device", "seed", "date"]
    return Table(header=header, rows=rows)


def _drawn(
    specs: dict[str, Any],
    *,
    id: str,
    figure: Figure | None,
    number: str = "",
    caption: str = "",
    svg: str = "",
    is_untitled: bool = False,
) -> dict[str, Any]:
    """Put a figure's specification with the others, and say what page.html needs of it."""
    shown = {"id": id, "number": number, "caption": caption, "heading": number}
    if figure is None:
        return shown
    is_map = figure.num_first is not None
    size = {"room": AXIS + (0 if is_map else figure.right), "axis": AXIS,
            "least": LEAST["maps" if is_map else "curves"]}  # fmt: skip
    specs[id] = _folded(figure.spec()) | size
    # Room is kept for it, so that nothing moves when it is drawn.
    shown["height"] = figure.panels[0].chart.height + 70
    shown |= {"spec": id, "heading": figure.title, "note": figure.note, "tables": figure.tables}
    if figure.num_first is not None and figure.num_first < len(figure.panels):
        shown["rest"] = f"{id}-rest"
        specs[shown["rest"]] = _folded(figure.spec(rest=True)) | size
    code = base64.b64encode((svg or as_svg(figure)).encode()).decode()
    shown["svg"] = f"data:image/svg+xml;base64,{code}"
    return shown | ({"heading": ""} if is_untitled else {})


def _folded(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Write rows as columns of values, and texts as places in a list of them: a fifth as long.

    page.js unfolds them.
    """
    datasets = {}
    for name, rows in spec.get("datasets", {}).items():
        columns = {
            key: [row.get(key) for row in rows] for key in dict.fromkeys(k for r in rows for k in r)
        }
        texts = {
            key: list(dict.fromkeys(values))
            for key, values in columns.items()
            if any(isinstance(value, str) for value in values)
        }
        for key, words in texts.items():
            place = {word: i for i, word in enumerate(words)}
            columns[key] = [place[value] for value in columns[key]]
        datasets[name] = {"columns": columns, "texts": texts} if columns else rows
    return {**spec, "datasets": datasets}


def _colours() -> dict[str, tuple[str, str]]:
    """Map the label of every configuration to its colour on a light and on a dark ground."""
    every = series_of(list(CONFIGURATIONS))
    return {one.label: (one.colour, dark(one.colour)) for one in every}


@cache
def _script() -> str:
    """Join Vega, Vega-Lite, Vega-Embed and page.js in a function whose names meet no others."""
    bundle = require("vl_convert", install="ssmax-lab", purpose="the page").javascript_bundle()
    return f"(() => {{\n{bundle}\n{_asset('page.js')}}})();".replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return files("ssmax_lab.report").joinpath(name).read_text(encoding="utf-8")
