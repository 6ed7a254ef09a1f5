"""The dtypes that things are computed in."""

import torch


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
