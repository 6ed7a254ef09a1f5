"""Checkpoints that carry an s by another name: adopted, or an error with the reason."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.hf.adapter import attach_filled, check_model_and_folder, check_tensors_finite
from ssmax.hf.conversion import Conversion, attention_modules, check_unconverted
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.sources import converted_already, read_by_transformers, whole_files
from ssmax.hf.written_config import KEY


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How others call s."""

    suffix: str
    """The last part of the tensor's name, beside the attention's own weights."""
    project: str
    unsupported_reason: str = ""
    """What is unclear about it; "" where it is the paper's s of s log n."""


DIALECTS = (
    Dialect(suffix="ssmax_scale", project="OLMo-core"),
    Dialect(suffix="softmax_scaler", project="Dragon"),
    Dialect(
        suffix="ssmax_s",
        project="Step-5",
        unsupported_reason="no public code applies it, so neither its log nor its n is known",
    ),
)
SUFFIXES = frozenset(dialect.suffix for dialect in DIALECTS)
# Of from_pretrained's options, those that say which files are read.
_WHICH_FILES = ("cache_dir", "local_files_only", "revision", "subfolder", "token")


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
    odd = [name for name in left_over if _sounds_like_s(name) and _suffix(name) not in SUFFIXES]
    if odd:
        raise UsageError(
            f"{source} holds {odd[0]}, which sounds like an s but is none that is known "
            f"({', '.join(sorted(SUFFIXES))}); it would be lost"
        )
    if any(_suffix(name) in SUFFIXES for name in left_over):
        adopt(model, _folder_of(source, options))
    return model


def _sounds_like_s(name: str) -> bool:
    return any(word in name.lower() for word in ("ssmax", "softmax_scale"))


def _folder_of(source: str | Path, options: Mapping[str, Any]) -> Path:
    """Find the folder of the files of a model, also of a copy of those on the Hub."""
    utilities = require("transformers.utils", install="ssmax[hf]", purpose="reading checkpoints")
    where = {name: options[name] for name in _WHICH_FILES if name in options}
    return Path(utilities.cached_file(source, "config.json", **where)).parent


def adopt(model: nn.Module, folder: str | Path) -> nn.Module:
    """Convert a model, in place, by the s that its checkpoint carries under another name.

    `folder` holds the checkpoint's safetensors. Transformers loads such a model as plain softmax
    and reports the tensors as unexpected; this gives them their place.
    """
    check_model_and_folder("adopt", model, folder)
    check_unconverted(model)
    known = dict(attention_modules(model, layers="all", attention="all"))
    renamed: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    with whole_files(folder):
        found = find(Path(folder))
    for name, tensor in found.items():
        owner, _, suffix = name.rpartition(".")
        dialect = next(one for one in DIALECTS if one.suffix == suffix)
        if dialect.unsupported_reason:
            raise UsageError(
                f"{folder} holds {dialect.project}'s {name}: {dialect.unsupported_reason}"
            )
        layers = [layer for layer in known if layer == owner or layer.endswith(f".{owner}")]
        if len(layers) != 1:
            raise UsageError(
                f"{folder} holds {name}, but the model has no attention layer {owner!r}"
            )
        if layers[0] in origins:
            raise UsageError(
                f"{folder} holds {origins[layers[0]]} and {name}, two s for one layer; remove the "
                "one that the model was not trained with"
            )
        origins[layers[0]] = name
        renamed[f"{layers[0]}.{ATTRIBUTE}.s"] = tensor.flatten().float()
    if not renamed:
        names = ", ".join(one.suffix for one in DIALECTS)
        raise UsageError(f"{folder} carries no s by any name that is known: {names}")
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
                if _suffix(key) in SUFFIXES:
                    found[key] = file.get_tensor(key)
    return found


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
