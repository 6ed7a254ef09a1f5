"""Benchmarks run on this machine with a small model, and keep what they measured."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TYPED = {
    "context_parallel": "growth --quick --rounds 1",
    "hf_cost": "--quick",
    "train_speed": "--quick --turns 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPED)
def test_a_benchmark_keeps_its_rows(name, tmp_path):
    command = [sys.executable, f"{name}.py", *TYPED[name].split(), "--out", tmp_path / "rows.csv"]
    subprocess.run(command, cwd=BENCHMARKS, check=True)
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 1 and all(float(row["milliseconds"]) > 0 for row in rows)
    with (BENCHMARKS / "results.csv").open() as file:
        assert list(rows[0]) == next(csv.reader(file))
