"""A run's folder: its configuration, and the model and tokenizer that come of it."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ssmax._files import locked, make_folder, whole_file, write_whole
from ssmax.errors import UsageError
from ssmax_lab.data.tokenizer import FILE as TOKENIZER
from ssmax_lab.data.tokenizer import Tokenizer, load_tokenizer
from ssmax_lab.model import LM, LMConfig, load_lm, save_lm
from ssmax_lab.model.checkpoint import lm_of_shapes
from ssmax_lab.records import METRICS, RUN_CONFIG, Provenance
from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.run_config import MODEL, read_run_config
from ssmax_lab.train.watch import Watch, peak_flops
from ssmax_lab.train.world import DistContext, alone


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """A run's folder while it is trained in."""

    watch: Watch
    started: Callable[[], None]
    """Writes config.json, once there is nothing left that could be refused."""


@contextmanager
def run_folder(
    folder: Path,
    config: TrainConfig,
    *,
    tokenizer_from: Path,
    world: DistContext,
    resume: bool,
    quiet: bool,
    flops_per_token: float | None = None,
) -> Iterator[OpenRun]:
    """The folder, one rank holding it for all of them; one that holds another run is refused.

    `flops_per_token` of a step lets the speed be shown as a share of the device's peak.
    """
    with ExitStack() as held:

        def claim() -> None:
            make_folder(folder)
            held.enter_context(locked(folder))
            from ssmax_lab.train import checkpoint

            if (folder / RUN_CONFIG).exists() and not resume:
                raise UsageError(
                    f"{folder} holds a run already; go on with --resume, or give another name"
                )
            journal = folder / METRICS
            has_steps = journal.is_file() and journal.stat().st_size > 0
            if not resume and (has_steps or checkpoint.has_any(folder)):
                raise UsageError(
                    f"{folder} holds a run without its {RUN_CONFIG}; bring that back, or give "
                    "another name"
                )

        def write() -> None:
            if (tokenizer_from / TOKENIZER).is_file():
                # Its bytes: they are what tokens are known by.
                with whole_file(folder / TOKENIZER) as file:
                    file.write((tokenizer_from / TOKENIZER).read_bytes())
            _write_config(folder, config, world)

        world.on_rank0(claim)
        peak = peak_flops(world.device)
        has_curves = config.run.tensorboard and world.is_first
        watch = Watch(
            is_shown=world.is_first and not quiet,
            flops_per_token=flops_per_token or 0.0,
            peak_flops=peak * world.size if peak and flops_per_token else None,
            tensorboard=folder / "tensorboard" if has_curves else None,
        )
        held.callback(watch.close)
        yield OpenRun(watch=watch, started=lambda: world.on_rank0(write))


def _write_config(folder: Path, config: TrainConfig, world: DistContext) -> None:
    """With the provenance of the first start; later ones are among the events."""
    provenance: dict[str, Any] = dataclasses.asdict(
        Provenance.here(config=config.to_dict(), device=str(world.device), seed=config.run.seed)
    )
    if (folder / RUN_CONFIG).exists():
        provenance = json.loads((folder / RUN_CONFIG).read_text()).get("provenance", provenance)
    values = {**config.to_dict(), "provenance": provenance}
    write_whole(folder / RUN_CONFIG, json.dumps(values, indent=2) + "\n")


def write_model(model: LM, folder: Path, world: DistContext) -> None:
    """Gather the weights and write them as `folder/model`, all or nothing; every rank has to come.

    The tokenizer goes with them.
    """
    from ssmax_lab.train.parallel import whole

    weights = {name: whole(tensor).cpu() for name, tensor in model.state_dict().items()}
    if not world.is_first:
        return
    plain = lm_of_shapes(model.config)
    plain.load_state_dict(weights, assign=True)
    with model_folder(folder) as writing:
        save_lm(plain, writing)


@contextmanager
def model_folder(folder: Path) -> Iterator[Path]:
    """What is written here becomes `folder/model` once it is whole."""
    hidden, final = folder / f".{MODEL}.writing", folder / MODEL
    shutil.rmtree(hidden, ignore_errors=True)
    yield hidden
    shutil.rmtree(final, ignore_errors=True)
    hidden.rename(final)


def load_run_model(folder: Path, *, device: torch.device | str = "cpu") -> LM:
    """The model of a run: what it was finished with, or else that of its newest checkpoint."""
    config = read_run_config(folder)
    if (folder / MODEL).is_dir():
        return load_lm(folder / MODEL, device=device)
    # Only here: torch.distributed's checkpoints take a second to import.
    from ssmax_lab.train import checkpoint

    notes: list[str] = []
    found = checkpoint.newest_checkpoint(folder, notes.append)
    if found is None:
        raise UsageError("; ".join([f"{folder} holds no model and no whole checkpoint", *notes]))
    rule = checkpoint.read_state(found).rule
    model = LM(LMConfig.from_dict({**config.model.to_dict(), "rule": rule}))
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    checkpoint.load_tensors(found, tensors, alone(torch.device("cpu")))
    return model.to(device)


def load_run_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer whose tokens a run learned."""
    if (folder / TOKENIZER).is_file():
        return load_tokenizer(str(folder / TOKENIZER))
    return load_tokenizer(read_run_config(folder).data.tokenizer)
