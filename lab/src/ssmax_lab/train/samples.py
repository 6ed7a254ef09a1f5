"""What a step is fed with: rows of the stream, cut into micro-batches for this rank."""

# B rows, T tokens of a row

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of inputs and targets; with cu_seqlens one row of packed examples."""

    inputs_BT: Tensor
    targets_BT: Tensor
    cu_seqlens: Tensor | None = None

    def pinned(self) -> "Batch":
        """The same in memory that a device can read by itself."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """The same on a device; from pinned memory without waiting."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(
            inputs_BT=function(self.inputs_BT),
            targets_BT=function(self.targets_BT),
            cu_seqlens=None if self.cu_seqlens is None else function(self.cu_seqlens),
        )


class Samples(Protocol):
    """A stream whose order depends on its seed and the sample's number alone."""

    @property
    def fingerprint(self) -> str:
        """Identity of the samples and of their order."""
        ...

    def rows(self, first: int, count: int) -> Batch:
        """So many samples from the first on; packed ones as a single row, one behind another."""
        ...


def micro_batches(samples: Samples, *, first: int, count: int, size: int) -> Iterator[Batch]:
    """Samples in passes of at most `size`, each made when it is asked for."""
    for start in range(first, first + count, size):
        yield samples.rows(start, min(size, first + count - start))
