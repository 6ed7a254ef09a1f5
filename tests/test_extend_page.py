"""The numbers of docs/extend.md are those of the records."""

import itertools
import json
import lzma
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/extend.md").read_text()


def read(name):
    """The edges of the ranges of positions, and the records, of a run."""
    packed = (ROOT / "lab/results" / name).read_bytes()
    head, *records = map(json.loads, lzma.decompress(packed).splitlines())
    return head["edges"], records


FIRST = read("smollm2-extension.jsonl.xz")
SECOND = read("smollm2-extension-2.jsonl.xz")
RUNS = [[SECOND], [FIRST, SECOND], [FIRST], [SECOND]]
"""For every table, where its cells come from; a row that the one lacks comes from the next."""
POSITIONS = {
    "as trained": "x1", "base x 3.04": "x3.04", "base x 4": "x4", "base x 10": "x10",
    "base x 28": "x28", "YaRN x 2": "yarn2", "YaRN x 4": "yarn4", "YaRN x 8": "yarn8",
}  # fmt: skip
SHARPEN = {"nothing": "none", "YaRN's temperature": "yarn", "clamp": "clamp", "(e)": "e",
           "temperature x clamp": "yarnclamp"}  # fmt: skip
RANGES = {"0-1 k": (0, 1024), "0-8 k": (0, 8192), "8-16 k": (8192, 16384),
          "16-32 k": (16384, 32768), "32-64 k": (32768, 65536)}  # fmt: skip
TASKS = {"": "single", "four": "four", "RULER": "niah_single_1"}


def loss(run, arm, start, stop):
    """The mean over windows of a range of positions, those that were read to its end."""
    edges, records = run
    windows = {}
    for record in records:
        if (record["positions"], record["sharpen"], record["what"]) == (*arm, "loss"):
            for number, row in enumerate(record["value"], record["first_window"]):
                windows.setdefault(number, row)
    inside = [i for i, (a, b) in enumerate(itertools.pairwise(edges)) if start <= a and b <= stop]
    widths = [edges[i + 1] - edges[i] for i in inside]
    means = [
        np.average([row[i] for i in inside], weights=widths)
        for row in windows.values()
        if len(row) > inside[-1]
    ]
    return f"{np.mean(means):.3f}" if means else None


def found(run, arm, task, length):
    """The share of a task's numbers that were found."""
    for record in run[1]:
        about = record["positions"], record["sharpen"], record["what"], record["length"]
        if about == (*arm, task, length):
            return f"{np.mean([trial[1] for trial in record['value']]):.2f}"
    return None


def measured(run, arm, title):
    """What a cell says, by the title of its column; None where it was not measured."""
    if title in RANGES:
        return loss(run, arm, *RANGES[title])
    task, length = re.fullmatch(r"(\w*?) ?(\d+) k", title).groups()
    return found(run, arm, TASKS[task], 1024 * int(length))


def test_every_number_of_the_tables_is_that_of_the_records():
    tables = re.findall(r"^\| positions .+\n(?:\|.+\n)+", PAGE, re.M)
    seen = 0
    for table, runs in zip(tables, RUNS, strict=True):
        titles, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in table.strip().splitlines()
        )
        for positions, label, *cells in rows:
            arm = POSITIONS[positions], SHARPEN.get(label, f"const{label}")
            for title, cell in zip(titles[2:], cells, strict=True):
                if cell == "-":
                    continue
                told = (value for run in runs if (value := measured(run, arm, title)))
                assert cell == next(told, None), (*arm, title)
                seen += 1
    assert seen > 80
