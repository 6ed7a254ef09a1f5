"""Write the tables of docs/speed.md from benchmarks/results.csv, and its pictures. `make speed`.

A table stands below `<!-- NAME -->`; what surrounds it is written by hand.
"""

import csv
import re
from pathlib import Path
from typing import Any

from ssmax_lab.report.charts import Series, curves, short
from ssmax_lab.report.style import INK, QUIET, Figure, Panel, altair, as_svg

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"
PICTURES = ROOT / "docs" / "pictures"
TOKENS_OF_A_STEP = 64 * 1024
RANKS = {1: 400e9, 8: 400e9, 64: 40e9}
"""GPUs of a sequence, and the bytes a second that each receives."""
GATHERED_TIMES = 3.5
"""Memory of a layer's backward pass, times its gathered keys and values: measured, 64 GPUs, 12/12
heads."""
LEAST_SPLIT = 65_536
"""Tokens; below them launches, which are not split, are most of the time."""

Row = dict[str, str]


def newest(benchmark: str) -> list[Row]:
    """The last row of every competitor, shape and mode on a GPU, in the order of the file."""
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["benchmark"] == benchmark]
    on_gpu = [row for row in rows if "NVIDIA" in row["device"]]
    return list({(row["shape"], row["mode"], row["competitor"]): row for row in on_gpu}.values())


def wall_clock() -> list[str]:
    """What two lines and ours take in eager code, times softmax; ours by kernels alone too."""
    head = ["softmax", "two lines", "ours", "ours, kernels alone"]
    ways = ("forward", "forward+backward")
    lines = [f"| | {' | '.join(f'{way}: {head[0]} | ' + ' | '.join(head[1:]) for way in ways)} |"]
    lines.append("|---" * (1 + len(ways) * len(head)) + "|")
    rows = {(row["shape"], row["mode"], row["competitor"]): row for row in newest("wall_clock")}
    for shape in dict.fromkeys(shape for shape, _, name in rows if name == "two lines"):
        cells = []
        for way in ways:
            eager, kernels = f"{way}, eager", f"{way}, eager, kernels"
            base = rows.get((shape, eager, "softmax (yardstick)"))
            cells.append("" if base is None else f"{float(base['milliseconds']):.3f} ms")
            for mode, name in ((eager, "two lines"), (eager, "ours"), (kernels, "ours")):
                row = rows.get((shape, mode, name))
                cells.append("" if row is None else f"{float(row['ratio']):.2f}")
        if any(cells):
            lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return lines


def other_calls() -> list[str]:
    """What ours takes, times what one would call instead, in each other case."""
    yardsticks = {
        "window": "flex (yardstick)",
        "padding": "unpadded, two lines (yardstick)",
        "compiled": "two lines",
        "Llama": "softmax (yardstick)",
        "RoPE": "softmax (yardstick)",
        "S4096 H12 D64, layer": "softmax (yardstick)",
    }
    rows = {(row["shape"], row["mode"], row["competitor"]): row for row in newest("wall_clock")}
    cells: dict[str, list[str]] = {}
    for part, yardstick in yardsticks.items():
        for shape, mode, name in rows:
            base = rows.get((shape, mode, yardstick))
            if name != "ours" or base is None or "kernels" in mode:
                continue
            if part not in f"{shape} {mode}":
                continue
            way = next((way for way in ("compiled", "generate", "step") if way in mode), "")
            row = f"{shape}{', ' if way else ''}{way}".replace(", step", "")
            has_gradients = "backward" in mode or "training" in mode
            column = 2 if has_gradients else 0
            ratio = float(rows[shape, mode, "ours"]["ratio"]) / float(base["ratio"])
            each = cells.setdefault(row, [yardstick.removesuffix(" (yardstick)"), *[""] * 4])
            each[1 + column : 3 + column] = f"{float(base['milliseconds']):.3f} ms", f"{ratio:.2f}"
    head = ["call", "instead", "forward: instead", "ours", "forward+backward: instead", "ours"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {row} | {' | '.join(each)} |" for row, each in cells.items()]


def training() -> list[str]:
    """Steps of the paper's model."""
    lines = ["| | ms a step | tokens/s | times the plain loop | peak |", "|---|---|---|---|---|"]
    for row in newest("train_speed"):
        if row["mode"] != "step":
            continue
        speed = TOKENS_OF_A_STEP / float(row["milliseconds"])
        lines.append(
            f"| {row['competitor']} | {float(row['milliseconds']):.1f} | {speed:.0f} k | "
            f"{1 / float(row['ratio']):.2f} | {float(row['peak_mib']) / 1024:.1f} GiB |"
        )
    return lines


def bars_picture() -> Figure:
    """Training, ours and what one would take instead."""
    alt = altair()
    rows = [
        {"what": row["competitor"].replace(" (yardstick)", ""),
         "speed": short(TOKENS_OF_A_STEP / float(row["milliseconds"])),
         "colour": "#d55e00" if row["competitor"].startswith("ours") else QUIET}
        for row in newest("train_speed")
        if row["mode"] == "step" and "packed" not in row["competitor"]
    ]  # fmt: skip
    dots = (
        alt.Chart()
        .mark_point(filled=True, size=90, opacity=1)
        .encode(
            alt.X("speed:Q", title="thousand tokens/s", axis=alt.Axis(tickCount=5)),
            alt.Y(
                "what:N",
                sort=None,
                title=None,
                axis=alt.Axis(labelLimit=260, ticks=False, grid=True),
            ),
            alt.Color("colour:N", scale=None),
        )
    )
    return Figure(
        title="Training the paper's model is ahead of a plain loop",
        panels=[Panel(dots.properties(height=24 * len(rows)), rows)],
        width=260,
    )


def context_picture() -> Figure:
    """Attention against tokens of a sequence: measured on one GPU, computed for 8 and 64."""
    rows: dict[str, list[dict[str, Any]]] = {"ms": [], "MiB of a GPU": []}
    for row in newest("growth of context"):
        found = re.fullmatch(r"B1 T(\d+) H\d+/(\d+) D(\d+)", row["shape"])
        if not found:
            continue
        tokens, kv_heads, width = map(int, found.groups())
        name = "softmax" if "yardstick" in row["competitor"] else "SSMax"
        milliseconds, mib = float(row["milliseconds"]), float(row["peak_mib"])
        gathered = 4 * tokens * kv_heads * width
        for ranks, bandwidth in RANKS.items():
            moving = 2 * gathered * (ranks - 1) / ranks / bandwidth * 1e3
            held = GATHERED_TIMES * gathered / 2**20 * (ranks > 1)
            if ranks > 1 and tokens < LEAST_SPLIT:
                continue
            key = {"name": f"{name} {ranks}", "tokens": tokens}
            rows["ms"].append({**key, "y": milliseconds / ranks + moving})
            rows["MiB of a GPU"].append({**key, "y": mib / ranks + held})
    series = [
        Series(name="softmax 1", label="softmax, 1 GPU", colour=INK),
        Series(name="SSMax 1", label="SSMax, 1 GPU", colour="#d55e00", dash="--"),
        Series(name="SSMax 8", label="8 GPUs, computed", colour="#0072b2", dash=":"),
        Series(name="SSMax 64", label="64 GPUs, computed", colour="#009e73", dash=":"),
    ]
    panels = [
        curves(points, series, x="tokens", y=unit, log_x=True, log_y=True, dots=True,
               toggles=False, height=240)
        for unit, points in rows.items()
    ]  # fmt: skip
    return Figure(
        title="To a million tokens, time and memory of SSMax's attention grow as softmax's do",
        panels=panels,
        columns=2,
        width=260,
    )


TABLES = {
    "wall clock": wall_clock,
    "other calls": other_calls,
    "training": training,
}


DRAWN = {"speed": bars_picture, "context": context_picture}


def written(text: str) -> str:
    """The page with its tables as the records have them."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n)(?:\|.*\n)*")
        if not pattern.search(text):
            raise ValueError(f"{PAGE.name} has no place for the table {name!r}")
        lines = "".join(f"{line}\n" for line in table())
        text = pattern.sub(lambda found, lines=lines: found[1] + lines, text)
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(as_svg(draw()))
