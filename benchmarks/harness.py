"""What the benchmarks share: competitors in turns or in processes, and rows of results.csv."""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ssmax_lab.records import BenchmarkRow, Provenance, append_csv

RESULTS = Path(__file__).parent / "results.csv"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = 0
BEFORE = 2
"""Tokens: the prompt gives one, the first step, which may capture a graph, the other."""
Measured = TypeVar("Measured")


def parser(about: str, quick: str = "a small model") -> argparse.ArgumentParser:
    """Make the command line of a benchmark from its docstring."""
    made = argparse.ArgumentParser(description=about.splitlines()[0])
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    return made


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], Any]) -> float:
    """Time a call from the host's start to the device's end."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def token_and_prompt(run: Callable[[int], Any], count: int) -> tuple[float, float]:
    """Time one of so many decoded tokens; and what comes before them, which is taken off."""
    # The longer first: a static cache then has one size.
    long, short = (milliseconds(lambda n=n: run(n)) for n in (count + BEFORE, BEFORE))
    return (long - short) / count, short


def peak_mib() -> float:
    """Read the largest memory that was allocated since it was last reset."""
    return torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else 0.0


def reset_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def in_turns(runs: Mapping[str, Callable[[], Measured]], turns: int) -> dict[str, list[Measured]]:
    """Measure competitors in another order in every turn; the first turn, which compiles, is lost.

    Two processes of one competitor differ by a percent: what costs less shows side by side only.
    """
    found: dict[str, list[Measured]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name in random.Random(turn).sample(list(runs), len(runs)):
            value = runs[name]()
            if turn:
                found[name].append(value)
    return found


def in_processes(
    script: str, names: Sequence[str], turns: int, *words: str
) -> dict[str, list[dict[str, float]]]:
    """Run `script --only NAME` turn after turn; each prints what it measured as JSON.

    Those that fail are left out; without the first, the yardstick, there is no ratio.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            command = [sys.executable, script, "--only", name, *words]
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if out.returncode:
                print(f"{name} failed: {out.stderr.strip()[-300:]}", flush=True)
                if name == names[0]:
                    raise SystemExit(1)
                continue
            found[name].append(json.loads(out.stdout.splitlines()[-1]))
    return {name: values for name, values in found.items() if values}


def record(
    out: Path,
    benchmark: str,
    shape: str,
    mode: str,
    times: Mapping[str, Sequence[float]],
    *,
    config: Mapping[str, Any],
    peaks: Mapping[str, float] | None = None,
    errors: Mapping[str, float] | None = None,
) -> None:
    """Print and append medians; the ratio to the first competitor is taken turn by turn."""
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    provenance = Provenance.here(config=dict(config), device=device, seed=SEED)
    base, *_ = times
    mib = dict.fromkeys(times, 0.0) if peaks is None else peaks
    rows = []
    for name, taken in times.items():
        pairs = zip(taken, times[base], strict=False)
        row = BenchmarkRow(
            benchmark=benchmark,
            competitor=name,
            shape=shape,
            mode=mode,
            milliseconds=round(statistics.median(taken), 5),
            ratio=round(statistics.median(mine / other for mine, other in pairs), 4),
            peak_mib=round(mib[name], 1),
            memory_ratio=round(mib[name] / mib[base], 4) if mib[base] else 0.0,
            error=float(f"{(errors or {}).get(name, 0.0):.2e}"),
            provenance=provenance,
        )
        rows.append(row)
        print(
            f"{shape:28} {mode:40} {name:34} {row.milliseconds:11.4f} ms  x {row.ratio:.4f}  "
            f"{row.peak_mib:.0f} MiB",
            flush=True,
        )
    append_csv(out, rows)
