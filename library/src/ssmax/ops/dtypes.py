"""The dtypes that things are computed in."""

import torch
from torch import Tensor

from ssmax.errors import UsageError


def check_tensor(name: str, value: object, *, is_floating: bool = False) -> None:
    """Raise on what is no tensor, or not a floating one."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise UsageError(f"{name} must be a tensor, got {kind}; write torch.tensor(...)")
    if is_floating and not value.is_floating_point():
        raise UsageError(f"{name} must be floating point, got {value.dtype}; write {name}.float()")


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Find what logits, factors and weights are computed in."""
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """Find what autocast makes of a product of this dtype here; None where it is off."""
    # Asking whether a device knows autocast breaks the graph in torch 2.11; meta does not.
    if dtype == torch.float64 or device.type == "meta":
        return None
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None
