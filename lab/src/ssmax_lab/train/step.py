"""A step: samples in batches, their loss and its gradient, the optimizer and its learning rate."""

# B rows, T tokens of a row, C channels

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ssmax.distributed import SequenceShard
from ssmax_lab.data.stream import IGNORE
from ssmax_lab.model import LM
from ssmax_lab.model.loss import linear_cross_entropy
from ssmax_lab.model.model import is_of_the_rule
from ssmax_lab.train.config import OptimConfig, RunConfig, ScheduleConfig, TrainConfig
from ssmax_lab.train.dist import DistContext, no_sync, parallelize, reshard


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of inputs and targets; with cu_seqlens one row of packed examples."""

    inputs_BT: Tensor
    targets_BT: Tensor
    cu_seqlens: Tensor | None = None
    places_BT: Tensor | None = None
    """Of the inputs that predict the targets; None: every input has one."""
    weight: float = 1.0
    """Of every target in the mean loss of a step."""

    def share(self, tokens: Tensor | None) -> "Batch":
        """Choose some of the tokens of every row; None: all."""
        if tokens is None:
            return self
        assert self.cu_seqlens is None, "packed rows are not split"
        return self._map(lambda tensor: tensor[:, tokens])

    def pinned(self) -> "Batch":
        """Copy to memory that a device can read by itself."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device; from pinned memory without waiting."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        values = {name: getattr(self, name) for name in self.__slots__}
        return replace(
            self, **{name: function(v) for name, v in values.items() if isinstance(v, Tensor)}
        )


class Samples(Protocol):
    """A stream whose order depends on its seed and the sample's number alone."""

    @property
    def fingerprint(self) -> str:
        """Identify the samples and their order."""
        ...

    def batches(self, first: int, count: int) -> Sequence[Batch]:
        """Give so many samples from the first on, those of one length in a batch.

        Packed ones are a single row, end to end.
        """
        ...


def micro_batches(samples: Samples, *, first: int, count: int, size: int) -> Iterator[Batch]:
    """Yield samples in passes of at most `size`, each made when it is asked for."""
    for start in range(first, first + count, size):
        yield from samples.batches(start, min(size, first + count - start))


class Loss(nn.Module):
    """The sum of the losses of a micro-batch; what is wrapped, so that one call is one pass.

    With a shard its rows are this rank's tokens of longer ones.
    """

    def __init__(self, model: LM, shard: SequenceShard | None = None) -> None:
        super().__init__()
        self.model = model
        self.shard = shard

    def forward(
        self,
        inputs_BT: Tensor,
        targets_BT: Tensor,
        cu_seqlens: Tensor | None = None,
        places_BT: Tensor | None = None,
    ) -> Tensor:
        """Sum over all targets that count; cu_seqlens bounds what attends to each other."""
        if cu_seqlens is None:
            hidden_BTC = self.model.hidden(inputs_BT, shard=self.shard)
            if places_BT is not None:
                hidden_BTC = hidden_BTC.take_along_dim(places_BT.unsqueeze(-1), dim=1)
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


def parallel_loss(model: LM, config: RunConfig, ranks: DistContext) -> nn.Module:
    """Make the model's summed loss a module of batches, on its device and ranks."""
    if config.precision == "bfloat16" and config.residual == "bfloat16":
        model.residual_dtype = torch.bfloat16
    if config.compile:
        model.norm.compile()
    loss = Loss(model, ranks.shard(model.config.train_length))
    return parallelize(loss, model.blocks, config, ranks)


def make_optimizer(model: LM, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """Make fused AdamW; a group's `lr_share` is its learning rate, times that of the run.

    What has two dimensions or more decays; s, b and p_n do not, at a rate of their own. The state,
    which AdamW makes at its first step, is there at once, to be loaded into.
    """
    named = list(model.named_parameters())
    decayed = [one for _, one in named if one.dim() >= 2]
    free = [one for name, one in named if one.dim() < 2 and not is_of_the_rule(name)]
    scales = [one for name, one in named if one.dim() < 2 and is_of_the_rule(name)]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": free, "weight_decay": 0.0},
            {"params": scales, "weight_decay": 0.0, "lr_share": config.scale_lr},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in ("cuda", "cpu"),
    )
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def learning_rate(step: int, config: ScheduleConfig, *, peak: float, steps: int) -> float:
    """Compute the rate of a step, counted from 0, in a run of so many."""
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return peak
    if config.kind == "cosine":
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    else:
        share = min(1.0, (steps - step) / max(1, config.decay_steps))
    return peak * (config.final + (1.0 - config.final) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_share", 1.0)


def accumulate_gradients(
    loss: nn.Module, batches: list[Batch], ranks: DistContext, precision: str
) -> Tensor:
    """Add up the gradients of the mean loss of a step; return that loss, over all ranks."""
    batches = [batch.to(ranks.device) for batch in batches]
    counted = sum(batch.weight * (batch.targets_BT != IGNORE).sum() for batch in batches)
    assert isinstance(counted, Tensor)
    total = ranks.sum(counted).clamp_min(1)
    summed = torch.zeros((), device=ranks.device)
    for index, batch in enumerate(batches):
        with no_sync(loss, until_last=index < len(batches) - 1):
            with _precision(precision, ranks):
                part = loss(batch.inputs_BT, batch.targets_BT, batch.cu_seqlens, batch.places_BT)
                part = part * batch.weight
            # Ranks average their gradients; the loss is a mean over the tokens of all of them.
            (part * (ranks.size / total)).backward()
        summed += part.detach()
    return ranks.sum(summed) / total


@torch.no_grad()
def validation_loss(
    loss: nn.Module, samples: Samples, config: TrainConfig, ranks: DistContext
) -> float:
    """Average over the validation windows, in their fixed order; ranks share the work."""
    windows = config.data.validation_windows
    per_rank = math.ceil(windows / ranks.data_size)
    tokens = ranks.tokens(config.model.train_length)
    sums = torch.zeros(2, device=ranks.device, dtype=torch.float64)
    window = ranks.data_rank * per_rank
    loss.eval()
    for batch in micro_batches(samples, first=window, count=per_rank, size=config.run.micro_batch):
        # Ranks make equally many passes, the last ones perhaps over windows that do not count.
        targets_of_windows = batch.targets_BT.view(-1, config.model.train_length)
        targets_of_windows[max(0, windows - window) :] = IGNORE
        window += targets_of_windows.shape[0]
        batch = batch.share(tokens).to(ranks.device)
        with _precision(config.run.precision, ranks):
            part = loss(batch.inputs_BT, batch.targets_BT, batch.cu_seqlens)
        sums += torch.stack((part.double(), (batch.targets_BT != IGNORE).sum().double()))
    loss.train()
    reshard(loss)
    total, count = ranks.sum(sums).tolist()
    return total / max(count, 1.0)


def _precision(precision: str, ranks: DistContext):
    if precision == "float32":
        return nullcontext()
    return torch.autocast(ranks.device.type, dtype=torch.bfloat16)
