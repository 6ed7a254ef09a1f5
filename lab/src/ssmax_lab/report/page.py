"""The study as one HTML file that works from disk: verdicts, figures, explorer, provenance."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ssmax._files import write_whole
from ssmax_lab.analysis.figure_inputs import FIGURE_1_S, FIGURE_3_SIZES
from ssmax_lab.analysis.statistics import SECONDARY
from ssmax_lab.report.page_tables import (
    FIGURE_TABLES,
    NONE,
    number,
    scales_table,
    sharpness_by_head_table,
    sharpness_table,
    table,
)
from ssmax_lab.report.payload import looks

MISSING = "not measured in this study"

# Word, symbol and (in page.css, by the slug) colour: no verdict is told by colour alone.
SYMBOLS = {
    "supported": "&#10003;",
    "contradicted": "&#10005;",
    "no difference": "=",
    "inconclusive": "?",
    "too few seeds": "&middot;",
    "model too small": "&middot;",
    "not measured": "&ndash;",
}

TITLES = {
    "1": "Largest output against the size of the input",
    "2": "What the model learns to multiply the scores by",
    "3": "How far the largest entry must lead",
    "4": "Learning curves",
    "5": "Test loss by position, beyond the training length",
    "6": "Needle in a haystack",
    "7": "Attention on the needle, by head",
    "8": "Attention on the needle, by trial",
}

# The one key of each measured figure that holds its curves; figures 1 and 3 are formulas.
CONTENTS = {"2": "tables", "4": "curves", "5": "curves", "6": "maps", "7": "heads", "8": "trials"}

SECTIONS = {
    "verdicts": "Verdicts",
    "figures": "Figures",
    "scales": "Learned s",
    "explorer": "Explorer",
    "sharpness": "Attention sharpness",
    "provenance": "Provenance",
}

SLIDERS = (
    ("n", "n, size of the input", "0", "1", "1", "0"),  # page.js sets its range: a list of n
    ("s", "s, scaling parameter", "0", "2", "0.01", str(FIGURE_1_S)),
    ("b", "b, bias", "-2", "2", "0.05", "0"),
    ("z", "z<sub>max</sub>, largest entry", "0", "20", "0.1", "3"),
)

CITATION = """@article{nakanishi2025scalable,
  title   = {Scalable-Softmax Is Superior for Attention},
  author  = {Nakanishi, Ken M.},
  journal = {arXiv preprint arXiv:2501.19399},
  year    = {2025}
}"""


def write_page(payload: Mapping[str, Any], path: Path) -> None:
    """Write the page as a file that is whole or not there."""
    write_whole(path, page(payload))


def page(payload: Mapping[str, Any]) -> str:
    """Make the whole page; the same payload gives the same bytes."""
    sections = (
        _header(payload),
        _claims(payload["claims"]),
        _figures(payload),
        _scales(payload),
        _explorer(),
        _sharpness(payload),
        _provenance(payload),
    )
    return document(payload["title"], sections, nav=_nav(), payload=payload)


def explorer_page() -> str:
    """Make the explorer alone, for other pages to hold."""
    return document("Softmax and SSMax", [_explorer()], payload={"looks": looks(("a", "b"))})


def document(
    title: str,
    sections: Sequence[str],
    *,
    nav: str = "",
    payload: Mapping[str, Any] | None = None,
) -> str:
    """Make a page of its sections; one with a payload has the script that draws it."""
    scripts, allowed = "", "'none'"
    if payload is not None:
        # In a function of its own, for its names to meet no others in the browser.
        script = f"(() => {{\n{asset('plots.js')}{asset('page.js')}}})();"
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed = f"'sha256-{digest}'"
        scripts = (
            f'<script type="application/json" id="payload">{_embedded(payload)}</script>\n'
            f"<script>{script}</script>\n"
        )
    # The policy makes the browser itself keep the promise that no request leaves the page,
    # and runs no script but ours, whatever a text in the payload holds.
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    content = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{asset("page.css")}</style>
</head>
<body>
{nav}
<main>
{content}
</main>
{scripts}</body>
</html>
"""


def asset(name: str) -> str:
    """Read a file that pages are made with."""
    return files("ssmax_lab.report").joinpath(name).read_text(encoding="utf-8")


def _embedded(payload: Mapping[str, Any]) -> str:
    """Write the payload as JSON that cannot end, or hide the end of, the script that holds it."""
    data = {key: value for key, value in payload.items() if key != "static"}
    data["constants"] = {"s": FIGURE_1_S, "sizes": FIGURE_3_SIZES}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("</", "<\\/").replace("<!--", "\\u003c!--")


def _nav() -> str:
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in SECTIONS.items())
    button = '<button type="button" id="theme" class="js" aria-label="colours">Dark</button>'
    return f'<nav aria-label="Sections"><div class="links">{links}</div>{button}</nav>'


def _header(payload: Mapping[str, Any]) -> str:
    words = [_word(claim["verdict"]) for claim in payload["claims"]]
    counts = "".join(
        f"<li>{badge(word, f'{words.count(word)} {word}')}</li>"
        for word in SYMBOLS
        if word in words
    )
    return f"""<header>
<p class="kicker">Reproduction &middot; preset {escape(payload["preset"])} &middot;
training length {number(payload["train_length"])}</p>
<h1>{escape(payload["title"])}</h1>
<p class="lead">Every figure and claim of &ldquo;Scalable-Softmax Is Superior for Attention&rdquo;
(<a href="https://arxiv.org/abs/2501.19399">arXiv 2501.19399</a>), measured again with models of
our own, and what came of it.</p>
<p class="formula">softmax(<b>z</b>) &rarr; softmax((<i>s</i> log <i>n</i>) <b>z</b>)</p>
<ul class="counts" aria-label="Verdicts">{counts}</ul>
{f'<p class="note">{escape(payload["note"])}</p>' if payload.get("note") else ""}
</header>"""


def badge(verdict: str, text: str = "") -> str:
    """Write a verdict as symbol, word and colour."""
    word = _word(verdict)
    return (
        f'<span class="badge {word.replace(" ", "-") if word in SYMBOLS else ""}">'
        f'<span aria-hidden="true">{SYMBOLS.get(word, "?")}</span> {escape(text or verdict)}</span>'
    )


def _word(verdict: str) -> str:
    """Leave out how large the difference is that there is not."""
    return verdict.partition(" larger than ")[0]


def _claims(claims: Sequence[Mapping[str, Any]]) -> str:
    return f"""<section id="verdicts"><h2>Verdicts</h2>
<p>The paper's claims, each with the verdict of its primary comparison; secondary ones decide
nothing. Intervals are 95&nbsp;% intervals over seeds; no verdict
is given on fewer than three seeds.
<button type="button" id="open-claims" class="js">Open all</button></p>
<div class="claims">{"".join(_claim(claim) for claim in claims)}</div></section>"""


def _claim(claim: Mapping[str, Any]) -> str:
    comparisons = claim["comparisons"]
    rows = "".join(_comparison(item, _furthest(item, comparisons)) for item in comparisons)
    header = "".join(
        f'<th scope="col">{title}</th>'
        for title in ("comparison", "effect", "95&nbsp;% interval", "basis", "verdict")
    )
    body = (
        f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"
        if rows
        else f"<p>{MISSING}</p>"
    )
    figure = escape(str(claim["figure"]))
    return (
        f'<details class="claim" id="claim-{escape(claim["id"])}"><summary>'
        f'<span class="id">{escape(claim["id"])}</span>'
        f'<span class="text">{escape(claim["text"])}</span>{badge(claim["verdict"])}</summary>'
        f'<div class="comparisons">{body}<p class="see"><a href="#figure-{figure}">'
        f"Figure {figure}</a></p></div></details>"
    )


def _comparison(item: Mapping[str, Any], furthest: float) -> str:
    unit = escape(item.get("unit") or "")
    low, high = item.get("low"), item.get("high")
    interval = NONE if low is None or high is None else f"{number(low, 3)} to {number(high, 3)}"
    effect = NONE if item.get("effect") is None else f"{number(item['effect'], 3)} {unit}"
    cells = (
        ("effect", effect),
        ("95 % interval", f"{interval}{_whisker(item, furthest)}"),
        ("basis", escape(item.get("basis") or "")),
        ("verdict", SECONDARY if item["verdict"] == SECONDARY else badge(item["verdict"])),
    )
    return f'<tr><th scope="row">{escape(item["text"])}</th>' + "".join(
        f'<td data-label="{title}">{cell}</td>' for title, cell in cells
    ) + "</tr>"  # fmt: skip


def _furthest(item: Mapping[str, Any], comparisons: Sequence[Mapping[str, Any]]) -> float:
    """Find the largest distance from 0 in a claim's comparisons of one unit: they share a scale."""
    ends = [
        abs(other[key])
        for other in comparisons
        for key in ("low", "effect", "high")
        if other.get("unit") == item.get("unit") and other.get(key) is not None
    ]
    return max(ends, default=0.0)


def _whisker(item: Mapping[str, Any], furthest: float) -> str:
    """Draw the interval about 0; the numbers beside it say the same."""
    values = [item[key] for key in ("low", "effect", "high") if item.get(key) is not None]
    if furthest == 0 or len(values) < 3:
        return ""
    low, effect, high = (round(60 + 54 * value / furthest, 1) for value in values)
    return (
        '<svg class="whisker" viewBox="0 0 120 14" aria-hidden="true">'
        '<path class="zero" d="M60 0V14"/>'
        f'<path d="M{low} 7H{high}M{low} 4V10M{high} 4V10"/><circle cx="{effect}" cy="7" r="3"/>'
        "</svg>"
    )


def _figures(payload: Mapping[str, Any]) -> str:
    drawn = "".join(_figure(payload, key) for key in TITLES)
    return f"""<section id="figures"><h2>Figures</h2>
<p>Point at a plot, or focus it and use the arrow keys, to read values. Drag to zoom; double click,
Escape or Reset goes back. Press a name in a legend to hide or show it.</p>{drawn}</section>"""


def _figure(payload: Mapping[str, Any], key: str) -> str:
    title = f"<h3>Figure {key}. {TITLES[key]}</h3>"
    caption = f"<figcaption>{escape(payload.get('captions', {}).get(key, ''))}</figcaption>"
    figure = payload.get("figures", {}).get(key, {})
    if key in CONTENTS and not figure.get(CONTENTS[key]):
        content = f'<p class="missing">Figure {key}: {MISSING}.</p>{caption}'
    else:
        static = _static(payload.get("static", {}).get(key), f"Figure {key}. {TITLES[key]}")
        data = _data(FIGURE_TABLES[key](payload))
        content = f'<div class="plot" data-plot="figure{key}">{static}</div>{caption}{data}'
    return f'<figure id="figure-{key}">{title}{content}</figure>'


def _static(svg: str | None, title: str) -> str:
    """Write the drawing for a browser without JavaScript."""
    if not svg:
        return "<noscript><p>The values are in the table below.</p></noscript>"
    return f"<noscript>{image(svg, title)}</noscript>"


def image(svg: str, title: str) -> str:
    """Write a drawing as an image, so that its ids stay its own."""
    code = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{code}">'


def origins(items: Sequence[Mapping[str, Any]]) -> str:
    """Make the table of where numbers come from."""
    header = ("what", "commit", "configuration", "versions", "device", "seed", "date")
    rows = []
    for item in items:
        versions = ", ".join(f"{name} {version}" for name, version in item["versions"].items())
        hashes = (f"<code>{escape(item[key])}</code>" for key in ("commit", "config_hash"))
        rest = (versions, item["device"], str(item["seed"]), item["date"])
        rows.append([escape(item["what"]), *hashes, *map(escape, rest)])
    return table(header, rows)


def _data(tables: str) -> str:
    return f'<details class="data"><summary>Data</summary>{tables}</details>'


def _scales(payload: Mapping[str, Any]) -> str:
    if payload.get("scales"):
        content = (
            '<figure><div class="plot" data-plot="scales"></div><figcaption>One value for each '
            "layer and head of the first run, coloured by its distance from the value it started "
            f"at. (c) has none: its s is 1.</figcaption>{_data(scales_table(payload))}</figure>"
        )
    else:
        content = f'<p class="missing">The learned s: {MISSING}.</p>'
    return f'<section id="scales"><h2>The learned s, by layer and head</h2>{content}</section>'


def _explorer() -> str:
    sliders = "".join(
        f'<div><label for="explorer-{name}">{title}</label>'
        f'<output id="explorer-{name}-value" for="explorer-{name}"></output>'
        f'<input type="range" id="explorer-{name}" min="{low}" max="{high}" step="{step}" '
        f'value="{value}"></div>'
        for name, title, low, high, step, value in SLIDERS
    )
    return f"""<section id="explorer"><h2>Explorer</h2>
<p>The inputs of figures 1 and 3, for any setting. The output shown is that of z<sub>max</sub>.</p>
<noscript><p>The explorer needs JavaScript; figures 1 and 3 above do not.</p></noscript>
<div class="js explorer"><div class="sliders">{sliders}</div><div class="panels">
<figure><h3>Input (&minus;2, ..., &minus;2, z<sub>max</sub>)</h3>{_readouts("explorer")}
<div class="plot" id="explorer-plot"></div><figcaption id="explorer-note"></figcaption></figure>
<figure><h3>Input (0, 1/(n&minus;2), ..., 1, z<sub>max</sub>)</h3>{_readouts("explorer3")}
<div class="plot" id="explorer3-plot"></div><figcaption id="explorer3-note"></figcaption></figure>
</div></div></section>"""


def _readouts(name: str) -> str:
    pairs = (("softmax", "softmax"), ("ssmax", "SSMax"))
    return '<p class="readouts">' + "".join(
        f'<span>{title} <output id="{name}-{key}"></output></span>' for key, title in pairs
    ) + "</p>"  # fmt: skip


def _sharpness(payload: Mapping[str, Any]) -> str:
    if payload.get("sharpness"):
        content = (
            '<figure><div class="plot panels" data-plot="sharpness"></div><figcaption>Of real '
            "text, mean over runs, layers, heads and documents: the largest attention weight, and "
            "the entropy, of queries that see n keys. The grey line is attention spread evenly "
            f"over all n.</figcaption>{_data(sharpness_table(payload))}</figure>"
        )
        if any(found.get("heads") for found in payload["sharpness"].values()):
            content += (
                '<figure><div class="plot" data-plot="sharpnessByHead"></div><figcaption>The same '
                "of every head of the first run, between the last n that training has seen and the "
                "longest that was measured: the factor by which its largest weight changes, or "
                "what its entropy gains. Blue heads lose sharpness."
                f"</figcaption>{_data(sharpness_by_head_table(payload))}</figure>"
            )
    else:
        content = f'<p class="missing">Attention sharpness: {MISSING}.</p>'
    return (
        f'<section id="sharpness"><h2>Attention sharpness by number of keys</h2>{content}</section>'
    )


def _provenance(payload: Mapping[str, Any]) -> str:
    commands = escape("\n".join(payload.get("commands", [])))
    choices = "".join(f"<li>{escape(choice)}</li>" for choice in payload.get("choices", []))
    return f"""<section id="provenance"><h2>Provenance</h2>
<h3>Where every number comes from</h3>{origins(payload.get("provenance", []))}
<h3>The commands</h3><pre tabindex="0">{commands}</pre>
<h3>What was ours to choose</h3><ul class="choices">{choices}</ul>
<h3>Citing the paper</h3><pre tabindex="0">{escape(CITATION)}</pre></section>"""
