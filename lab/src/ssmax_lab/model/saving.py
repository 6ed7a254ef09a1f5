"""Save and load a model as model.safetensors and config.json; loading runs no code of a file."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch.overrides import TorchFunctionMode

from ssmax._files import make_folder
from ssmax.errors import MachineError, UsageError
from ssmax_lab.model.config import CONFIG, FORMAT, LMConfig
from ssmax_lab.model.model import LM

WEIGHTS = "model.safetensors"


def save_lm(model: LM, folder: str | Path) -> None:
    """Write weights and configuration; the folder is made."""
    folder = Path(folder)
    make_folder(folder)
    weights = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    # Theta may have been changed on the model.
    config = dataclasses.replace(model.config, theta=model.theta)
    values = {"format": FORMAT, **config.to_dict()}
    # New weights do not meet an old configuration, nor half of them a new one.
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as own:
        try:
            safetensors.torch.save_file(weights, Path(own) / WEIGHTS)
        except SafetensorError as error:
            # A full disk, which safetensors tells as an error of its own.
            raise MachineError(f"{folder / WEIGHTS} was not saved: {error}") from error
        (Path(own) / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        for name in (WEIGHTS, CONFIG):
            (Path(own) / name).replace(folder / name)


def load_lm(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LM:
    """Load the model of a folder; what is missing, extra or of another shape is named."""
    folder = Path(folder)
    config = read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise UsageError(f"{folder} holds no {WEIGHTS}; is the checkpoint whole?")
    try:
        weights = safetensors.torch.load_file(folder / WEIGHTS)
    except Exception as error:
        raise UsageError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    model = lm_of_shapes(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        told = " ".join(str(error).split())
        raise UsageError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {told}") from None
    return model.to(device=device, dtype=dtype)


class _WithoutFirstValues(TorchFunctionMode):
    """Skips torch.nn.init: random values on the meta device import all of torch.compile."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def lm_of_shapes(config: LMConfig) -> LM:
    """Build a model on the meta device, for weights that will be assigned."""
    with torch.device("meta"), _WithoutFirstValues():
        return LM(config)


def read_config(folder: Path) -> LMConfig:
    """Read the configuration of a folder."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if not path.is_file():
        raise UsageError(f"{folder} is no model: it holds no {CONFIG}")
    try:
        values: Any = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise UsageError(f"{path} is not of format {FORMAT}: it is another model's")
    try:
        return LMConfig.from_dict(values)
    except (TypeError, UsageError) as error:
        raise UsageError(f"{path} is no model's configuration: {error}") from error
