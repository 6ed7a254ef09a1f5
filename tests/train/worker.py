"""A run in a process of its own, for tests that kill it or start several ranks of it."""

import json
import sys
from pathlib import Path

import torch

from ssmax.train import joined_world, pretrain
from ssmax.train.config import TrainConfig

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, config = Path(sys.argv[1]), TrainConfig.from_dict(json.loads(sys.argv[2]))
    with joined_world("cpu") as world:
        outcome = pretrain(config, folder, world=world, resume=(folder / "config.json").exists())
    print(f"outcome {outcome.step} {outcome.stopped_by} {outcome.loss}")
    tasks = Path("/proc/self/task").glob("*/comm")  # on Linux; nothing elsewhere
    print("threads", *sorted(task.read_text().strip() for task in tasks))
