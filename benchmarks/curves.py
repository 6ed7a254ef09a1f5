"""Does the fast loop learn what the plain one learns? Their loss curves, step by step.

    python benchmarks/curves.py TOKENS             # the paper's model on a GPU, some ten minutes
    python benchmarks/curves.py TOKENS --quick     # a small one, anywhere

TOKENS is a folder of `ssmax-lab data prepare`. The plain loop of train_speed.py and ours, with a
residual stream of bfloat16 and of float32, all with softmax: for each
seed the same first weights and the same batches, 300 steps, warmed up over the first hundred. The
plain loop and ours have a second seed, and the plain loop is run twice with the first: kernels add
up in no fixed order, and what separates two runs of one loop is the noise that differences between
loops are to be held against. Every run is a process of its own and a line of
benchmarks/curves.jsonl, written when it is done.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from ssmax_lab.data.shards import TRAIN, ShardSet
from ssmax_lab.data.stream import prefetched
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.records import Provenance
from ssmax_lab.train.config import OptimConfig, RunConfig, ScheduleConfig
from ssmax_lab.train.dist import clip_gradients, single_process
from ssmax_lab.train.pretraining import Windows
from ssmax_lab.train.step import (
    Batch,
    accumulate_gradients,
    learning_rate,
    make_optimizer,
    parallel_loss,
    set_learning_rate,
)
from train_speed import PLAIN, PlainModel, plain_weights

RESULTS = Path(__file__).parent / "curves.jsonl"
AGAIN = "plain loop, again"
NARROW, WIDE = "ours", "ours, float32 residual"
CHANGES = {
    PLAIN: {},
    AGAIN: {},
    NARROW: {},
    WIDE: {"residual": "float32"},
}
RUNS = [(0, name) for name in CHANGES] + [(1, PLAIN), (1, NARROW)]
LAST = 50
"""Steps whose mean is printed."""


def curve(name: str, config: LMConfig, tokens: Path, batch: int, steps: int, seed: int) -> dict:
    """The loss of every step."""
    torch.manual_seed(seed)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    precision = "bfloat16" if on_gpu else "float32"
    run = RunConfig(precision=precision, compile=on_gpu, **CHANGES[name])
    optim, schedule = OptimConfig(), ScheduleConfig(warmup_steps=min(100, steps))
    ranks = single_process(device)
    model: nn.Module = LM(config)
    if name in (PLAIN, AGAIN):
        plain = PlainModel(config)
        plain.load_state_dict(plain_weights(model))
        model = plain.to(device)
        loss: nn.Module = torch.compile(model) if on_gpu else model
    else:
        loss = parallel_loss(model, run, ranks)
    optimizer = make_optimizer(model, optim, device)
    samples = Windows(ShardSet.open(tokens / TRAIN), length=config.train_length, seed=seed)

    def batches(step: int) -> list[Batch]:
        rows = samples.batches(step * batch, batch)
        return [part.pinned() if on_gpu else part for part in rows]

    losses = []
    with contextlib.closing(prefetched(batches)) as made:
        for step in range(steps):
            rate = learning_rate(step, schedule, peak=optim.lr, steps=steps)
            set_learning_rate(optimizer, rate)
            losses.append(accumulate_gradients(loss, next(made), ranks, precision))
            clip_gradients(model, optim.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    about = {"model": config.to_dict(), "batch": batch, "steps": steps}
    provenance = Provenance.here(config=about, device=where, seed=seed)
    values = [round(value, 5) for value in torch.stack(losses).tolist()]
    return {"competitor": name, "losses": values, **dataclasses.asdict(provenance)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", type=Path, help="prepared tokens, a vocabulary of GPT-2's size")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--together", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to append to")
    parser.add_argument("--only", choices=list(CHANGES), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config, batch, steps = LMConfig(), 64, 300
    if arguments.quick:
        size = ShardSet.open(arguments.tokens / TRAIN).vocabulary.size
        config = LMConfig(num_layers=2, num_heads=4, hidden_size=64, intermediate_size=96,
                          vocab_size=size, train_length=64)  # fmt: skip
        batch, steps = 8, 30
    if arguments.only:
        found = curve(arguments.only, config, arguments.tokens, batch, steps, arguments.seed)
        print("result", json.dumps(found))
        return

    def run(seed: int, name: str) -> None:
        command = [sys.executable, __file__, str(arguments.tokens), "--only", name]
        command += ["--seed", str(seed)] + ["--quick"] * arguments.quick
        out = subprocess.run(command, capture_output=True, text=True, check=False)
        if out.returncode:
            print(f"seed {seed} {name:32} failed: {out.stderr.strip()[-300:]}", flush=True)
            return
        line = out.stdout.strip().splitlines()[-1].removeprefix("result ")
        last = statistics.mean(json.loads(line)["losses"][-LAST:])
        print(f"seed {seed} {name:32} loss of the last {LAST} steps {last:.4f}", flush=True)
        with arguments.out.open("a") as file:
            file.write(line + "\n")

    with ThreadPoolExecutor(arguments.together) as pool:
        list(pool.map(run, *zip(*RUNS, strict=True)))


if __name__ == "__main__":
    main()
