"""Checkpoints: whole or not there, hashed, and free of code.

    checkpoints/step-00001000/   *.safetensors (one per rank), state.json, manifest.json
    checkpoints/latest           the name of the newest whole one

Tensors go through torch.distributed.checkpoint in its safetensors storage, so a run may resume on
another number of ranks and nothing is unpickled. A checkpoint is written into a hidden folder,
hashed, synced and renamed; the pointer moves last. Reading checks every hash first.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ssmax._files import sync_folder, write_whole
from ssmax.errors import UsageError
from ssmax_lab.records import METRICS
from ssmax_lab.train.dist import DistContext
from ssmax_lab.train.run import MetricsMark, read_marked

FOLDER, POINTER, STATE, MANIFEST = "checkpoints", "latest", "state.json", "manifest.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """What a run knows besides its tensors."""

    step: int
    """Steps that are done."""
    rule: str
    """The rule of the model whose tensors these are."""
    metrics: MetricsMark
    """How far metrics.jsonl was when these tensors were current."""
    skipped: int
    """Steps left out because of a loss or gradient that was not finite."""
    data_fingerprint: str
    """Identity of the samples; another one would be another run."""


def checkpoint_folder(run: Path, step: int) -> Path:
    """Name the folder of a step's checkpoint."""
    return run / FOLDER / f"step-{step:08d}"


def save_checkpoint(
    run: Path,
    tensors: Mapping[str, Tensor],
    state: TrainState,
    ranks: DistContext,
    *,
    keep: int,
    keep_step: int | None = None,
) -> None:
    """Write a checkpoint and drop all but the newest `keep`; that of `keep_step` stays.

    Every rank has to call; where one cannot write, all raise.
    """
    final = checkpoint_folder(run, state.step)
    hidden = final.with_name(f".{final.name}.writing")

    def complete() -> None:
        write_whole(hidden / STATE, json.dumps(dataclasses.asdict(state), indent=2))
        _write_manifest(hidden)
        if final.exists():
            shutil.rmtree(final)
        hidden.rename(final)
        sync_folder(final.parent)
        write_whole(final.parent / POINTER, final.name + "\n")
        _drop_others(run, final, keep=keep, keep_step=keep_step)

    # Where the first rank cannot, the others do not wait for it.
    ranks.on_rank0(functools.partial(_make_empty, hidden))
    try:
        with _quiet_when_alone():
            save(
                dict(tensors),
                storage_writer=HuggingFaceStorageWriter(str(hidden), save_distributed=True),
                process_group=ranks.groups.get("cpu"),
                no_dist=ranks.size == 1,
            )
        ranks.on_rank0(complete)
    except CheckpointException as error:
        cause = _first_cause(error)
        raise cause if isinstance(cause, OSError) else error from error
    finally:
        if ranks.is_first:
            shutil.rmtree(hidden, ignore_errors=True)


def _drop_others(run: Path, newest: Path, *, keep: int, keep_step: int | None) -> None:
    # One of a later step was not whole, or the run would have resumed from it.
    later = [folder for folder in _steps(run) if folder.name > newest.name]
    old = sorted(set(_steps(run)) - set(later), reverse=True)[keep:]
    kept = None if keep_step is None else checkpoint_folder(run, keep_step)
    for folder in (*later, *(one for one in old if one != kept)):
        shutil.rmtree(folder)
    for folder in (run / FOLDER).glob(".*.writing"):
        shutil.rmtree(folder)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _first_cause(error: CheckpointException) -> BaseException:
    """Of every rank that failed; the first cause is the one to show."""
    return next(iter(error.failures.values()))[0]


@contextmanager
def _quiet_when_alone() -> Iterator[None]:
    """Silence torch, which wonders why a single process saves and loads as one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def has_any(run: Path) -> bool:
    """Tell whether a run has checkpoints, whole or not."""
    return bool(_steps(run))


def newest_checkpoint(run: Path) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint that is whole; say why those after it are passed over."""
    unfinished = sorted((run / FOLDER).glob(".*.writing"))
    faults = [f"{folder} was never finished and is passed over" for folder in unfinished]
    for folder in sorted(_steps(run), reverse=True):
        fault = _fault(folder)
        if fault is None:
            return folder, faults
        faults.append(f"{folder} is not whole and is passed over: {fault}")
    return None, faults


def branch(run: Path, step: int, folder: Path) -> bool:
    """Give a new run another one's checkpoint of a step, and its metrics until then.

    False where that one has no whole checkpoint of the step.
    """
    found, there = checkpoint_folder(run, step), checkpoint_folder(folder, step)
    if _fault(found) is not None:
        return False
    lines = read_marked(run / METRICS, read_state(found).metrics)
    # What is left of an attempt that was killed.
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(found, there)
    (folder / METRICS).write_bytes(lines)
    return True


def drop_checkpoints(run: Path, *, keep_step: int | None = None) -> None:
    """Give the disk back that a finished run's checkpoints take, but for that of one step."""
    kept = None if keep_step is None else checkpoint_folder(run, keep_step)
    for folder in _steps(run):
        if folder != kept:
            shutil.rmtree(folder)
    (run / FOLDER / POINTER).unlink(missing_ok=True)


def read_state(folder: Path) -> TrainState:
    """Read the state of a checkpoint."""
    values = json.loads((folder / STATE).read_text())
    return TrainState(**{**values, "metrics": MetricsMark(**values["metrics"])})


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: DistContext) -> None:
    """Fill the tensors from a checkpoint, in place; one that lacks any is refused."""
    try:
        with _quiet_when_alone():
            reader = HuggingFaceStorageReader(str(folder))
            load(dict(tensors), storage_reader=reader, no_dist=ranks.size == 1)
    except CheckpointException as error:
        raise UsageError(
            f"{folder} is the checkpoint of another model, or cannot be read: {_first_cause(error)}"
        ) from error


def _steps(run: Path) -> list[Path]:
    return [folder for folder in (run / FOLDER).glob("step-*") if folder.is_dir()]


def _fault(folder: Path) -> str | None:
    """Say why a folder is no whole checkpoint, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if STATE not in manifest or not any(name.endswith(".safetensors") for name in manifest):
            return f"{MANIFEST} names no {STATE} or no tensors"
        for name, expected in manifest.items():
            if _hash(folder / name) != expected["sha256"]:
                return f"{name} does not have the checksum that it was written with"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} or what it names cannot be read: {error}"
    return None


def _write_manifest(folder: Path) -> None:
    manifest = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        manifest[path.name] = {"bytes": path.stat().st_size, "sha256": _hash(path)}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2))
    sync_folder(folder)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def training_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Collect the weights that learn and the optimizer's state by name, sharded as they are."""
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors
