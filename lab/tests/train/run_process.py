"""A run in a process of its own, for tests that kill it or start several ranks of it."""

import contextlib
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch

from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.dist import init_distributed
from ssmax_lab.train.pretraining import pretrain

# Each is a fork of one process that has imported torch: that takes a run's time many times over.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["ssmax_lab.train.pretraining"])


def start(folder: Path, config: TrainConfig, said: Path, **environment: str) -> Any:
    """Start a run, or go on with it; what it says is in a file."""
    arguments = (str(folder), json.dumps(config.to_dict()), str(said), environment)
    process = PROCESSES.Process(target=_run, args=arguments, daemon=True)
    process.start()
    return process


def _run(name: str, settings: str, said: str, environment: dict[str, str]) -> None:
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    folder, config = Path(name), TrainConfig.from_dict(json.loads(settings))
    with init_distributed("cpu") as ranks:
        outcome = pretrain(config, folder, ranks=ranks, resume=(folder / "config.json").exists())
    print(f"outcome {outcome.step} {outcome.stopped_by} {outcome.loss}")
    if config.run.parallel == "ddp":
        # The system lists a thread a moment longer than it lives.
        until = time.monotonic() + 10
        while _gloo_threads() and time.monotonic() < until:
            time.sleep(0.05)
        print("gloo threads:", _gloo_threads())


def _gloo_threads() -> list[str]:
    """Threads of process groups by name, as Linux lists them; none elsewhere."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(task.read_text().strip())
    return [name for name in names if "gloo" in name]
