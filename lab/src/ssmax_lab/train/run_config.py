"""What a run's folder says of the run. Read without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ssmax.errors import UsageError
from ssmax_lab.records import RUN_CONFIG
from ssmax_lab.train.config import MAY_CHANGE, TrainConfig

MODEL = "model"
"""The folder inside a run that its model is in."""
Kind = TypeVar("Kind", bound=TrainConfig)


def read_run_config(folder: Path, kind: type[Kind] = TrainConfig) -> Kind:
    """The configuration that a run was started with."""
    path = folder / RUN_CONFIG
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; ssmax-lab pretrain makes runs")
    if not path.is_file():
        raise UsageError(
            f"{folder} is no run: it holds no {RUN_CONFIG}; ssmax-lab pretrain makes one"
        )
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
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, UsageError) as error:
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
