"""Runs so small that a whole one takes a second."""

import io

import numpy as np
import pytest
import run_process
import torch
from torch.distributed import TCPStore

from ssmax._progress import logging_to_terminal
from ssmax_lab.data.shards import write_index, write_shard
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.loop import Interrupts
from ssmax_lab.train.recipes import configured, quick

SMALL = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.intermediate_size": 32,
    "model.train_length": 16,
    "schedule.warmup_steps": 4,
    "run.steps": 12,
    "run.batch_size": 4,
    "run.micro_batch": 2,
    "run.checkpoint_every": 4,
    "run.validate_every": 5,
    "run.scale_every": 3,
    "run.metrics_every": 2,
    "data.validation_windows": 5,
}


def write_tokens(folder, *, seed=0, documents=20):
    """Prepared text: words of four letters, so that there is something to learn."""
    generator = np.random.default_rng(seed)
    words = generator.integers(97, 123, (30, 4))
    vocabulary = load_tokenizer("bytes").vocabulary
    for side, number in (("train", documents), ("validation", 4)):
        (folder / side).mkdir(parents=True)
        with write_shard(folder / side / "00000.shard", vocabulary) as writer:
            for _ in range(number):
                writer.add(words[generator.integers(0, 30, 60)].reshape(-1))
        write_index(folder / side, vocabulary, [writer.info()], details={})
    return folder


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Products this small are slower on two, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "text")


@pytest.fixture
def small(tokens):
    """A configuration by its letter, with overrides."""

    def make(letter: str = "b", *, recipe=quick, **overrides) -> TrainConfig:
        overrides = {key.replace("__", "."): value for key, value in overrides.items()}
        base = configured(recipe(), letter)
        return base.with_overrides({**SMALL, "data.folder": str(tokens), **overrides})

    return make


@pytest.fixture
def logged():
    """What the command line would show of progress."""
    stream = io.StringIO()
    with logging_to_terminal(stream):
        yield stream


@pytest.fixture
def stop_after():
    """A signal that comes while a step is computed."""

    def patch(monkeypatch, step: int) -> None:
        calls = {"left": step}

        def asked(self) -> bool:
            calls["left"] -= 1
            if calls["left"] == 0:
                self.name = "SIGTERM"
            return self.name is not None

        monkeypatch.setattr(Interrupts, "asked", property(asked))

    return patch


@pytest.fixture
def run_ranks(tmp_path):
    """So many ranks of a run as torchrun starts them, without a process for itself.

    The store that they meet at is held here, so that nobody else can take its port.
    """

    def run(number: int, folder, config: TrainConfig, code: int = 0) -> list[str]:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(number),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        said = [tmp_path / f"rank{rank}.txt" for rank in range(number)]
        processes = [
            run_process.start(folder, config, path, **shared, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank, path in enumerate(said)
        ]
        for process in processes:
            process.join(240)
            process.kill()
            process.join()
        told = [path.read_text() for path in said]
        assert [process.exitcode for process in processes] == [code] * number, told
        return told

    return run
