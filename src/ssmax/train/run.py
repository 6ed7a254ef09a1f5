"""A run's folder: its configuration, and the model and tokenizer that come of it."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from ssmax._files import locked, make_folder, whole_file, write_whole
from ssmax.data.tokenizer import FILE as TOKENIZER
from ssmax.data.tokenizer import Tokenizer, load_tokenizer
from ssmax.errors import UsageError
from ssmax.lm import LM, LMConfig, load_lm, save_lm
from ssmax.records import JOURNAL, RUN_CONFIG, Provenance
from ssmax.train import checkpoint
from ssmax.train.config import MAY_CHANGE, TrainConfig
from ssmax.train.parallel import whole
from ssmax.train.watch import Watch, peak_flops
from ssmax.train.world import World, alone

MODEL = "model"
Kind = TypeVar("Kind", bound=TrainConfig)


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
    world: World,
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
            if (folder / RUN_CONFIG).exists() and not resume:
                raise UsageError(
                    f"{folder} holds a run already; go on with --resume, or give another name"
                )
            journal = folder / JOURNAL
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

        world.first_does(claim)
        peak = peak_flops(world.device)
        has_curves = config.run.tensorboard and world.is_first
        watch = Watch(
            is_shown=world.is_first and not quiet,
            flops_per_token=flops_per_token or 0.0,
            peak_flops=peak * world.size if peak and flops_per_token else None,
            tensorboard=folder / "tensorboard" if has_curves else None,
        )
        held.callback(watch.close)
        yield OpenRun(watch=watch, started=lambda: world.first_does(write))


def _write_config(folder: Path, config: TrainConfig, world: World) -> None:
    """With the provenance of the first start; later ones are among the events."""
    provenance: dict[str, Any] = dataclasses.asdict(
        Provenance.here(config=config.to_dict(), device=str(world.device), seed=config.run.seed)
    )
    if (folder / RUN_CONFIG).exists():
        provenance = json.loads((folder / RUN_CONFIG).read_text()).get("provenance", provenance)
    values = {**config.to_dict(), "provenance": provenance}
    write_whole(folder / RUN_CONFIG, json.dumps(values, indent=2) + "\n")


def read_run_config(folder: Path, kind: type[Kind] = TrainConfig) -> Kind:
    """The configuration that a run was started with."""
    path = folder / RUN_CONFIG
    if not path.is_file():
        raise UsageError(f"{folder} is no run: it holds no {RUN_CONFIG}; ssmax pretrain makes one")
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict) or not values:
            raise UsageError("it describes none")
        if "model_type" in values:
            raise UsageError("it is Transformers'; evaluate --hf, finetune --hf and serve take it")
        if "format" in values:
            raise UsageError("it is a model's; give the folder of the run that holds it")
        values.pop("provenance", None)
        return kind.from_dict(values)
    except (json.JSONDecodeError, AttributeError, ValueError) as error:
        raise UsageError(f"{path} is not the configuration of a run: {error}") from None


def resumed_config(
    folder: Path, changes: Mapping[str, Any], kind: type[Kind] = TrainConfig
) -> Kind:
    """A run's configuration with what may change when it goes on."""
    if not (folder / RUN_CONFIG).is_file():
        raise UsageError(
            f"{folder} is no run: it holds no {RUN_CONFIG}, so that there is nothing to go on "
            "with; leave --resume out to begin one"
        )
    config = read_run_config(folder, kind)
    changed = config.replaced(changes)
    for key in changes:
        room, name = key.split(".", 1)
        is_other = getattr(getattr(config, room), name) != getattr(getattr(changed, room), name)
        if is_other and key not in MAY_CHANGE:
            raise UsageError(
                f"{key} cannot change in a run that goes on; what can: {', '.join(MAY_CHANGE)}"
            )
    if changed.run.steps != config.run.steps and config.is_bound_to_steps:
        raise UsageError(
            "run.steps cannot change in a run whose schedule or switch is a share of them"
        )
    return changed


def write_model(model: LM, folder: Path, world: World) -> None:
    """Gather the weights and write them as `folder/model`, all or nothing; every rank has to come.

    The tokenizer goes with them.
    """
    weights = {name: whole(tensor).cpu() for name, tensor in model.state_dict().items()}
    if not world.is_first:
        return
    with torch.device("meta"):
        plain = LM(model.config)
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


def named_folder(runs: Path, name: str) -> Path:
    """Return the folder of the run called `name`; a name that is not one folder name is refused."""
    if not name or name in (".", "..") or any(letter in name for letter in "/\\\0"):
        raise UsageError(
            f"the name of a run must be that of one folder, without separators, got {name!r}; "
            "the folder that holds the runs is chosen by --runs"
        )
    return runs / name


def with_name(folder: Path) -> Path:
    """By a path that ends in the folder's name, also where it is "." or ".."; a link keeps its."""
    return folder.resolve() if folder.name in ("", "..") else folder


def text_of_run(config: TrainConfig) -> Path:
    """The prepared tokens that a run was trained on; a fine-tuned one's are its base's."""
    if config.data.base:
        return text_of_run(read_run_config(Path(config.data.base)))
    return Path(config.data.folder)


def load_run_model(folder: Path, *, device: torch.device | str = "cpu") -> LM:
    """The model of a run: what it was finished with, or else that of its newest checkpoint."""
    config = read_run_config(folder)
    if (folder / MODEL).is_dir():
        return load_lm(folder / MODEL, device=device)
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
    """The tokenizer whose tokens a run learnt."""
    if (folder / TOKENIZER).is_file():
        return load_tokenizer(str(folder / TOKENIZER))
    return load_tokenizer(read_run_config(folder).data.tokenizer)
