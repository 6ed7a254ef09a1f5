"""Explicit logits: slow, large, and plain to read."""

# B batch, H query heads, G key heads, T queries, S keys, D head width

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmax.ops.backends.call import Call
from ssmax.ops.dtypes import at_least_float32
from ssmax.ops.visible import MaskSpec


def attend(call: Call) -> Tensor:
    """Weights, then values."""
    weights = attention_weights(call.q_BHTD, call.k_BGSD, call.mask_spec, scale=call.scale)
    weights = F.dropout(weights, call.dropout_p)
    _, v_BHSD = call.repeated_heads()
    with _autocast_off(call.q_BHTD.device):
        return (weights @ v_BHSD.to(weights.dtype)).to(call.q_BHTD.dtype)


def attention_weights(
    q_BHTD: Tensor, k_BGSD: Tensor, mask_spec: MaskSpec, *, scale: float | None = None
) -> Tensor:
    """The weights themselves, (B, H, T, S), float32 or wider, under autocast too."""
    wide = at_least_float32(q_BHTD.dtype)
    q_BHTD = q_BHTD.to(wide) * (max(q_BHTD.shape[-1], 1) ** -0.5 if scale is None else scale)
    k_BHSD = k_BGSD.repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], dim=1)
    with _autocast_off(q_BHTD.device):
        logits = q_BHTD @ k_BHSD.to(wide).transpose(-1, -2)
    visible = mask_spec.visible_mask()
    if mask_spec.bias is not None:
        logits = logits + mask_spec.bias.masked_fill(mask_spec.bias == -torch.inf, 0.0)
    # A blind query keeps its logits and is zeroed afterwards: softmax of nothing is NaN.
    blind = ~visible.any(-1, keepdim=True)
    return logits.masked_fill(~(visible | blind), -torch.inf).softmax(-1).masked_fill(blind, 0.0)


def _autocast_off(device: torch.device):
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
