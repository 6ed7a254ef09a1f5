"""Open a run's folder to train in it, and load the model and tokenizer that came of it."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ssmax._files import locked, make_folder, whole_file, write_whole
from ssmax.errors import UsageError
from ssmax_lab.data.tokenizer import FILE as TOKENIZER
from ssmax_lab.data.tokenizer import Tokenizer, load_tokenizer
from ssmax_lab.model import LM, LMConfig, load_lm
from ssmax_lab.records import METRICS, RUN_CONFIG, Provenance
from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.run_config import MODEL, read_run_config

if TYPE_CHECKING:
    from ssmax_lab.train.dist import DistContext


@contextmanager
def open_run(
    folder: Path,
    config: TrainConfig,
    *,
    tokenizer_from: Path,
    ranks: "DistContext",
    resume: bool,
) -> Iterator[Callable[[], None]]:
    """Hold the folder, one rank for all of them; one that holds another run is refused.

    Yields what writes config.json, to be called once there is nothing left that could be refused.
    """
    from ssmax_lab.train import checkpoint

    with ExitStack() as held:

        def claim() -> None:
            make_folder(folder)
            held.enter_context(locked(folder))
            if (folder / RUN_CONFIG).exists() and not resume:
                raise UsageError(
                    f"{folder} holds a run already; continue it with --resume, or give another name"
                )
            metrics = folder / METRICS
            has_steps = metrics.is_file() and metrics.stat().st_size > 0
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
            _write_config(folder, config, ranks)

        ranks.on_rank0(claim)
        yield lambda: ranks.on_rank0(write)


def _write_config(folder: Path, config: TrainConfig, ranks: "DistContext") -> None:
    """Write it with the provenance of the first start; later ones are among the events."""
    provenance: dict[str, Any] = dataclasses.asdict(
        Provenance.here(config=config.to_dict(), device=str(ranks.device), seed=config.run.seed)
    )
    if (folder / RUN_CONFIG).exists():
        provenance = json.loads((folder / RUN_CONFIG).read_text()).get("provenance", provenance)
    values = {**config.to_dict(), "provenance": provenance}
    write_whole(folder / RUN_CONFIG, json.dumps(values, indent=2) + "\n")


def load_run_model(folder: Path, *, device: torch.device | str = "cpu") -> LM:
    """Load what a run was finished with, or else the model of its newest checkpoint."""
    config = read_run_config(folder)
    if (folder / MODEL).is_dir():
        return load_lm(folder / MODEL, device=device)
    # Only here: torch.distributed's checkpoints take a second to import.
    from ssmax_lab.train import checkpoint
    from ssmax_lab.train.dist import single_process

    found, faults = checkpoint.newest_checkpoint(folder)
    if found is None:
        raise UsageError("; ".join([f"{folder} holds no model and no whole checkpoint", *faults]))
    rule = checkpoint.read_state(found).rule
    model = LM(LMConfig.from_dict({**config.model.to_dict(), "rule": rule}))
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    checkpoint.load_tensors(found, tensors, single_process(torch.device("cpu")))
    return model.to(device)


def load_run_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer whose tokens a run learned."""
    if (folder / TOKENIZER).is_file():
        return load_tokenizer(str(folder / TOKENIZER))
    return load_tokenizer(read_run_config(folder).data.tokenizer)
