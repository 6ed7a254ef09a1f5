"""Launching a Triton kernel again without asking what it was compiled for.

Triton's own launcher looks at every argument of every call, which takes longer than small kernels
run. A kernel that was launched with the same numbers, dtypes and alignment before is the same
compiled program: it is kept and called by itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssmax.ops.implementation import traceable

Launch = Callable[..., None]

MOST_KEPT = 1024
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    *,
    num_warps: int = 4,
) -> None:
    """Launch `kernel(*tensors, *numbers)`, on the device of the first tensor."""
    first = tensors[0]
    assert first is not None
    index = first.device.index
    if index is None or torch.cuda.current_device() != index:
        # Triton launches on the current device; the CPU has the interpreter.
        with torch.cuda.device(-1 if index is None else index):
            kernel[grid](*tensors, *numbers, num_warps=num_warps)
        return
    dtypes, addresses = [], 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
        else:
            dtypes.append(None)
    if addresses % 16:
        kernel[grid](*tensors, *numbers, num_warps=num_warps)
        return
    key = (kernel.__name__, index, num_warps, numbers, *dtypes)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*tensors, *numbers)
        return
    if len(_compiled) >= MOST_KEPT:
        _compiled.clear()
    _compiled[key] = kernel[grid](*tensors, *numbers, num_warps=num_warps)


def launch_traced(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    *,
    num_warps: int = 4,
) -> None:
    """Launch it as `launch` does, seen by torch.compile."""
    device = tensors[0].device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        traceable(kernel)[grid](*tensors, *numbers, num_warps=num_warps)
