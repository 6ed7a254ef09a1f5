"""Run on several ranks: who takes part, and a model copied (DDP) or sharded (FSDP2) over them.

The model itself knows nothing of it.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ssmax._device import select_device
from ssmax.distributed import SequenceShard, zigzag
from ssmax.errors import UsageError
from ssmax_lab.train.config import RunConfig, TrainConfig

VERSIONS_KEPT = 32
"""Of compiled code; what goes beyond is silently not compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistContext:
    """This process among its ranks."""

    rank: int
    size: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
    """By what they are for; none with a single process, nor after the end.

    `cpu`: what processes agree on without asking their devices. `context`: ranks that hold one
    sequence together.
    """
    context_parallel: int = 1
    """Neighbouring ranks that hold one sequence together."""

    @property
    def data_rank(self) -> int:
        """Number this rank among those that read other sequences."""
        return self.rank // self.context_parallel

    @property
    def data_size(self) -> int:
        """Count the ranks that read other sequences."""
        return self.size // self.context_parallel

    def tokens(self, length: int) -> Tensor | None:
        """Choose this rank's tokens of every sequence; None: all of them."""
        if self.context_parallel == 1:
            return None
        return zigzag(length, self.context_parallel, self.rank % self.context_parallel)

    def shard(self, length: int) -> SequenceShard | None:
        """Make the shard of those tokens; all ranks have to call."""
        tokens = self.tokens(length)
        if tokens is None:
            return None
        return SequenceShard(tokens.to(self.device), group=self.groups["context"])

    @property
    def is_first(self) -> bool:
        """Tell whether this is the one rank that logs and writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """Take the largest value of any rank."""
        if self.size == 1:
            return value
        values = torch.tensor(value)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.groups.get("cpu"))
        return int(values.item())

    def on_rank0(self, function: Callable[[], Any]) -> Any:
        """Call a function on the first rank; return its result, or raise its error, on all."""
        result = error = None
        if self.is_first:
            try:
                result = function()
            except (ValueError, OSError) as caught:
                error = caught
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return result

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.groups.get("cpu"))
        return box[0]


def single_process(device: torch.device) -> DistContext:
    """Make the context of one process."""
    return DistContext(rank=0, size=1, device=device, groups={})


@contextmanager
def init_distributed(device: str | None = None) -> Iterator[DistContext]:
    """Join the ranks that torchrun's environment names, or run as a single process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    here = select_device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if size == 1:
        yield single_process(here)
        return
    dist.init_process_group("nccl" if here.type == "cuda" else "gloo")
    groups: dict[str, dist.ProcessGroup] = {}
    try:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        groups["cpu"] = group
        yield DistContext(rank=rank, size=size, device=here, groups=groups)
    finally:
        # A group's threads end with its last reference, whatever torch was told. Those that live
        # on may want Python's lock while Python ends, which aborts the process.
        groups.clear()
        dist.destroy_process_group()


def with_context_parallel(ranks: DistContext, config: TrainConfig) -> DistContext:
    """Group the ranks that hold a sequence together, as run.context_parallel says."""
    number = config.run.context_parallel
    if number == 1:
        return ranks
    data = config.data
    if data.base or data.needle_length:
        raise UsageError(
            "run.context_parallel is for pretraining on windows of text: packed questions and "
            f"needles among the text are not split; leave it at 1, got {number}"
        )
    if ranks.size == 1:
        # A single process holds whole sequences: the same numbers.
        return ranks
    if ranks.size % number:
        raise UsageError(
            f"run.context_parallel must divide the {ranks.size} ranks, got {number}; start a "
            "multiple of it"
        )
    model = config.model
    if model.train_length < 2 * number or model.dropout_p:
        raise UsageError(
            "run.context_parallel needs two tokens of a sequence for each of its ranks and no "
            f"dropout, got {number} ranks, model.train_length={model.train_length} and "
            f"model.dropout_p={model.dropout_p}"
        )
    group, _ = dist.new_subgroups(group_size=number)
    assert isinstance(group, dist.ProcessGroup)
    ranks.groups["context"] = group
    return dataclasses.replace(ranks, context_parallel=number)


def parallelize(
    loss: nn.Module, blocks: Iterable[nn.Module], config: RunConfig, ranks: DistContext
) -> nn.Module:
    """Move the loss of a model with these blocks to its device, compile it, copy or shard it."""
    blocks = list(blocks)
    loss.to(ranks.device)
    if config.compile:
        # Private by its path, but documented; it is read while the graphs are made.
        functorch_config.activation_memory_budget = config.activation_memory_budget
        # Blocks and norms share one piece of code, of which 8 versions would be kept: first and
        # later blocks, windows, validation and a last batch that is smaller make more.
        torch._dynamo.config.recompile_limit = VERSIONS_KEPT
        # A step has rows of two lengths at most: a graph for each is faster than one for all.
        torch._dynamo.config.automatic_dynamic_shapes = False
        # Block by block: one small graph compiled once, whatever the depth and the wrapping.
        for block in blocks:
            block.compile()
    if ranks.size == 1:
        # One rank of a sharded run is that run: nothing to copy or shard, the same numbers.
        return loss
    if config.parallel == "fsdp2":
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(loss, mesh=mesh)
        return loss
    ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    return DistributedDataParallel(loss, device_ids=ids)


@contextmanager
def no_sync(loss: nn.Module, *, until_last: bool) -> Iterator[None]:
    """Keep the gradients of all micro-batches but the last on their rank."""
    if isinstance(loss, FSDPModule):
        loss.set_requires_gradient_sync(not until_last)
        yield
    elif isinstance(loss, DistributedDataParallel) and until_last:
        with loss.no_sync():
            yield
    else:
        yield


def reshard(loss: nn.Module) -> None:
    """Free the outermost weights, which a forward pass without a backward one leaves gathered."""
    if isinstance(loss, FSDPModule):
        loss.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor, whatever it is sharded over; every rank has to call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to a norm, 0: leave them; return their norm before."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = full_tensor(torch.nn.utils.get_total_norm(grads))
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
