"""The model over ranks: alone, copied (DDP) or sharded (FSDP2). The model itself knows nothing."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ssmax.errors import UsageError
from ssmax_lab.data.qa import IGNORE
from ssmax_lab.model import LM
from ssmax_lab.model.loss import linear_cross_entropy
from ssmax_lab.train.config import RunConfig
from ssmax_lab.train.world import DistContext

VERSIONS_KEPT = 32
"""Of compiled code; what goes beyond is silently not compiled."""


class Loss(nn.Module):
    """The sum of the losses of a micro-batch; what is wrapped, so that one call is one pass."""

    def __init__(self, model: LM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs_BT: Tensor, targets_BT: Tensor, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """The sum over all targets that count; cu_seqlens bounds what attends to each other."""
        if cu_seqlens is None:
            hidden_BTC = self.model.hidden(inputs_BT)
        else:
            # Every batch packs another number of documents, none longer than a training row. The
            # mark stays on the tensor only where nothing has to be cast.
            cu_seqlens = cu_seqlens.long()
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
            longest = self.model.config.train_length
            hidden_BTC = self.model.hidden(inputs_BT, cu_seqlens=cu_seqlens, max_seqlen=longest)
            # Of packed questions only the answers count: a tenth of the head's work or less.
            counts_BT = targets_BT != IGNORE
            hidden_BTC, targets_BT = hidden_BTC[counts_BT], targets_BT[counts_BT]
        return linear_cross_entropy(hidden_BTC, self.model.head.weight, targets_BT, reduction="sum")


def parallel_kind(config: RunConfig, world: DistContext) -> str:
    """What `auto` means here; a name is a promise."""
    if config.parallel == "auto":
        return "none" if world.size == 1 else "ddp"
    if config.parallel == "none" and world.size > 1:
        raise UsageError(
            f"run.parallel is 'none' but there are {world.size} ranks; set ddp, fsdp2 or auto"
        )
    if config.parallel != "none" and world.size == 1:
        # One rank of a sharded run is that run: nothing to copy or shard, the same numbers.
        return "none"
    return config.parallel


def build(model: LM, config: RunConfig, world: DistContext) -> nn.Module:
    """The loss of the model, on its device, compiled and spread as the run wants it."""
    if config.precision == "bfloat16" and config.residual == "bfloat16":
        model.residual_dtype = torch.bfloat16
    if config.compile:
        model.norm.compile()
    return spread(Loss(model), model.blocks, config, world)


def spread(
    loss: nn.Module, blocks: Iterable[nn.Module], config: RunConfig, world: DistContext
) -> nn.Module:
    """The loss of a model with these blocks, likewise."""
    kind, blocks = parallel_kind(config, world), list(blocks)
    loss.to(world.device)
    if config.compile:
        # Private by its path, but documented; it is read while the graphs are made.
        functorch_config.activation_memory_budget = config.activation_memory_budget
        # Blocks and norms share one piece of code, of which 8 versions would be kept: first and
        # later blocks, windows, validation and a last batch that is smaller make more.
        torch._dynamo.config.recompile_limit = VERSIONS_KEPT
        # Block by block: one small graph compiled once, whatever the depth and the wrapping.
        for block in blocks:
            block.compile()
    if kind == "fsdp2":
        mesh = init_device_mesh(world.device.type, (world.size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(loss, mesh=mesh)
    elif kind == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        loss = DistributedDataParallel(loss, device_ids=ids)
    return loss


@contextmanager
def no_sync(loss: nn.Module, *, until_last: bool) -> Iterator[None]:
    """While accumulating, ranks exchange gradients with the last micro-batch only."""
    if isinstance(loss, FSDPModule):
        loss.set_requires_gradient_sync(not until_last)
        yield
    elif isinstance(loss, DistributedDataParallel) and until_last:
        with loss.no_sync():
            yield
    else:
        yield


def reshard(loss: nn.Module) -> None:
    """After a forward pass without a backward one the outermost weights are still gathered."""
    if isinstance(loss, FSDPModule):
        loss.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor as one, whatever it is sharded over; every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to a norm, 0: leave them; their norm before, over all ranks."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(grads))
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
