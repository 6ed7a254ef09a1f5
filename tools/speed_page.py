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

from ssmax_lab.report.style import as_svg, new_figure

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"
PICTURES = ROOT / "docs" / "pictures"
TOKENS_OF_A_STEP = 64 * 1024
PLAIN = "plain loop, softmax (yardstick)"
COLOURS = {
    PLAIN: "#000000",
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


def growth_picture() -> Any:
    """Time and memory against each thing that grows, the others held."""
    panels: dict[str, list[tuple[float, Row, Row]]] = {}
    for yardstick, ours in growth_pairs():
        shape = ours["shape"]
        if found := re.fullmatch(r"B(\d+) T(\d+) H(\d+)/\d+ D\d+", shape):
            batch, tokens, heads = map(int, found.groups())
            # The smallest of one series is in none of the others.
            if batch * tokens == 131_072:
                panels.setdefault("tokens, 131,072 in all", []).append((tokens, yardstick, ours))
            elif tokens == 1024:
                panels.setdefault("batch of 1,024 tokens", []).append((batch, yardstick, ours))
            else:
                panels.setdefault("heads, 4 x 4,096 tokens", []).append((heads, yardstick, ours))
        else:
            number, unit = shape.split()[:2]
            size = float(number) * {"M": 1e6, "B": 1e9}[unit]
            panels.setdefault("parameters, a training step", []).append((size, yardstick, ours))
    figure, axes = new_figure(12.0, 5.0, columns=len(panels), rows=2)
    for column, (name, points) in enumerate(panels.items()):
        x = [point[0] for point in points]
        for axis, key in zip(axes[:, column], ("milliseconds", "peak_mib"), strict=True):
            for side, dash, colour in ((1, "o-", "#000000"), (2, "x--", "#D55E00")):
                y = [float(point[side][key]) / sequences(point[side]) for point in points]
                axis.loglog(x, y, dash, color=colour, label=("softmax", "SSMax, ours")[side - 1])
            if key == "peak_mib" and "in all" in name:  # hardly grows
                axis.set_yscale("linear")
                axis.set_ylim(bottom=0)
            else:
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("")
            axis.set_xticks(x, [short(value) for value in x], minor=False)
            axis.set_xticks([], minor=True)
            axis.set_xlabel(name)
            unit = "ms" if key == "milliseconds" else "MiB"
            axis.set_ylabel(f"{unit} of a sequence" if "parameters" in name else unit)
    axes[0, 0].legend(frameon=False)
    return figure


def short(number: float) -> str:
    """1k of tokens is 1,024 of them; of parameters there are millions."""
    if number < 1024:
        return f"{number:g}"
    if number < 1e6:
        return f"{number / 1024:g}k"
    return f"{number / 1e6:g}M" if number < 1e9 else f"{number / 1e9:g}B"


def sequences(row: Row) -> int:
    """That time and memory are shown for: models have batches of different sizes."""
    found = re.search(r" B(\d+) T", row["shape"])
    return int(found[1]) if found else 1


def bars_picture() -> Any:
    """Training and decoding, ours and what one would take instead."""
    figure, axes = new_figure(10.0, 3.6, columns=2)
    left, right = axes.flat
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
    for axis, values, label in (
        (left, speeds, "training, thousand tokens/s"),
        (right, decoded, "decoding, tokens/s"),
    ):
        names = [name.replace(" (yardstick)", "") for name in values]
        colours = ["#D55E00" if name.startswith("ours") else "#777777" for name in values]
        axis.barh(names, list(values.values()), color=colours)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.tick_params(axis="y", labelsize=8)
    right.set_xscale("log")
    return figure


def curves_picture() -> Any:
    """Losses of the loops, and how far they are from the plain loop's with the same batches."""
    runs = {}
    for line in (ROOT / "benchmarks" / "curves.jsonl").read_text().splitlines():
        run = json.loads(line)
        runs[run["competitor"], run["seed"]] = np.array(run["losses"])
    figure, axes = new_figure(10.0, 3.8, columns=2)
    left, right = axes.flat
    order = list(COLOURS)
    for (name, seed), losses in sorted(runs.items(), key=lambda run: order.index(run[0][0])):
        dash = "-" if seed == 0 else ":"
        label = f"{name.removesuffix(' (yardstick)')}, seed {seed}"
        left.plot(range(1, len(losses) + 1), losses, dash, color=COLOURS[name], lw=0.8, label=label)
        if name != PLAIN:
            away = smooth(losses - runs[PLAIN, seed])
            right.plot(
                range(SMOOTHED, len(losses) + 1), away, dash, color=COLOURS[name], label=label
            )
    left.set(xlabel="step", ylabel="loss, nats")
    right.set(xlabel="step", ylabel=f"less the plain loop's, mean of {SMOOTHED} steps")
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=8)
    return figure


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
