"""Ranks on gloo: two are one, and a run may go on with another number of them."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from ssmax.errors import UsageError
from ssmax_lab.records import read_metrics
from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.dist import DistContext, single_process, with_context_parallel
from ssmax_lab.train.pretraining import pretrain
from ssmax_lab.train.recipes import long
from ssmax_lab.train.run import load_run_model

CPU = single_process(torch.device("cpu"))


@pytest.fixture
def train(run_ranks):
    """Start a run, or go on with it, on so many ranks; what each of them said."""

    def train(ranks, folder, config: TrainConfig):
        if ranks == 1:
            is_there = (folder / "config.json").exists()
            pretrain(config, folder, ranks=CPU, resume=is_there)
            return []
        return run_ranks(ranks, folder, config)

    return train


def losses(folder, kind="step"):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl", kind)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_ranks_are_one(small, tmp_path, train, parallel):
    config = small("f", run__steps=20, run__parallel=parallel, switch__last_fraction=0.3)
    train(1, tmp_path / "one", config)
    said = train(2, tmp_path / "two", config)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert losses(tmp_path / "two", "validation") == pytest.approx(
        losses(tmp_path / "one", "validation"), abs=1e-5
    )
    one, two = (load_run_model(tmp_path / name).state_dict() for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    if parallel == "ddp":
        # A group's threads would want Python's lock while Python ends. (Of a sharded run torch
        # itself keeps the group of all ranks.)
        assert all("gloo threads: []" in out for out in said), said


@pytest.mark.parametrize(
    ("number", "context", "parallel", "letter"),
    [
        (4, 2, "fsdp2", "d"),
        pytest.param(2, 2, "fsdp2", "b", marks=pytest.mark.slow),
        pytest.param(2, 2, "ddp", "a", marks=pytest.mark.slow),
        pytest.param(4, 4, "fsdp2", "b", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_sequences_are_one(
    small, tmp_path, train, number, context, parallel, letter
):
    """Their n is that of whole sequences, in layers with windows too; losses differ by rounding.

    The preset for 131,072 tokens, at a small scale.
    """
    config = small(
        letter, recipe=long, run__steps=6, model__window=5, model__full_every=2,
        model__vocab_size=768, schedule__decay_steps=2, run__precision="float32",
        run__compile=False,
    )  # fmt: skip
    split = config.with_overrides({"run.parallel": parallel, "run.context_parallel": context})
    train(1, tmp_path / "one", config)
    train(number, tmp_path / "split", split)
    for kind in ("step", "validation"):
        found, wanted = (losses(tmp_path / name, kind) for name in ("split", "one"))
        assert found == pytest.approx(wanted, abs=1e-5) and len(found) > 1
    one, split = (load_run_model(tmp_path / name).state_dict() for name in ("one", "split"))
    for name in one:
        torch.testing.assert_close(split[name], one[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "starts",
    [
        [(2, 4, 2), (1, 6, 2)],
        pytest.param([(2, 2, 2), (4, 4, 4), (1, 6, 2)], marks=pytest.mark.slow),
    ],
)
def test_a_split_run_resumes_on_other_ranks(small, tmp_path, train, starts):
    config = small("b", run__steps=4, run__parallel="fsdp2", run__context_parallel=2)
    for ranks, steps, context in starts:
        given = {"run.steps": steps, "run.context_parallel": context}
        train(ranks, tmp_path / "run", config.with_overrides(given))
    train(1, tmp_path / "whole", small("b", run__steps=6))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


@pytest.mark.parametrize(
    ("overrides", "keyword"),
    [
        ({"run.context_parallel": 3}, "divide"),
        ({"run.context_parallel": 2, "model.train_length": 3}, "two tokens"),
        ({"run.context_parallel": 2, "model.dropout_p": 0.1}, "dropout"),
        ({"run.context_parallel": 2, "data.base": "x"}, "pretraining"),
        ({"run.context_parallel": 2, "data.needle_length": 16}, "needles"),
    ],
)
def test_what_cannot_be_split_is_refused(small, overrides, keyword):
    ranks = DistContext(rank=0, size=2, device=torch.device("cpu"), groups={})
    with pytest.raises(UsageError, match=keyword):
        with_context_parallel(ranks, small("b").with_overrides(overrides))


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_ranks(small, tmp_path, train, before, after):
    config = small("b", run__steps=8, run__parallel="fsdp2")
    longer = config.with_overrides({"run.steps": 16})
    train(before, tmp_path / "run", config)
    train(after, tmp_path / "run", longer)
    train(1, tmp_path / "whole", longer)
    run = {
        line["step"]: line["loss"]
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl", "step")
    }
    assert list(run) == list(range(1, 17))
    assert list(run.values()) == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def command_line(ranks, folder, *typed):
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        "-m", "ssmax_lab", *typed, "--out", str(folder / "quick-b"),
    ]  # fmt: skip


@pytest.mark.slow
def test_an_error_of_one_rank_is_a_line_of_each(small, tmp_path, tokens):
    """The first rank finds the folder taken; none is left waiting or ends in a traceback."""
    (tmp_path / "quick-b").mkdir()
    (tmp_path / "quick-b" / "config.json").write_text("{}")
    command = command_line(2, tmp_path, "pretrain", "--device", "cpu", "--data", str(tokens),
                           "--set", "model.train_length=16")  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    said = [
        line for line in done.stderr.splitlines() if line.startswith(("ssmax-lab:", "ssmax-lab ("))
    ]
    # On a busy machine torchrun may end the second rank before it has spoken.
    assert said and all("holds a run already" in line for line in said)
    assert len({line.split(":")[0] for line in said}) == len(said) <= 2
    assert "[rank" not in done.stderr


def test_where_the_first_rank_cannot_write_none_waits(small, tmp_path, run_ranks):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").write_text("no folder")
    for said in run_ranks(2, folder, small("b", run__steps=4), code=1):
        assert "File exists" in said or "Not a directory" in said
        assert "cannot be written" in said


def test_a_signal_to_torchrun_is_a_checkpoint_of_all_ranks(tmp_path, tokens):
    overrides = [
        "model.train_length=16", "model.hidden_size=16", "model.num_layers=1", "run.steps=100000",
        "run.batch_size=2", "run.micro_batch=1",
    ]  # fmt: skip
    command = command_line(2, tmp_path, "pretrain", "--device", "cpu", "--data", str(tokens))
    for change in overrides:
        command += ["--set", change]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    metrics = tmp_path / "quick-b" / "metrics.jsonl"
    try:
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert "stopped by SIGTERM after step" in out, out
    newest = (tmp_path / "quick-b" / "checkpoints" / "latest").read_text().strip()
    assert len(list((tmp_path / "quick-b" / "checkpoints" / newest).glob("*.safetensors"))) >= 1


@pytest.mark.slow
def test_four_ranks_of_a_sharded_run_read_what_two_wrote(small, tmp_path, train):
    config = small("d", run__steps=8, run__parallel="fsdp2")
    train(2, tmp_path / "run", config)
    train(4, tmp_path / "run", config.with_overrides({"run.steps": 12}))
    train(1, tmp_path / "whole", config.with_overrides({"run.steps": 12}))
    assert losses(tmp_path / "run")[-1] == pytest.approx(losses(tmp_path / "whole")[-1], abs=1e-5)
