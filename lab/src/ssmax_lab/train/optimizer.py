"""AdamW as the paper has it, and the learning rate over the steps."""

import math
from typing import Any

import torch
from torch import nn

from ssmax_lab.train.config import OptimConfig, ScheduleConfig


def make_optimizer(
    model: nn.Module, config: OptimConfig, device: torch.device
) -> torch.optim.AdamW:
    """Fused AdamW that decays what has two dimensions or more: s, b and p_n stay free."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.dim() >= 2],
            "weight_decay": config.weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.dim() < 2],
            "weight_decay": 0.0,
        },
    ]
    return adamw(groups, config, device)


def adamw(
    groups: list[dict[str, Any]], config: OptimConfig, device: torch.device
) -> torch.optim.AdamW:
    """Of these parameters; a group's `lr_share` is its learning rate, times that of the run."""
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in ("cuda", "cpu"),
    )


def start_state(optimizer: torch.optim.AdamW) -> None:
    """The state that AdamW makes at its first step, made now, to be loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def learning_rate(step: int, config: ScheduleConfig, *, peak: float, steps: int) -> float:
    """The rate of a step, counted from 0, in a run of so many."""
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    return peak * _after_warmup(step, config, steps)


def _after_warmup(step: int, config: ScheduleConfig, steps: int) -> float:
    if config.kind == "constant":
        return 1.0
    if config.kind == "cosine":
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return config.final + (1.0 - config.final) * 0.5 * (
            1.0 + math.cos(math.pi * min(1.0, done))
        )
    left = (steps - step) / max(1, config.decay_steps)
    return config.final + (1.0 - config.final) * min(1.0, left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_share", 1.0)
