"""s and b as a file of a few kilobytes, for any base: quantised, sharded, or from the Hub.

Of a model that was extended, the rotation as well.
"""

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssmax._extras import require
from ssmax._files import make_folder
from ssmax.errors import UsageError
from ssmax.hf.conversion import (
    Conversion,
    attach,
    check_tensors_fit,
    check_unconverted,
    first_three,
    must_be_converted,
    read_fields,
    unwrapped,
)
from ssmax.hf.extension import Extension
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.layers import converted_modules, count_alike
from ssmax.hf.sources import CONFIG, WEIGHTS, whole_files
from ssmax.hf.written_config import KEY


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What an adapter says of itself and of the model that it is for."""

    conversion: dict[str, Any]
    extension: dict[str, Any] | None
    """None where the model was not extended."""
    model_type: str
    attention_layers: int
    hidden_size: int | None
    """None where its config does not say it."""


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a converted model's s and b, and how it was converted, into a folder."""
    record = must_be_converted(model)
    model = unwrapped(model)
    scales = [getattr(module, ATTRIBUTE) for _, module in converted_modules(model)]
    if any(hasattr(scale, "original_module") for scale in scales):
        raise UsageError(
            "PEFT trains a copy of this model's s and b: its own save_pretrained keeps them, or "
            "merge_and_unload gives a model that can be saved here"
        )
    require("safetensors", install="ssmax[hf]", purpose="saving")
    from safetensors.torch import save_file

    folder = Path(folder)
    make_folder(folder)
    about = dataclasses.asdict(_about(model, record))
    # Every rank of a sharded model is here and writes the same: none into another's file.
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as own:
        save_file(ssmax_tensors(model), Path(own) / WEIGHTS)
        (Path(own) / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        for name in (WEIGHTS, CONFIG):
            (Path(own) / name).replace(folder / name)


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Convert an unconverted base as it was stored and give it the stored s and b, in place."""
    check_unconverted(model)
    folder = Path(folder)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise UsageError(f"{folder} holds no adapter: {CONFIG} and {WEIGHTS} belong there")
    require("safetensors", install="ssmax[hf]", purpose="loading")
    from safetensors.torch import load_file

    with whole_files(folder):
        tensors = load_file(folder / WEIGHTS)
    about, where = _read(folder), str(folder / CONFIG)
    record = Conversion.from_dict(about.conversion, where=f"the conversion of {where}")
    here = dataclasses.asdict(_about(model, record))
    _check_same_model(folder, about, f"this {type(model).__name__}", here)
    extension = Extension.from_dict(about.extension, where=f"the extension of {where}")
    if extension is not None and Extension.of(model) is not None:
        raise UsageError(
            f"this model was extended already, and {folder} extends it; give the model as it was"
        )
    attach_filled(model, record, tensors, what=str(folder))
    if extension is not None:
        extension.put(model)
    return model


def check_base(folder: Path, source: str, config: Mapping[str, Any]) -> None:
    """Raise on a model that an adapter cannot be for, by its config.json alone."""
    if KEY in config:
        raise UsageError(
            f"{source} is converted already, so that {folder} cannot go with it; name the model "
            "that the adapter is for"
        )
    _check_same_model(folder, _read(folder), source, config)


def _read(folder: Path) -> About:
    with whole_files(folder):
        return read_fields(About, json.loads((folder / CONFIG).read_text()), str(folder / CONFIG))


def _about(model: Any, record: Conversion) -> About:
    extension = Extension.of(model)
    return About(
        conversion=dataclasses.asdict(record),
        extension=None if extension is None else dataclasses.asdict(extension),
        model_type=model.config.model_type,
        attention_layers=count_alike(model, record.layers),
        hidden_size=getattr(model.config, "hidden_size", None),
    )


def _check_same_model(folder: Path, about: About, base: str, here: Mapping[str, Any]) -> None:
    """Raise on a base that differs `here` from what an adapter says of its own."""
    for key in ("model_type", "attention_layers", "hidden_size"):
        wanted, came = getattr(about, key), here.get(key)
        # Not every config says it.
        if None not in (wanted, came) and wanted != came:
            raise UsageError(
                f"{folder} is an adapter for a model of {key} = {wanted}, {base} has {key} = "
                f"{came}; the adapter is for another model: give the one that it was made from"
            )


def ssmax_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Collect every s and b by its name in the model."""
    found = {}
    for name, module in converted_modules(model):
        scale: Any = getattr(module, ATTRIBUTE)
        with _loaded(scale):
            for key, value in scale.state_dict().items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name}.{ATTRIBUTE}.{key}"] = whole.detach().cpu().clone()
    return found


def _loaded(scale: nn.Module) -> AbstractContextManager[None]:
    """Load the values meanwhile where they are offloaded."""
    if not hasattr(scale, "_hf_hook"):
        return nullcontext()
    accelerate = require("accelerate", install="ssmax[hf]", purpose="offloading")
    return accelerate.utils.align_module_device(scale)


def check_tensors_finite(what: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise on NaN or infinity in s and b."""
    if names := sorted(name for name, x in tensors.items() if not x.isfinite().all()):
        raise UsageError(
            f"{what} has NaN or infinity in {first_three(names)}; the training that made it has "
            "diverged, go back to an earlier checkpoint"
        )


@torch.no_grad()
def attach_filled(
    model: nn.Module, record: Conversion, tensors: dict[str, Tensor], *, what: str
) -> nn.Module:
    """Convert as recorded, with these values; leave the model as it was where they do not fit."""
    attach(model, record)
    wanted = ssmax_tensors(model)
    shapes = [
        (name, tensors[name].shape, wanted[name].shape)
        for name in set(wanted) & set(tensors)
        if tensors[name].shape != wanted[name].shape
    ]
    try:
        check_tensors_fit(what, set(wanted) - set(tensors), set(tensors) - set(wanted), shapes)
        check_tensors_finite(what, tensors)
    except ValueError:
        Conversion.take_away(model)
        raise
    for name, module in converted_modules(model):
        scale: Any = getattr(module, ATTRIBUTE)
        for key, value in scale.state_dict().items():
            value.copy_(tensors[f"{name}.{ATTRIBUTE}.{key}"])
    return model
