"""Who else is training: one process, or the ranks that torchrun started."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ssmax._device import device_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistContext:
    """This process among its ranks."""

    rank: int
    size: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
    """By what they are for; none when alone, nor when the world was left."""

    @property
    def cpu_group(self) -> dist.ProcessGroup | None:
        """For what processes agree on without asking their devices."""
        return self.groups.get("cpu_group")

    @property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """For the threads that write checkpoints meanwhile."""
        return self.groups.get("checkpoint_group")

    @property
    def is_first(self) -> bool:
        """True for the one rank that speaks and writes."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """The largest value of any rank."""
        if self.size == 1:
            return value
        values = torch.tensor(value)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return int(values.item())

    def on_rank0(self, function: Callable[[], Any]) -> Any:
        """What a function gives on the first rank; an error there is an error everywhere."""
        result = error = None
        if self.is_first:
            try:
                result = function()
            except (ValueError, OSError) as caught:
                error = caught
        result, error = self.tell((result, error))
        if error is not None:
            raise error
        return result

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.cpu_group)

    def tell(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]


def alone(device: torch.device) -> DistContext:
    """The world of one process."""
    return DistContext(rank=0, size=1, device=device, groups={})


@contextmanager
def joined_world(device: str | None = None) -> Iterator[DistContext]:
    """The world of torchrun's environment, or of this process alone; left when done."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    here = device_of(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if size == 1:
        yield alone(here)
        return
    dist.init_process_group("nccl" if here.type == "cuda" else "gloo")
    groups: dict[str, dist.ProcessGroup] = {}
    try:
        groups |= {name: _gloo_group() for name in ("cpu_group", "checkpoint_group")}
        yield DistContext(rank=rank, size=size, device=here, groups=groups)
    finally:
        # A group's threads end with its last reference, whatever torch was told. Those that live
        # on may want Python's lock while Python ends, which aborts the process.
        groups.clear()
        dist.destroy_process_group()


def _gloo_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
