"""How long do the paper's measurements of one model take?

    python benchmarks/measuring_speed.py             # the paper's model and lengths, on a GPU
    python benchmarks/measuring_speed.py --quick     # a small one, anywhere

Random weights and random text: loss by position of 256 documents of 20,000 tokens, the needle grid
of ten context sizes to 20,480 x 11 depths x 20 trials, and needle scores of 100 trials at 8,000.
Times are whole, with everything that a study pays for too. Rows are appended to
benchmarks/results.csv; there is no competitor, so the ratio is 1.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.eval.position_loss import measure_position_loss
from ssmax_lab.eval.retrieval import measure_needle_scores, measure_retrieval
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.records import BenchmarkRow, Provenance, append_csv

RESULTS = Path(__file__).parent / "results.csv"
SEED = 0


@dataclass(frozen=True)
class Plan:
    tokenizer: str
    documents: int
    length: int
    batch: int
    """Documents at a time."""
    contexts: tuple[int, ...]
    depths: int
    trials: int
    prompts: int
    """At a time."""
    score_length: int
    score_trials: int


PAPER = Plan("gpt2", 256, 20_000, 2,
             (512, 1024, 2048, 3072, 4096, 6144, 8192, 10_240, 15_360, 20_480), 11, 20, 10,
             8000, 100)  # fmt: skip
QUICK = Plan("small", 4, 256, 2, (96, 128), 2, 2, 2, 128, 3)
SMALL = {
    "num_layers": 2,
    "num_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "train_length": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else PAPER
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    tokenizer = load_tokenizer(plan.tokenizer)
    size = tokenizer.vocabulary.size
    torch.manual_seed(SEED)
    shape = {**SMALL, "vocab_size": size} if arguments.quick else {}
    model = LM(LMConfig(rule="ssmax", **shape)).to(device).eval()
    chance = np.random.default_rng(SEED)
    rows = chance.integers(0, size, (plan.documents, plan.length + 1))
    text = chance.integers(0, size, 400_000)
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    provenance = Provenance.here(config=asdict(plan), device=where, seed=SEED)
    about = {"run": "random", "provenance": provenance}

    def position_loss() -> None:
        measure_position_loss(model, rows, batch=plan.batch, device=device, **about)

    def needle_grid() -> None:
        depths = np.linspace(0, 1, plan.depths).tolist()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "needle.jsonl"
            measure_retrieval(
                model, tokenizer, text, lengths=plan.contexts, depths=depths, trials=plan.trials,
                seed=SEED, out=out, batch=plan.prompts, **about,
            )  # fmt: skip

    def needle_scores() -> None:
        measure_needle_scores(
            model, tokenizer, text, length=plan.score_length, trials=plan.score_trials, seed=SEED,
            batch=plan.prompts, device=device, **about,
        )  # fmt: skip

    shapes: dict[str, tuple[Callable[[], None], str]] = {
        "needle scores": (needle_scores, f"{plan.score_trials} x {plan.score_length}"),
        "loss by position": (position_loss, f"{plan.documents} x {plan.length}"),
        "needle grid": (
            needle_grid,
            f"{len(plan.contexts)} sizes to {max(plan.contexts)} x {plan.depths} x {plan.trials}",
        ),
    }
    for name, (measure, shape_text) in shapes.items():
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext():
            measure()
        taken = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
        print(f"{name:18} {shape_text:36} {taken:8.1f} s  {peak:8.0f} MiB", flush=True)
        row = BenchmarkRow(
            benchmark="measuring_speed",
            competitor="ours",
            shape=shape_text,
            mode=name,
            milliseconds=round(taken * 1e3, 1),
            ratio=1.0,
            peak_mib=round(peak, 1),
            memory_ratio=0.0,
            error=0.0,
            provenance=provenance,
        )
        append_csv(arguments.out, [row])


if __name__ == "__main__":
    main()
