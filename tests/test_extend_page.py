"""The numbers of docs/extend.md are those of the records."""

import itertools
import json
import lzma
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/extend.md").read_text()
PACKED = (ROOT / "lab/results/smollm2-extension.jsonl.xz").read_bytes()
HEAD, *RECORDS = map(json.loads, lzma.decompress(PACKED).splitlines())
POSITIONS = {
    "as trained": "x1", "base x 3.04": "x3.04", "base x 4": "x4", "base x 10": "x10",
    "base x 28": "x28", "YaRN x 2": "yarn2", "YaRN x 4": "yarn4", "YaRN x 8": "yarn8",
}  # fmt: skip
RANGES = {"0-8 k": (0, 8192), "8-16 k": (8192, 16384), "16-32 k": (16384, 32768),
          "32-64 k": (32768, 65536)}  # fmt: skip


def loss(positions, sharpen, start, stop):
    """The mean over windows of a range of positions, those that were read to its end."""
    edges = HEAD["edges"]
    windows = {}
    for record in RECORDS:
        if (record["positions"], record["sharpen"], record["what"]) == (positions, sharpen, "loss"):
            for number, row in enumerate(record["value"], record["first_window"]):
                windows.setdefault(number, row)
    inside = [i for i, (a, b) in enumerate(itertools.pairwise(edges)) if start <= a and b <= stop]
    widths = [edges[i + 1] - edges[i] for i in inside]
    means = [
        np.average([row[i] for i in inside], weights=widths)
        for row in windows.values()
        if len(row) > inside[-1]
    ]
    return np.mean(means)


def found(positions, sharpen, length):
    for record in RECORDS:
        arm = record["positions"], record["sharpen"], record["what"], record["length"]
        if arm == (positions, sharpen, "single", length):
            return np.mean([right for _, right, _ in record["value"]])
    return None


def scale_of(label):
    named = {"nothing": "none", "YaRN's temperature": "yarn", "clamp": "clamp", "(e)": "e",
             "temperature x clamp": "yarnclamp"}  # fmt: skip
    return named.get(label) or f"const{label}"


def test_every_number_of_the_tables_is_that_of_the_records():
    seen = 0
    for table in re.findall(r"^\| positions .+\n(?:\|.+\n)+", PAGE, re.M):
        titles, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in table.strip().splitlines()
        )
        for cells in rows:
            arm = POSITIONS[cells[0]], scale_of(cells[1])
            for title, cell in zip(titles[2:], cells[2:], strict=True):
                if cell == "-":
                    continue
                if title in RANGES:
                    assert cell == f"{loss(*arm, *RANGES[title]):.3f}", (arm, title)
                else:
                    share = found(*arm, 1024 * int(title.removesuffix(" k")))
                    assert cell == f"{share:.2f}".lstrip("0") or cell == f"{share:.2f}", (
                        arm,
                        title,
                    )
                seen += 1
    assert seen > 40
