"""Does anything of SSMax grow faster than softmax: with length, batch, heads or the model's size?

    python benchmarks/growth.py attention     # a GPU, two minutes
    python benchmarks/growth.py model         # a GPU, seven minutes: 30 M to 1.6 B parameters
    python benchmarks/growth.py model --size "1.6 B"

Attention, forward and backward: ours against compiled RoPE + cuDNN softmax, one thing growing at a
time. Models: steps of ours with SSMax against the plain loop, each in a process of its own. What
runs is what attention_cost.py and train_speed.py check before they time it; here nothing is
checked. Rows are appended to benchmarks/results.csv.
"""

import argparse
import dataclasses
import functools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from attention_cost import Shape, forward_backward, make_inputs, milliseconds, ours, yardstick
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.records import BenchmarkRow, Provenance, append_csv
from train_speed import PLAIN, SSMAX, train_some
from train_speed import RULES as RULE_OF

RESULTS = Path(__file__).parent / "results.csv"
SEED, ROUNDS = 0, 5
YARDSTICK, OURS = "softmax (yardstick)", "ours"
TOKENS = 131_072


def attention_shapes() -> list[Shape]:
    """Length at as many tokens, batch at one length, heads at one length."""
    lengths = [Shape(TOKENS // t, t, t, 12, 12, 64) for t in (1024, 4096, 16_384, 65_536, 131_072)]
    batches = [Shape(b, 1024, 1024, 12, 12, 64) for b in (1, 8, 64)]
    heads = [Shape(4, 4096, 4096, h, h, 64) for h in (4, 16, 64)]
    return lengths + batches + heads


# Layers, width, heads, feed-forward width, sequences of a step.
MODELS = {
    "30 M": (6, 256, 4, 704, 64),
    "162 M": (12, 768, 12, 2048, 64),
    "0.6 B": (24, 1280, 20, 3456, 16),
    "1.6 B": (32, 1920, 30, 5120, 8),
}


def grow_attention(out: Path) -> None:
    name = torch.cuda.get_device_name()
    for shape in attention_shapes():
        torch.compiler.reset()
        x = make_inputs(shape, "cuda", torch.bfloat16)
        runs = {
            key: functools.partial(forward_backward, torch.compile(function, dynamic=False), x)
            for key, function in ((YARDSTICK, yardstick), (OURS, ours))
        }
        peaks, times = {}, {key: [] for key in runs}
        for key, run in runs.items():
            run()
            torch.cuda.reset_peak_memory_stats()
            run()
            torch.cuda.synchronize()
            peaks[key] = torch.cuda.max_memory_allocated() / 2**20
        for turn in range(ROUNDS):
            for key in random.Random(turn).sample(list(runs), len(runs)):
                times[key].append(milliseconds(runs[key], on_gpu=True, as_graph=True))
        write(out, str(shape), "forward+backward", times, peaks, name, dataclasses.asdict(shape))


def config_of(size: str, rule: str) -> tuple[LMConfig, int]:
    layers, width, heads, intermediate_size, batch = MODELS[size]
    shape = {
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "intermediate_size": intermediate_size,
    }
    return LMConfig(**shape, rule=rule), batch


def grow_models(out: Path, sizes: Iterable[str]) -> None:
    name = torch.cuda.get_device_name()
    for size in sizes:
        times: dict[str, list[float]] = {}
        peaks: dict[str, float] = {}
        for key in (PLAIN, SSMAX):
            command = [sys.executable, __file__, "model", "--size", size, "--competitor", key]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{size} {key} failed: {done.stderr.strip()[-300:]}", flush=True)
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1].removeprefix("result "))
            times[key], peaks[key] = [found["ms"]], found["mib"]
        if len(times) == 2:
            config, batch = config_of(size, "softmax")
            with torch.device("meta"):
                parameters = LM(config).num_parameters
            shape = f"{size} B{batch} T{config.train_length}"
            print(f"{size}: {parameters:,} parameters")
            write(out, shape, "step", times, peaks, name, config.to_dict())


def write(out, shape, mode, times, peaks, device, config) -> None:
    """Rows of one shape; the first competitor is the yardstick."""
    provenance = Provenance.here(config=config, device=device, seed=SEED)
    base, *_ = times
    unit = statistics.median(times[base])
    rows = []
    for key, taken in times.items():
        median = statistics.median(taken)
        print(f"{shape:28} {key:34} {median:10.3f} ms  x {median / unit:.4f}", flush=True)
        rows.append(
            BenchmarkRow(
                benchmark="growth",
                competitor=key,
                shape=shape,
                mode=mode,
                milliseconds=round(median, 5),
                ratio=round(median / unit, 4),
                peak_mib=round(peaks[key], 1),
                memory_ratio=round(peaks[key] / peaks[base], 4),
                error=0.0,
                provenance=provenance,
            )
        )
    append_csv(out, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["attention", "model"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    parser.add_argument("--size", choices=list(MODELS), help="one of the models alone")
    parser.add_argument("--competitor", choices=[PLAIN, SSMAX], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    if arguments.competitor:
        config, batch = config_of(arguments.size, RULE_OF[arguments.competitor])
        found = train_some(arguments.competitor, config, batch, steps=15, warmup=5)
        print("result", json.dumps(found))
    elif arguments.what == "attention":
        grow_attention(arguments.out)
    else:
        grow_models(arguments.out, [arguments.size] if arguments.size else MODELS)


if __name__ == "__main__":
    main()
