"""Checkpoints are whole or passed over; writing one never harms another."""

import json
import os
import shutil

import pytest
import torch

from ssmax._files import locked
from ssmax.errors import UsageError
from ssmax_lab.train import loop
from ssmax_lab.train.checkpoint import (
    TrainState,
    checkpoint_folder,
    load_tensors,
    newest_checkpoint,
    read_state,
    save_checkpoint,
    training_tensors,
)
from ssmax_lab.train.dist import single_process
from ssmax_lab.train.loop import Interrupts
from ssmax_lab.train.pretraining import pretrain
from ssmax_lab.train.run import MetricsMark, load_run_model

CPU = single_process(torch.device("cpu"))


def state(step):
    return TrainState(
        step=step, rule="ssmax", metrics=MetricsMark(), skipped=0, data_fingerprint="samples"
    )


def save(folder, *steps, keep=9):
    for step in steps:
        save_checkpoint(
            folder, {"model.w": torch.full((3,), float(step))}, state(step), CPU, keep=keep
        )


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


FAULTS = {
    "a flipped bit in the tensors": lambda f: flip_a_bit(next(f.glob("*.safetensors"))),
    "truncated tensors": lambda f: cut(next(f.glob("*.safetensors"))),
    "missing tensors": lambda f: next(f.glob("*.safetensors")).unlink(),
    "a flipped bit in the state": lambda f: flip_a_bit(f / "state.json"),
    "a missing state": lambda f: (f / "state.json").unlink(),
    "a truncated manifest": lambda f: cut(f / "manifest.json"),
    "a missing manifest": lambda f: (f / "manifest.json").unlink(),
    "a manifest of nothing": lambda f: (f / "manifest.json").write_text("{}"),
    "a manifest that is none": lambda f: (f / "manifest.json").write_text("[]"),
    "an empty folder": lambda f: [path.unlink() for path in f.iterdir()],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_named_and_passed_over(tmp_path, fault):
    save(tmp_path, 1, 2)
    FAULTS[fault](checkpoint_folder(tmp_path, 2))
    found, faults = newest_checkpoint(tmp_path)
    assert found == checkpoint_folder(tmp_path, 1)
    assert len(faults) == 1 and "step-00000002 is not whole" in faults[0]


def test_a_half_written_one_is_never_taken(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(
        checkpoint_folder(tmp_path, 1), tmp_path / "checkpoints" / ".step-00000009.writing"
    )
    assert newest_checkpoint(tmp_path)[0] == checkpoint_folder(tmp_path, 1)
    save(tmp_path, 2)
    assert not list((tmp_path / "checkpoints").glob(".*.writing"))


def test_the_newest_stay_and_the_pointer_names_the_last(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000004"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000004\n"
    assert read_state(checkpoint_folder(tmp_path, 4)) == state(4)


def test_a_broken_later_one_does_not_take_the_place_of_the_newest(tmp_path):
    save(tmp_path, 4, 8)
    flip_a_bit(checkpoint_folder(tmp_path, 8) / "state.json")
    save(tmp_path, 5, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000005"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save(tmp_path, 1)
    folder = checkpoint_folder(tmp_path, 1)
    with pytest.raises(ValueError, match=r"another model.*Missing key .*model\.other"):
        load_tensors(folder, {"model.other": torch.zeros(3)}, CPU)
    with pytest.raises(ValueError, match=r"another model.*\[3\].*\[4\].*model\.w"):
        load_tensors(folder, {"model.w": torch.zeros(4)}, CPU)


def test_loading_runs_no_code(tmp_path):
    """A pickle in the place of anything a checkpoint holds is refused, not opened."""
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    save(tmp_path, 1)
    folder = checkpoint_folder(tmp_path, 1)
    for path in folder.iterdir():
        path.write_bytes(pickle.dumps(Evil()))
    assert newest_checkpoint(tmp_path)[0] is None
    with pytest.raises(Exception, match="(?i)header|safetensors|invalid"):
        load_tensors(folder, {"model.w": torch.zeros(3)}, CPU)
    assert not (tmp_path / "ran").exists()


def test_a_failed_write_is_raised_and_leaves_the_last_checkpoint(small, tmp_path, monkeypatch):
    from ssmax_lab.train import checkpoint

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    real = checkpoint._write_manifest
    calls = []

    def sometimes(folder):
        calls.append(folder)
        (real if len(calls) == 1 else full_disk)(folder)

    monkeypatch.setattr(checkpoint, "_write_manifest", sometimes)
    with pytest.raises(OSError, match="No space left"):
        pretrain(small("b"), tmp_path / "run", ranks=CPU)
    monkeypatch.undo()
    found, _ = newest_checkpoint(tmp_path / "run")
    assert found is not None and read_state(found).step == 4
    assert pretrain(small("b"), tmp_path / "run", ranks=CPU, resume=True).step == 12


def test_a_stop_at_a_checkpoint_writes_it_once(small, tmp_path, monkeypatch):
    saved = []

    def counted(run, tensors, state, ranks, **options):
        saved.append(state.step)
        save_checkpoint(run, tensors, state, ranks, **options)

    monkeypatch.setattr(loop, "save_checkpoint", counted)
    asked = iter([False, False, False, True])
    monkeypatch.setattr(Interrupts, "asked", property(lambda self: next(asked)))
    outcome = pretrain(small("b"), tmp_path / "run", ranks=CPU)
    assert (outcome.step, saved) == (4, [4])


def test_a_vanished_shard_ends_the_run_by_name_with_the_checkpoint_intact(
    small, tmp_path, monkeypatch
):
    from ssmax_lab.train.pretraining import Windows

    real = Windows.batches

    def vanishing(self, first, count):
        if first > 30:
            raise ValueError("00000.shard has vanished")
        return real(self, first, count)

    monkeypatch.setattr(Windows, "batches", vanishing)
    with pytest.raises(ValueError, match="00000.shard has vanished"):
        pretrain(small("b", data__validation_windows=0), tmp_path / "run", ranks=CPU)
    found, _ = newest_checkpoint(tmp_path / "run")
    # Samples are taken a few steps ahead of their use.
    assert found is not None and read_state(found).step in (4, 8)


def test_a_run_in_use_is_refused(small, tmp_path):
    pretrain(small("b", run__steps=1), tmp_path / "run", ranks=CPU)
    with (
        locked(tmp_path / "run"),
        pytest.raises(ValueError, match="is in use by another process"),
    ):
        pretrain(small("b", run__steps=1), tmp_path / "run", ranks=CPU, resume=True)


def test_a_folder_that_cannot_be_made_is_a_clear_error(small, tmp_path):
    """A file stands in the way, which stops root too."""
    (tmp_path / "runs").write_text("")
    with pytest.raises(UsageError, match="must be a folder"):
        pretrain(small("b"), tmp_path / "runs" / "run", ranks=CPU)


def test_an_unfinished_run_has_a_model_too(small, tmp_path):
    pretrain(small("d"), tmp_path / "run", ranks=CPU)
    finished = load_run_model(tmp_path / "run").state_dict()
    shutil.rmtree(tmp_path / "run" / "model")
    from_checkpoint = load_run_model(tmp_path / "run").state_dict()
    assert all(torch.equal(finished[name], from_checkpoint[name]) for name in finished)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match="no model and no whole checkpoint"):
        load_run_model(tmp_path / "run")


def test_a_run_without_a_whole_checkpoint_starts_again(small, tmp_path, caplog):
    config = small("b", run__checkpoint_every=8)
    pretrain(config, tmp_path / "run", ranks=CPU)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for folder in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (folder / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "run" / "model")
    pretrain(config, tmp_path / "run", ranks=CPU, resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    assert caplog.text.count("is not whole and is passed over") == 2


@pytest.mark.parametrize("is_finished", [True, False])
def test_what_a_run_has_done_is_not_begun_anew(small, tmp_path, is_finished):
    """It cost a metrics and a finished model, where checkpoints had been deleted."""
    config, run = small("b", run__checkpoint_every=4), tmp_path / "run"
    pretrain(config, run, ranks=CPU)
    shutil.rmtree(run / "checkpoints")
    if not is_finished:
        shutil.rmtree(run / "model")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="12 steps and holds no whole checkpoint to resume from"):
        pretrain(config, run, ranks=CPU, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_without_its_settings_is_not_overwritten(small, tmp_path):
    pretrain(small("b"), tmp_path / "run", ranks=CPU)
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(ValueError, match="holds a run already"):
        pretrain(small("b"), tmp_path / "run", ranks=CPU)


def test_names_are_the_models_own(small, tmp_path):
    from ssmax_lab.model import LM
    from ssmax_lab.train.step import make_optimizer

    model = LM(small("d").model)
    optimizer = make_optimizer(model, small("d").optim, CPU.device)
    names = set(training_tensors(model, optimizer))
    assert "model.blocks.0.attention.ssmax.s" in names
    assert "optimizer.head.weight.exp_avg_sq" in names
    assert len(names) == 4 * len(list(model.parameters()))


def test_the_state_is_plain_json(tmp_path):
    save(tmp_path, 3)
    assert json.loads((checkpoint_folder(tmp_path, 3) / "state.json").read_text())["step"] == 3
