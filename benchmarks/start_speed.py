"""How long from the command to the first step, on a machine that has not compiled yet, and after?

    python benchmarks/start_speed.py TOKENS             # the paper's model on a GPU
    python benchmarks/start_speed.py TOKENS --quick     # a small one, anywhere

TOKENS is a folder of `ssmax-lab data prepare`. `ssmax-lab pretrain` is started twice, with all
caches of compiled code (Python's, Inductor's, Triton's) in an empty folder, and timed until its
first step is in metrics.jsonl: imports, model, data, compilation and the step. Rows are appended to
benchmarks/results.csv.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ssmax_lab.records import BenchmarkRow, Provenance, append_csv

RESULTS = Path(__file__).parent / "results.csv"
FIRST, SECOND = "first run (yardstick)", "second run"
SEED = 0


def seconds_to_first_step(command: list[str], metrics: Path, environment: dict[str, str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not (metrics.exists() and '"step"' in metrics.read_text()):
            if process.poll() not in (None, 0):
                raise SystemExit("the run failed; its words are above")
            time.sleep(0.02)
        taken = time.perf_counter() - start
        process.wait()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", type=Path, help="prepared tokens")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    arguments = parser.parse_args()
    preset = "quick" if arguments.quick else "gpu"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    provenance = Provenance.here(config={"preset": preset}, device=device, seed=SEED)
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton",
                  "PYTHONPYCACHEPREFIX": "python"}  # fmt: skip
        environment = os.environ | {key: f"{folder}/{name}" for key, name in caches.items()}
        # Told not to, every process would compile 2,500 files of Python again: 9 seconds.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for name in (FIRST, SECOND):
            run = name.split()[0]
            command = [
                sys.executable,
                "-m",
                "ssmax_lab",
                "pretrain",
                "--preset",
                preset,
                "--config",
                "b",
            ]
            command += ["--data", str(arguments.tokens), "--out", f"{folder}/{run}"]
            for change in ("run.steps=2", "run.metrics_every=1", "schedule.warmup_steps=1"):
                command += ["--set", change]
            times[name] = seconds_to_first_step(
                command, Path(folder) / run / "metrics.jsonl", environment
            )
            print(f"{name:24} {times[name]:8.1f} s", flush=True)
    rows = [
        BenchmarkRow(
            benchmark="start_speed",
            competitor=name,
            shape=preset,
            mode="to the first step",
            milliseconds=round(taken * 1e3, 1),
            ratio=round(taken / times[FIRST], 4),
            peak_mib=0.0,
            memory_ratio=0.0,
            error=0.0,
            provenance=provenance,
        )
        for name, taken in times.items()
    ]
    append_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
