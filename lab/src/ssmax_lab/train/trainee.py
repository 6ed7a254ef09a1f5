"""What the loop trains: a model that says how it is made, spread, optimised and written."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ssmax_lab.model import LM, LMConfig
from ssmax_lab.train.config import OptimConfig, RunConfig
from ssmax_lab.train.optimizer import make_optimizer
from ssmax_lab.train.parallel import build
from ssmax_lab.train.run import write_model
from ssmax_lab.train.world import DistContext


class TrainTask(Protocol):
    """Whose model the loop trains."""

    def make(self, config: Any, *, is_resumed: bool) -> nn.Module:
        """The model at its first weights; where it is resumed they will be overwritten."""
        ...

    def spread(self, model: Any, config: RunConfig, world: DistContext) -> nn.Module:
        """Its summed loss as a module of inputs, targets and bounds, on its device and ranks."""
        ...

    def optimizer(self, model: Any, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
        """For the parameters that learn."""
        ...

    def after_step(self, model: Any, step: int, steps: int) -> None:
        """What is done to the model besides, when so many of its steps are done."""
        ...

    def write(self, model: Any, folder: Path, world: DistContext) -> None:
        """The finished model into the run's folder; every rank has to come."""
        ...


class LMTask:
    """The paper's model, from random weights or given ones."""

    def __init__(self, first_weights: LM | None = None) -> None:
        self.first_weights = first_weights

    def make(self, config: LMConfig, *, is_resumed: bool) -> LM:
        """As the protocol says."""
        model = LM(config)
        if self.first_weights is not None and not is_resumed:
            model.load_state_dict(self.first_weights.state_dict())
        return model

    def spread(self, model: LM, config: RunConfig, world: DistContext) -> nn.Module:
        """As the protocol says."""
        return build(model, config, world)

    def optimizer(self, model: LM, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
        """As the protocol says."""
        return make_optimizer(model, config, device)

    def after_step(self, model: LM, step: int, steps: int) -> None:
        """Nothing."""

    def write(self, model: LM, folder: Path, world: DistContext) -> None:
        """As the protocol says."""
        write_model(model, folder, world)
