"""Checkpoints that carry an s by another name: adopted, or an error with the reason."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.hf.adapter import attach_filled, check_tensors_finite
from ssmax.hf.conversion import Conversion, attention_modules, check_unconverted
from ssmax.hf.full_checkpoint import from_pretrained
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.sources import converted_already, read_by_transformers, whole_files
from ssmax.hf.written_config import KEY

NAMES = {"ssmax_scale": "OLMo-core", "softmax_scaler": "Dragon", "ssmax_s": "Step-5"}
"""The last part of the tensor's name, beside the attention's own weights, and whose it is."""
_UNCLEAR = "ssmax_s"
"""No public code applies it, so neither its log nor its n is known."""
# Of from_pretrained's options, those that say which files are read.
_WHICH_FILES = ("cache_dir", "local_files_only", "revision", "subfolder", "token")


def load_source(source: str | Path, *, may_be_converted: bool = False) -> Any:
    """Load a model by the class that was saved, with the s that it has, by whatever name."""
    transformers = require("transformers", install="ssmax[hf]", purpose="loading a model")
    with read_by_transformers(source):
        values, _ = transformers.PretrainedConfig.get_config_dict(source)
        if KEY in values and may_be_converted:
            return from_pretrained(source, dtype="auto")
        if KEY in values:
            raise converted_already(source)
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    names = config.architectures or [""]
    kind = getattr(transformers, names[0], None) or transformers.AutoModelForCausalLM
    return load_with_s(kind, source, dtype="auto")


def load_with_s(kind: Any, source: str | Path, **options: Any) -> Any:
    """Load by `kind.from_pretrained`, and adopt an s that it finds no place for, or raise."""
    # Not left open: Transformers would ask on the terminal, and wait.
    options = {"trust_remote_code": False, **options}
    with read_by_transformers(source), whole_files(source):
        model, about = kind.from_pretrained(source, output_loading_info=True, **options)
    left_over = sorted(about["unexpected_keys"])
    # A rule that learns nothing leaves no tensors, but a config that names it.
    if hasattr(model.config, KEY) or any(f".{ATTRIBUTE}." in name for name in left_over):
        raise converted_already(source)
    sounds = ("ssmax", "softmax_scale")
    like_s = [name for name in left_over if any(word in name.lower() for word in sounds)]
    for name in like_s:
        if _suffix(name) not in NAMES:
            raise UsageError(
                f"{source} holds {name}, which sounds like an s but is none that is known "
                f"({', '.join(NAMES)}); it would be lost"
            )
    if like_s:
        where = {name: options[name] for name in _WHICH_FILES if name in options}
        utilities = require("transformers.utils", install="ssmax[hf]", purpose="reading files")
        adopt(model, Path(utilities.cached_file(source, "config.json", **where)).parent)
    return model


def adopt(model: nn.Module, folder: str | Path) -> nn.Module:
    """Convert a model, in place, by the s that its checkpoint carries under another name.

    `folder` holds the checkpoint's safetensors. Transformers loads such a model as plain softmax
    and reports the tensors as unexpected; this gives them their place.
    """
    check_unconverted(model)
    known = dict(attention_modules(model, layers="all", attention="all"))
    with whole_files(folder):
        found = find(Path(folder))
    if not found:
        raise UsageError(f"{folder} carries no s by any name that is known: {', '.join(NAMES)}")
    renamed: dict[str, Tensor] = {}
    for name, tensor in found.items():
        owner, _, suffix = name.rpartition(".")
        if suffix == _UNCLEAR:
            raise UsageError(
                f"{folder} holds {NAMES[suffix]}'s {name}: no public code applies it, so neither "
                "its log nor its n is known"
            )
        layers = [layer for layer in known if layer == owner or layer.endswith(f".{owner}")]
        if len(layers) != 1:
            raise UsageError(
                f"{folder} holds {name}, but the model has no attention layer {owner!r}"
            )
        own = f"{layers[0]}.{ATTRIBUTE}.s"
        if own in renamed:
            raise UsageError(
                f"{folder} holds two s for one layer, {name} is one of them; remove the one that "
                "the model was not trained with"
            )
        renamed[own] = tensor.flatten().float()
    # By the names that the checkpoint has for them.
    check_tensors_finite(folder, found)
    layers = tuple(name for name in known if f"{name}.{ATTRIBUTE}.s" in renamed)
    record = Conversion(rule="ssmax", init="paper", train_length=None, layers=layers)
    return attach_filled(model, record, renamed, what=str(folder))


def find(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whose names are known for an s."""
    require("safetensors", install="ssmax[hf]", purpose="reading checkpoints")
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no .safetensors")
    found = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                if _suffix(key) in NAMES:
                    found[key] = file.get_tensor(key)
    return found


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
