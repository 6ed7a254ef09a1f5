"""A run in a process of its own, for tests that kill it or start several ranks of it."""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch

from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.dist import init_distributed
from ssmax_lab.train.pretraining import pretrain


def gloo_threads() -> list[str]:
    """Threads of process groups by name, as Linux lists them; none elsewhere."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(task.read_text().strip())
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, config = Path(sys.argv[1]), TrainConfig.from_dict(json.loads(sys.argv[2]))
    with init_distributed("cpu") as ranks:
        outcome = pretrain(config, folder, ranks=ranks, resume=(folder / "config.json").exists())
    print(f"outcome {outcome.step} {outcome.stopped_by} {outcome.loss}")
    if config.run.parallel == "ddp":
        # The system lists a thread a moment longer than it lives.
        until = time.monotonic() + 10
        while gloo_threads() and time.monotonic() < until:
            time.sleep(0.05)
        print("gloo threads:", gloo_threads())
