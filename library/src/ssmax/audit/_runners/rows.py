"""What every engine's script shares: a job in, the likeliest tokens after each position out.

Run by an engine's own Python, which has none of this package.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LIKELIEST = 20
"""As many as vLLM tells of a prompt."""
CHUNK, SINGLE = 512, 32
"""Tokens at a time, and how many at the end go one by one."""


def read_job() -> dict[str, Any]:
    """Read the job that this process was started for."""
    return json.loads(Path(sys.argv[1]).read_text())


def pieces(tokens: list[int]) -> Iterator[list[int]]:
    """Cut tokens into what is fed at a time."""
    total = len(tokens)
    first = max(total - SINGLE, 0)
    bounds = [*range(0, first, CHUNK), *range(first, total + 1)]
    for start, stop in itertools.pairwise(bounds):
        yield tokens[start:stop]


def likeliest(logits: Any) -> list[dict[int, float]]:
    """Find the likeliest tokens of every row of logits (Q, V), and their log-probabilities."""
    rows = []
    for row in np.asarray(logits, dtype=np.float64):
        logprobs = row - row.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs)[:LIKELIEST]
        rows.append({int(token): float(logprobs[token]) for token in best})
    return rows


def write(version: str, rows: list[dict[int, float]]) -> None:
    """Write what was found; every row but that of the last token."""
    Path(sys.argv[2]).write_text(json.dumps({"version": version, "rows": rows}))
