"""Training a converted model: parameter groups, freezing, and `anneal`."""

import dataclasses
from typing import Any

import torch
from torch import nn

from ssmax.errors import UsageError
from ssmax.hf.conversion import must_be_converted, unwrapped
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.layers import converted_modules
from ssmax.ops.length import initial_s


def param_groups(
    model: nn.Module, lr: float, ssmax_lr: float | None = None, *, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Make groups for an optimizer: s and b with a learning rate of their own and no decay.

    Adam moves a value by about its learning rate a step: at 1e-5 s hardly moves; 1e-3 is a good
    first try.
    """
    can_learn = _has_s(model)
    ours, matrices, others = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            home = ours if f".{ATTRIBUTE}." in name else matrices if parameter.dim() > 1 else others
            home.append(parameter)
    if ssmax_lr is not None and can_learn and not ours:
        _must_be_saved(model)
    groups = [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": others, "lr": lr, "weight_decay": 0.0},
        {"params": ours, "lr": lr if ssmax_lr is None else ssmax_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def freeze_all_but_ssmax(model: nn.Module) -> nn.Module:
    """Let s and b alone learn, in place."""
    if not _has_s(model):
        raise UsageError(
            f"the rule {must_be_converted(model).rule!r} of this model has nothing that could "
            "learn; convert it with rule='ssmax', or let the rest of the model learn"
        )
    _must_be_saved(model)
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == ATTRIBUTE:
            scale: Any = module
            # Of the copies that PEFT keeps, that of the active adapter.
            if hasattr(scale, "original_module"):
                scale = scale.modules_to_save[scale.active_adapters[0]]
            scale.requires_grad_(True)
    return model


def _has_s(model: nn.Module) -> bool:
    """True where s could learn, also by remote code; raise unless the model is converted."""
    has_s = any(f".{ATTRIBUTE}." in name for name, _ in model.named_parameters())
    if not has_s:
        must_be_converted(model)
    return has_s


def _must_be_saved(model: nn.Module) -> None:
    """Raise where PEFT has frozen s and b and leaves them out of its files."""
    adapters = getattr(model, "peft_config", {}).values()
    if any(ATTRIBUTE not in (adapter.modules_to_save or ()) for adapter in adapters):
        raise UsageError(
            "PEFT has wrapped this model and would not save its s and b; pass "
            f"modules_to_save=[{ATTRIBUTE!r}] to its config"
        )


@torch.no_grad()
def anneal(model: nn.Module, progress: float, before: float) -> None:
    """Move s and b from identity (0) towards the paper's start (1), from `before` to `progress`.

    Along the line b falls from 1 to 0 while s rises from 0 to L / log(L!), so that the mean factor
    stays 1. What training changed rides on top. At 1 it is done, and the model says so.
    """
    record = must_be_converted(model)
    if record.init != "anneal":
        raise UsageError(f"this model was converted with init={record.init!r}, not 'anneal'")
    if not 0.0 <= before <= progress <= 1.0:
        raise UsageError(f"progress goes from 0 to 1 and never back, got {before} to {progress}")
    assert record.train_length is not None
    step = progress - before
    for _, module in converted_modules(model):
        scale: Any = getattr(module, ATTRIBUTE)
        scale.s.add_(step * initial_s(record.train_length))
        scale.bias.sub_(step)
    if progress == 1.0:
        dataclasses.replace(record, init="annealed").put(unwrapped(model))
