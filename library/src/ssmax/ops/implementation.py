"""The choice between a Triton kernel and its reference implementation."""

import importlib.util
import os
from typing import Any, Literal, get_args

import torch

from ssmax.errors import UsageError

Impl = Literal["auto", "reference", "triton"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels, on any device."""
_IS_TRACED = torch.backends.cuda.is_built() and not INTERPRETED
register_op: Any = torch.library.triton_op if _IS_TRACED else torch.library.custom_op
"""As a triton_op a kernel is seen by torch.compile, which launches it directly. The interpreter
cannot be traced through: there the op stays closed, with a fake beside it. So it does where torch
has no CUDA and no kernel will ever run, for a triton_op imports the compiler: 1.6 seconds."""
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def choose_impl(impl: Impl, device: torch.device) -> Impl:
    """Choose what `auto` means here; a named one that cannot run is an error."""
    if impl not in get_args(Impl):
        raise UsageError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    if impl == "auto":
        return "triton" if device.type == "cuda" and _HAS_TRITON else "reference"
    if impl == "triton" and device.type != "cuda" and not INTERPRETED:
        raise UsageError(
            f"impl='triton' needs CUDA tensors, got {device}; pass impl='reference', or set "
            "TRITON_INTERPRET=1 before Python starts to run the kernels in Triton's interpreter"
        )
    return impl


def traceable(kernel: Any) -> Any:
    """Wrap a kernel for torch.compile to trace; in a closed op it is called as it is."""
    return torch.library.wrap_triton(kernel) if _IS_TRACED else kernel
