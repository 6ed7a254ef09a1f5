"""Training a converted model: parameter groups, freezing, and `anneal`."""

import dataclasses
from typing import Any

import torch
from torch import nn

from ssmax.errors import UsageError
from ssmax.hf.conversion import converted_modules, must_be_converted, unwrapped
from ssmax.hf.hook import ATTRIBUTE
from ssmax.ops.length import initial_s


def param_groups(
    model: nn.Module, lr: float, ssmax_lr: float | None = None, *, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Make groups for an optimizer: s and b with a learning rate of their own and no decay.

    Adam moves a value by about its learning rate a step: at 1e-5 s hardly moves; 1e-3 is a good
    first try.
    """
    _must_have_s(model)
    ours, matrices, others = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            home = ours if f".{ATTRIBUTE}." in name else matrices if parameter.dim() > 1 else others
            home.append(parameter)
    # A rule that learns nothing has no use for the rate, and does no harm.
    if ssmax_lr is not None and not ours:
        _must_be_saved(model)
    groups = [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": others, "lr": lr, "weight_decay": 0.0},
        {"params": ours, "lr": lr if ssmax_lr is None else ssmax_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def freeze_all_but_ssmax(model: nn.Module) -> nn.Module:
    """Let s and b alone learn, in place."""
    _must_have_s(model)
    _must_learn(model)
    _must_be_saved(model)
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == ATTRIBUTE:
            _used(module).requires_grad_(True)
    return model


def _must_learn(model: nn.Module) -> None:
    """Raise where the rule has nothing that could."""
    if not any(f".{ATTRIBUTE}." in name for name, _ in model.named_parameters()):
        record = must_be_converted(model)
        raise UsageError(
            f"the rule {record.rule!r} of this model has nothing that could learn; convert it with "
            "rule='ssmax', or let the rest of the model learn"
        )


def _must_be_saved(model: nn.Module) -> None:
    """Raise where PEFT has frozen s and b and leaves them out of its files."""
    adapters = getattr(model, "peft_config", {}).values()
    if any(ATTRIBUTE not in (adapter.modules_to_save or ()) for adapter in adapters):
        raise UsageError(
            "PEFT has wrapped this model and would not save its s and b; pass "
            f"modules_to_save=[{ATTRIBUTE!r}] to its config"
        )


def _used(scale: Any) -> nn.Module:
    """Find an ssmax itself; of the copies that PEFT keeps of it, that of the active adapter."""
    if not hasattr(scale, "original_module"):
        return scale
    return scale.modules_to_save[scale.active_adapters[0]]


def _must_have_s(model: nn.Module) -> None:
    """Raise unless it is converted, by this package or by remote code."""
    if not any(f".{ATTRIBUTE}." in name for name, _ in model.named_parameters()):
        must_be_converted(model)


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
