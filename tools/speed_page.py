"""Write the tables of docs/speed.md from benchmarks/results.csv, and its pictures. `make speed`.

A table stands below `<!-- NAME -->`; what surrounds it is written by hand.
"""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ssmax_lab.report.charts import Series, curves, over_runs, right_of, short
from ssmax_lab.report.style import INK, QUIET, Figure, Panel, altair, as_svg

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"
PICTURES = ROOT / "docs" / "pictures"
TOKENS_OF_A_STEP = 64 * 1024
PLAIN = "plain loop, softmax (yardstick)"
COLOURS = {
    PLAIN: INK,
    "plain loop, again": "#999999",
    "ours": "#D55E00",
    "ours, float32 residual": "#0072B2",
    "ours, CUDA graph": "#009E73",
}
FLOORS = {
    "products": "61.5: 48.6 TFLOP at 790 TFLOP/s",
    "attention": "5.5: 4.3 TFLOP, causal; its exponentials are not counted",
    "norms": "5.4: 22 GB at 4.2 TB/s",
    "elementwise, compiled": "6: 25 GB, SwiGLU most of it",
    "loss": "3.1: every logit read and written once",
    "rotation and factor": "2.6: 11 GB",
    "optimizer and clipping": "1.1: 4.5 GB",
}
"""Of what a step does, by its operations and bytes (LOG.md)."""
SMOOTHED = 20
"""Steps."""

Row = dict[str, str]


def newest(benchmark: str) -> list[Row]:
    """The last row of every competitor, shape and mode on a GPU, in the order of the file."""
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["benchmark"] == benchmark]
    on_gpu = [row for row in rows if "NVIDIA" in row["device"]]
    return list({(row["shape"], row["mode"], row["competitor"]): row for row in on_gpu}.values())


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


def pairs() -> list[str]:
    """SSMax and softmax in turns."""
    lines = ["| | ms a step | tokens/s | speed |", "|---|---|---|---|"]
    for row in newest("train_speed"):
        if row["mode"] == "step, in turns":
            speed = TOKENS_OF_A_STEP / float(row["milliseconds"])
            lines.append(
                f"| {row['competitor']} | {float(row['milliseconds']):.2f} | {speed:.0f} k | "
                f"{1 / float(row['ratio']):.4f} |"
            )
    return lines


def profile() -> list[str]:
    """Where the time of a step goes."""
    rows = newest("train_profile")
    names = list(dict.fromkeys(row["competitor"] for row in rows))
    lines = ["| ms | " + " | ".join(names) + " | floor |", "|---" * (len(names) + 2) + "|"]
    kinds = list(dict.fromkeys(row["mode"] for row in rows))
    times = {(row["mode"], row["competitor"]): float(row["milliseconds"]) for row in rows}
    sums = kinds[-3:]  # all kernels, gaps, a step
    for kind in [*sorted(kinds[:-3], key=lambda kind: -times[kind, names[0]]), *sums]:
        cells = [f"{times[kind, name]:.1f}" for name in names]
        lines.append(f"| {kind} | " + " | ".join(cells) + f" | {FLOORS.get(kind, '')} |")
    return lines


def conversion() -> list[str]:
    """Transformers' models, converted and not."""
    lines = ["| | | softmax | converted | speed |", "|---|---|---|---|---|"]
    times: dict[tuple[str, str], dict[str, Row]] = {}
    for row in sorted(newest("hf_cost"), key=lambda row: row["shape"]):
        times.setdefault((row["shape"], row["mode"]), {})[row["competitor"]] = row
    for (shape, mode), rows in times.items():
        plain, converted = rows["Transformers, softmax (yardstick)"], rows["converted"]
        lines.append(
            f"| {shape} | {mode} | {float(plain['milliseconds']):.2f} ms | "
            f"{float(converted['milliseconds']):.2f} ms | {1 / float(converted['ratio']):.3f} |"
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


def measuring() -> list[str]:
    """What a study measures of one model."""
    lines = ["| | | seconds | peak |", "|---|---|---|---|"]
    for row in newest("measuring_speed"):
        lines.append(
            f"| {row['mode']} | {row['shape']} | {float(row['milliseconds']) / 1e3:.1f} | "
            f"{float(row['peak_mib']) / 1024:.1f} GiB |"
        )
    return lines


def growth() -> list[str]:
    """What SSMax costs as things grow."""
    lines = ["| | softmax | SSMax | times softmax | memory |", "|---|---|---|---|---|"]
    for yardstick, ours in growth_pairs():
        lines.append(
            f"| {ours['shape']} | {float(yardstick['milliseconds']):.3g} ms | "
            f"{float(ours['milliseconds']):.3g} ms | {float(ours['ratio']):.3f} | "
            f"{float(ours['memory_ratio']):.2f} |"
        )
    return lines


def growth_pairs() -> list[tuple[Row, Row]]:
    """The yardstick and ours, shape by shape."""
    return list(pairwise(newest("growth")))[::2]


def growth_picture() -> Figure:
    """Time and memory against each thing that grows, the others held."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for yardstick, ours in growth_pairs():
        shape = ours["shape"]
        if found := re.fullmatch(r"B(\d+) T(\d+) H(\d+)/\d+ D\d+", shape):
            batch, tokens, heads = map(int, found.groups())
            # The smallest of one series is in none of the others.
            if batch * tokens == 131_072:
                name, size = "tokens, 131,072 in all", tokens
            elif tokens == 1024:
                name, size = "batch of 1,024 tokens", batch
            else:
                name, size = "heads, 4 x 4,096 tokens", heads
        else:
            number, unit = shape.split()[:2]
            name, size = "million parameters, a step", float(number) * {"M": 1, "B": 1000}[unit]
        for side, row in (("softmax", yardstick), ("SSMax", ours)):
            for key, unit in (("milliseconds", "ms"), ("peak_mib", "MiB")):
                of = " of a sequence" if "parameters" in name else ""
                rows.setdefault((name, unit + of), []).append(
                    {"name": side, name: size, "y": float(row[key]) / sequences(row)}
                )
    series = [
        Series(name="softmax", label="softmax", colour=INK),
        Series(name="SSMax", label="SSMax", colour="#d55e00", dash="--"),
    ]
    panels = [
        curves(
            rows[panel], series, x=panel[0], y=panel[1], log_x=True,
            log_y="in all" not in panel[0], zero="in all" in panel[0],
            dots=True, toggles=False, height=150,
        )
        for panel in sorted(rows, key=lambda panel: "MiB" in panel[1])
    ]  # fmt: skip
    return Figure(
        title="Time and memory of SSMax grow as softmax's do",
        panels=panels,
        columns=len(panels) // 2,
        width=170,
        right=right_of(series),
    )


def sequences(row: Row) -> int:
    """That time and memory are shown for: models have batches of different sizes."""
    found = re.search(r" B(\d+) T", row["shape"])
    return int(found[1]) if found else 1


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


def curves_picture() -> Figure:
    """Losses of the loops, and how far they are from the plain loop's with the same batches."""
    runs = {}
    for line in (ROOT / "benchmarks" / "curves.jsonl").read_text().splitlines():
        run = json.loads(line)
        runs[run["competitor"], run["seed"]] = np.array(run["losses"])
    losses, away, series = [], [], []
    order = list(COLOURS)
    for (name, seed), values in sorted(runs.items(), key=lambda run: order.index(run[0][0])):
        key, steps = f"{name} {seed}", range(SMOOTHED, len(values) + 1, 4)
        label = f"{name.removesuffix(' (yardstick)')}, seed {seed}"
        series.append(
            Series(name=key, label=label, colour=COLOURS[name], dash="-" if seed == 0 else ":")
        )
        losses += over_runs(key, "step", steps, [smooth(values)[::4]])
        if name != PLAIN:
            away += over_runs(key, "step", steps, [smooth(values - runs[PLAIN, seed])[::4]])
    panels = [
        curves(rows, series, x="step", y=y, toggles=False, height=320)
        for rows, y in (
            (losses, f"loss, nats, mean of {SMOOTHED} steps"),
            (away, "less the plain loop's"),
        )
    ]
    return Figure(
        title="Every loop learns as the plain one does",
        panels=panels,
        width=330,
        right=right_of(series),
    )


def smooth(values: np.ndarray) -> np.ndarray:
    return np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, mode="valid")


TABLES = {
    "growth": growth,
    "training": training,
    "pairs": pairs,
    "profile": profile,
    "conversion": conversion,
    "decoding": decoding,
    "measuring": measuring,
}


DRAWN = {"speed": bars_picture, "growth": growth_picture, "loops": curves_picture}


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
