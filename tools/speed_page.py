"""Write the tables of docs/speed.md from benchmarks/results.csv, and its pictures. `make speed`.

A table stands below `<!-- NAME -->`; what surrounds it is written by hand.
"""

import csv
import re
from pathlib import Path

from ssmax_lab.report.charts import short
from ssmax_lab.report.style import QUIET, Figure, Panel, altair, as_svg

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"
PICTURES = ROOT / "docs" / "pictures"
TOKENS_OF_A_STEP = 64 * 1024
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


def decoding() -> list[str]:
    """Tokens of the paper's model, ours and Transformers'."""
    rows = newest("decode_speed")
    names = list(dict.fromkeys(row["competitor"] for row in rows))
    lines = ["| batch, context | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = {row["competitor"]: row for row in rows if row["shape"] == shape}
        cells = [f"{float(of_shape[name]['milliseconds']):.2f} ms" for name in names]
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return lines


def bars_picture() -> Figure:
    """Training and decoding, ours and what one would take instead."""
    alt = altair()
    speeds = {
        row["competitor"]: TOKENS_OF_A_STEP / float(row["milliseconds"])
        for row in newest("train_speed")
        if row["mode"] == "step" and "packed" not in row["competitor"]
    }
    decoded = {
        f"{row['competitor']}, {row['shape']}": 1e3 * batch / float(row["milliseconds"])
        for row in newest("decode_speed")
        for batch in [int(row["shape"].split()[0][1:])]
    }
    panels = []
    for values, title, scale in (
        (speeds, "training, thousand tokens/s", {}),
        (decoded, "decoding, tokens/s", {"type": "log"}),
    ):
        rows = [
            {"what": name.replace(" (yardstick)", ""), "speed": short(value),
             "colour": "#d55e00" if name.startswith("ours") else QUIET}
            for name, value in values.items()
        ]  # fmt: skip
        up = alt.Y(
            "what:N", sort=None, title=None, axis=alt.Axis(labelLimit=260, ticks=False, grid=True)
        )
        dots = (
            alt.Chart()
            .mark_point(filled=True, size=90, opacity=1)
            .encode(
                alt.X("speed:Q", title=title, axis=alt.Axis(tickCount=5)).scale(**scale),
                up,
                alt.Color("colour:N", scale=None),
            )
        )
        panels.append(Panel(dots.properties(height=24 * len(rows)), rows))
    return Figure(
        title="Training is ahead of the plain loop, decoding with a CUDA graph of Transformers",
        panels=panels,
        width=260,
    )


TABLES = {"wall clock": wall_clock, "training": training, "decoding": decoding}


DRAWN = {"speed": bars_picture}


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
