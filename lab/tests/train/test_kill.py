"""kill -9 at any moment, then resume: the same bytes as a run that was never stopped."""

import os
import random
import signal
import time

import pytest
import torch
from run_process import start

from ssmax_lab.train.dist import single_process
from ssmax_lab.train.pretraining import pretrain
from ssmax_lab.train.run import load_run_model


def finish(process, timeout=120):
    process.join(timeout)
    process.kill()
    process.join()
    assert process.exitcode == 0


def kill_when(process, folder, lines, delay):
    """Once the metrics has so many lines, and a moment later; False if the run was quicker."""
    metrics = folder / "metrics.jsonl"
    while process.is_alive():
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= lines:
            time.sleep(delay)
            break
        time.sleep(0.002)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def kill_and_compare(small, tmp_path, *, kills, seed):
    config = small(
        "f",
        run__steps=60,
        run__checkpoint_every=3,
        run__scale_every=7,
        model__dropout_p=0.1,
        data__validation_windows=24,
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pretrain(config, whole, ranks=single_process(torch.device("cpu")))
    total = (whole / "metrics.jsonl").read_bytes().count(b"\n")
    chance = random.Random(seed)
    done = 0
    for lines in sorted(chance.sample(range(0, total - 5), kills)):
        # Steps, validation and the writing of checkpoints all take milliseconds here.
        process = start(killed, config, tmp_path / "said.txt")
        done += kill_when(process, killed, lines, chance.random() * 0.05)
    finish(start(killed, config, tmp_path / "said.txt"))
    assert done >= kills - 1
    assert (whole / "metrics.jsonl").read_bytes() == (killed / "metrics.jsonl").read_bytes()
    mine, theirs = load_run_model(whole).state_dict(), load_run_model(killed).state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not list((killed / "checkpoints").glob(".*"))


def test_five_kills(small, tmp_path):
    kill_and_compare(small, tmp_path, kills=5, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_kills(small, tmp_path, seed):
    kill_and_compare(small, tmp_path, kills=20, seed=seed)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_run_with_a_checkpoint(small, tmp_path, number):
    config = small("b", run__steps=100_000, run__checkpoint_every=100_000)
    process = start(tmp_path / "run", config, tmp_path / "said.txt")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.is_alive() and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
        time.sleep(0.01)
    os.kill(process.pid, number)
    finish(process)
    out = (tmp_path / "said.txt").read_text()
    (last,) = (line.split() for line in out.splitlines() if line.startswith("outcome"))
    assert last[2] == number.name
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{int(last[1]):08d}\n"
