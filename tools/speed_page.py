"""Write the tables of docs/speed.md from benchmarks/results.csv. `make speed`.

A table stands below `<!-- NAME -->`; what surrounds it is written by hand.
"""

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"
TOKENS_OF_A_STEP = 64 * 1024

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
        speed = TOKENS_OF_A_STEP / float(row["milliseconds"])
        lines.append(
            f"| {row['competitor']} | {float(row['milliseconds']):.1f} | {speed:.0f} k | "
            f"{1 / float(row['ratio']):.2f} | {float(row['peak_mib']) / 1024:.1f} GiB |"
        )
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


TABLES = {
    "training": training,
    "conversion": conversion,
    "decoding": decoding,
    "measuring": measuring,
}


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
