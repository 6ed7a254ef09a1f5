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
    converted_modules,
    count_alike,
    first_three,
    must_be_converted,
    unwrapped,
)
from ssmax.hf.extension import Extension
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.sources import CONFIG, WEIGHTS, whole_files
from ssmax.hf.written_config import KEY

_FAMILY, _DEPTH, _WIDTH = "model_type", "attention_layers", "hidden_size"
"""What an adapter knows of its model; the last two may be unknown."""
_EXTENSION = "extension"
"""How the model was extended; None where it was not."""


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
    extension = Extension.of(model)
    values = dataclasses.asdict(record) | _about(model, record)
    values[_EXTENSION] = None if extension is None else dataclasses.asdict(extension)
    # Every rank of a sharded model is here and writes the same: none into another's file.
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as own:
        save_file(ssmax_tensors(model), Path(own) / WEIGHTS)
        (Path(own) / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
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
        values, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    about: dict[str, Any] = {}
    if isinstance(values, dict):
        about = {key: values.pop(key, None) for key in (_FAMILY, _DEPTH, _WIDTH, _EXTENSION)}
    record = Conversion.from_dict(values, where=str(folder / CONFIG))
    _check_same_model(folder, about, f"this {type(model).__name__}", _about(model, record))
    extension = Extension.from_dict(about.get(_EXTENSION), where=str(folder / CONFIG))
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
    with whole_files(folder):
        about = json.loads((folder / CONFIG).read_text())
    if isinstance(about, dict):
        _check_same_model(folder, about, source, config)


def _about(model: Any, record: Conversion) -> dict[str, Any]:
    """Describe a model, beyond the names of its layers and their heads."""
    return {
        _FAMILY: model.config.model_type,
        _DEPTH: count_alike(model, record.layers),
        _WIDTH: getattr(model.config, _WIDTH, None),
    }


def _check_same_model(
    folder: Path, about: Mapping[str, Any], base: str, here: Mapping[str, Any]
) -> None:
    """Raise on a base that differs `here` from what an adapter says `about` its own."""
    if about.get(_FAMILY) != here.get(_FAMILY):
        raise UsageError(
            f"{folder} is an adapter for {about.get(_FAMILY)}, {base} is of the family "
            f"{here.get(_FAMILY)}; the adapter is for another model"
        )
    for key in (_DEPTH, _WIDTH):
        # Earlier adapters do not say it, nor does every config.
        if None not in (about.get(key), here.get(key)) and about[key] != here[key]:
            raise UsageError(
                f"{folder} is an adapter for a model of {key} = {about[key]}, {base} has "
                f"{key} = {here[key]}; the adapter is for another model: give the one that it was "
                "made from"
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
    return require(
        "accelerate", install="ssmax[hf]", purpose="offloading"
    ).utils.align_module_device(scale)


def check_tensors_finite(what: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise on NaN or infinity in s and b, naming every one."""
    names = sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all())
    if names:
        raise UsageError(
            f"{what} has NaN or infinity in {first_three(names)}; the training that made it has "
            "diverged, go back to an earlier checkpoint"
        )


def attach_filled(
    model: nn.Module, record: Conversion, tensors: dict[str, Tensor], *, what: str
) -> nn.Module:
    """Convert as recorded, with these values; leave the model as it was where they do not fit."""
    attach(model, record)
    try:
        _fill(model, tensors, what)
    except ValueError:
        Conversion.take_away(model)
        raise
    return model


@torch.no_grad()
def _fill(model: nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    wanted = ssmax_tensors(model)
    shapes = [
        (name, tensors[name].shape, wanted[name].shape)
        for name in set(wanted) & set(tensors)
        if tensors[name].shape != wanted[name].shape
    ]
    check_tensors_fit(what, set(wanted) - set(tensors), set(tensors) - set(wanted), shapes)
    check_tensors_finite(what, tensors)
    for name, module in converted_modules(model):
        scale: Any = getattr(module, ATTRIBUTE)
        for key, value in scale.state_dict().items():
            value.copy_(tensors[f"{name}.{ATTRIBUTE}.{key}"])
