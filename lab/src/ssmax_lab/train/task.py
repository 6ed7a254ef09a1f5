"""What the loop trains, and on what: a task makes, optimises and saves a model; samples feed it."""

# B rows, T tokens of a row, C channels

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ssmax._files import whole_folder
from ssmax.distributed import SequenceShard
from ssmax_lab.data.qa import IGNORE
from ssmax_lab.model import LM, LMConfig, save_lm
from ssmax_lab.model.checkpoint import lm_of_shapes
from ssmax_lab.model.loss import linear_cross_entropy
from ssmax_lab.model.model import is_of_the_rule
from ssmax_lab.train.config import OptimConfig, RunConfig, ScheduleConfig
from ssmax_lab.train.dist import DistContext, full_tensor, parallelize
from ssmax_lab.train.run import MODEL


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
        return Batch(
            inputs_BT=function(self.inputs_BT),
            targets_BT=function(self.targets_BT),
            cu_seqlens=None if self.cu_seqlens is None else function(self.cu_seqlens),
            places_BT=None if self.places_BT is None else function(self.places_BT),
            weight=self.weight,
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


class TrainTask(Protocol):
    """Whose model the loop trains."""

    def make(self, config: Any, *, is_resumed: bool) -> nn.Module:
        """Make the model at its first weights; where it is resumed they will be overwritten."""
        ...

    def parallelize(self, model: Any, config: RunConfig, ranks: DistContext) -> nn.Module:
        """Make its summed loss a module of inputs, targets and bounds, on its device and ranks."""
        ...

    def optimizer(self, model: Any, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
        """Make the optimizer of the parameters that learn."""
        ...

    def after_step(self, model: Any, step: int, steps: int) -> None:
        """Do what else is done to the model when so many of its steps are done."""
        ...

    def save(self, model: Any, folder: Path, ranks: DistContext) -> None:
        """Write the finished model into the run's folder; every rank has to call."""
        ...


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


class LMTask:
    """Train the paper's model, from random weights or given ones."""

    def __init__(self, first_weights: LM | None = None) -> None:
        self.first_weights = first_weights

    def make(self, config: LMConfig, *, is_resumed: bool) -> LM:
        """Make the model, with the given weights unless it is resumed."""
        model = LM(config)
        if self.first_weights is not None and not is_resumed:
            model.load_state_dict(self.first_weights.state_dict())
        return model

    def parallelize(self, model: LM, config: RunConfig, ranks: DistContext) -> nn.Module:
        """Wrap the loss, block by block."""
        if config.precision == "bfloat16" and config.residual == "bfloat16":
            model.residual_dtype = torch.bfloat16
        if config.compile:
            model.norm.compile()
        loss = Loss(model, ranks.shard(model.config.train_length))
        return parallelize(loss, model.blocks, config, ranks)

    def optimizer(self, model: LM, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
        """Decay what has two dimensions or more: s, b and p_n stay free, at a rate of their own."""
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        decayed = [one for _, one in named if one.dim() >= 2]
        free = [one for name, one in named if one.dim() < 2 and not is_of_the_rule(name)]
        scales = [one for name, one in named if one.dim() < 2 and is_of_the_rule(name)]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": free, "weight_decay": 0.0},
            {"params": scales, "weight_decay": 0.0, "lr_share": config.scale_lr},
        ]
        return adamw(groups, config, device)

    def after_step(self, model: LM, step: int, steps: int) -> None:
        """Do nothing."""

    def save(self, model: LM, folder: Path, ranks: DistContext) -> None:
        """Gather the weights and write them as `folder/model`, whole or not at all."""
        weights = {name: full_tensor(tensor).cpu() for name, tensor in model.state_dict().items()}
        if ranks.is_first:
            plain = lm_of_shapes(model.config)
            plain.load_state_dict(weights, assign=True)
            with whole_folder(folder / MODEL, replace=True) as writing:
                save_lm(plain, writing)


def adamw(
    groups: list[dict[str, Any]], config: OptimConfig, device: torch.device
) -> torch.optim.AdamW:
    """Make fused AdamW; a group's `lr_share` is its learning rate, times that of the run.

    Its state, which AdamW makes at its first step, is there at once, to be loaded into.
    """
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in ("cuda", "cpu"),
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
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
