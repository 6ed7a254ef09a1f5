"""Select the device to work on; its name is checked without torch."""

import os
from typing import TYPE_CHECKING

from ssmax.errors import UsageError

if TYPE_CHECKING:
    import torch


def check_device(device: str | None) -> None:
    """Refuse a name that is no device's."""
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"device must be cpu or cuda, got {device!r}")


def select_device(device: str | None) -> "torch.device":
    """Select cpu or this rank's GPU by name; None: what there is."""
    check_device(device)
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("device is cuda, but torch finds no GPU here; give cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
