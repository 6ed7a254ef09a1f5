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
_prepared: dict[tuple[Any, ...], "Prepared"] = {}


class Prepared:
    """A kernel with its grid and its last numbers.

    What is left to give are tensors of the same dtypes, and numbers that the kernel is not
    specialised for.
    """

    __slots__ = ("_device", "_grid", "_kernel", "_numbers", "_run", "_warps")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[float, ...],
        device: torch.device,
        num_warps: int = 4,
    ) -> None:
        self._kernel, self._numbers, self._warps = kernel, numbers, num_warps
        self._grid = (*grid, 1, 1)[:3]
        self._device = device.index
        self._run: Any = None

    def __call__(self, *tensors: Tensor | None, numbers: tuple[float, ...] = ()) -> None:
        """Launch it on the current stream."""
        addresses = 0
        for tensor in tensors:
            if tensor is not None:
                addresses |= tensor.data_ptr()
        is_aligned = not addresses % 16
        if self._run is not None and is_aligned and torch._C._cuda_getDevice() == self._device:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            self._run(*tensors, *numbers, *self._numbers, stream=stream)
            return
        # Triton launches on the current device; the CPU has the interpreter.
        with torch.cuda.device(-1 if self._device is None else self._device):
            launcher = self._kernel[self._grid]
            compiled = launcher(*tensors, *numbers, *self._numbers, num_warps=self._warps)
        if is_aligned and self._device is not None:
            self._run = compiled[self._grid]


def unit_stride(x: Tensor) -> Tensor:
    """Lay channels side by side, as kernels read and write them, if they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    *,
    num_warps: int = 4,
) -> None:
    """Launch `kernel(*tensors, *numbers)`, on the device of the first tensor."""
    device = tensors[0].device
    dtypes = [tensor.dtype for tensor in tensors]
    key = (kernel.__name__, grid, device, num_warps, numbers, *dtypes)
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= MOST_KEPT:
            _prepared.clear()
        prepared = _prepared[key] = Prepared(kernel, grid, numbers, device, num_warps)
    prepared(*tensors)


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
