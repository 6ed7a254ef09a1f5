"""Explicit logits: slow, large, and plain to read."""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.dtypes import at_least_float32
from ssmax.ops.visible import MaskSpec


def attend(inputs: AttentionInputs) -> Tensor:
    """Compute the weights, then their mean of the values."""
    weights = attention_weights(inputs.q_BHTD, inputs.k_BGSD, inputs.mask_spec, scale=inputs.scale)
    weights = F.dropout(weights, inputs.dropout_p)
    _, v_BHSD = inputs.repeated_heads()
    with _autocast_off(inputs.q_BHTD.device):
        return (weights @ v_BHSD.to(weights.dtype)).to(inputs.q_BHTD.dtype)


def attention_weights(
    q_BHTD: Tensor, k_BGSD: Tensor, mask_spec: MaskSpec, *, scale: float | None = None
) -> Tensor:
    """Compute the weights, (B, H, T, S), in float32 or wider, under autocast too."""
    wide = at_least_float32(q_BHTD.dtype)
    q_BHTD = q_BHTD.to(wide) * (max(q_BHTD.shape[-1], 1) ** -0.5 if scale is None else scale)
    k_BHSD = k_BGSD.repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], dim=1)
    with _autocast_off(q_BHTD.device):
        logits = q_BHTD @ k_BHSD.to(wide).transpose(-1, -2)
    visible = mask_spec.visible_mask()
    if mask_spec.bias is not None:
        logits = logits + mask_spec.bias.masked_fill(mask_spec.bias == -torch.inf, 0.0)
    # A fully masked row keeps its logits and is zeroed afterwards: softmax of nothing is NaN.
    hidden = ~visible.any(-1, keepdim=True)
    return logits.masked_fill(~(visible | hidden), -torch.inf).softmax(-1).masked_fill(hidden, 0.0)


def _autocast_off(device: torch.device):
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
