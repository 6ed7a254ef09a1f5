"""Does a converted model do what it should? Every layer reached, n right, padding not counted."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.hf.conversion import Conversion, converted_modules, window_of
from ssmax.hf.hook import watched

TOKENS, PADDING = 12, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was looked at."""

    layers: int
    """Attention layers that scale their queries."""
    tokens: int
    padded: bool
    """A left-padded row was looked at too."""


@torch.no_grad()
def verify(model: nn.Module) -> Verified:
    """Run a few tokens through the model and compare n with the keys that are visible.

    Raises a ValueError that names the layers that were not reached or count wrongly.
    """
    record = Conversion.of(model)
    if record is None:
        raise ValueError(f"this {type(model).__name__} is not converted; call ssmax.hf.convert")
    names = {module: name for name, module in converted_modules(model)}
    if set(names.values()) != set(record.layers):
        gone = sorted(set(record.layers) ^ set(names.values()))
        raise ValueError(f"what was converted is not what carries an ssmax: {', '.join(gone[:3])}")
    was_training = model.training
    model.eval()
    try:
        plain = _counted(model, names, padding=0)
        padded = _counted(model, names, padding=PADDING) if _takes_mask(model) else None
    finally:
        model.train(was_training)
    missed = sorted(name for module, name in names.items() if module not in plain)
    if missed:
        raise ValueError(
            f"{len(missed)} of {len(names)} converted layers were not reached, such as "
            f"{missed[0]!r}: their attention does not go through Transformers' interface"
        )
    for found, padding in ((plain, 0), (padded or {}, PADDING)):
        for module, counts in found.items():
            wanted = _wanted(module, counts, padding)
            if not torch.equal(counts, wanted):
                raise ValueError(
                    f"{names[module]!r} counts n = {counts.tolist()} where "
                    f"{wanted.tolist()} keys are visible"
                    + (f" behind {padding} of padding" if padding else "")
                )
    return Verified(layers=len(names), tokens=TOKENS, padded=padded is not None)


def _counted(
    model: nn.Module, names: dict[nn.Module, str], *, padding: int
) -> dict[nn.Module, Tensor]:
    """The n of a row of tokens, the first ones padding, by layer."""
    found: dict[nn.Module, Tensor] = {}

    def watch(module: nn.Module, num_keys: Tensor, query: Tensor) -> None:
        if module in names:
            flat = num_keys.reshape(-1, num_keys.shape[-1])
            found.setdefault(module, flat[-1].cpu())

    with watched(watch):
        model(**_inputs(model, padding))
    return found


def _inputs(model: nn.Module, padding: int) -> dict[str, Any]:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    device = next(model.parameters()).device
    tokens = torch.arange(TOKENS, device=device).remainder(max(2, text.vocab_size - 1)).view(1, -1)
    inputs: dict[str, Any] = {"input_ids": tokens + 1 if text.vocab_size > TOKENS + 1 else tokens}
    if padding:
        mask = torch.ones_like(tokens)
        mask[:, :padding] = 0
        inputs["attention_mask"] = mask
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
        if padding:
            inputs["decoder_attention_mask"] = inputs["attention_mask"]
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return inputs


def _takes_mask(model: nn.Module) -> bool:
    return "attention_mask" in inspect.signature(model.forward).parameters


def _wanted(module: nn.Module, counts: Tensor, padding: int) -> Tensor:
    """What a query sees: itself and what stands before it, or everything, but for padding."""
    place = torch.arange(counts.shape[0])
    real = counts.shape[0] - padding
    if getattr(module, "is_causal", False):
        wanted = (place + 1 - padding).clamp_min(1)
        window = window_of(module)
        return wanted if window is None else wanted.clamp_max(window)
    return torch.full_like(counts, real)
