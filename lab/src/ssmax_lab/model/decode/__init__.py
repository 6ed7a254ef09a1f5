"""Attend with one query a row over a cache, its bounds read on the device."""

# B batch, H query heads, G key heads, S keys there is room for, D head_dim

import math

import torch
from torch import Tensor

from ssmax.ops.dtypes import at_least_float32
from ssmax.ops.implementation import choose_impl


def decode_attention(
    q_BH1D: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, start_B: Tensor, stop_B: Tensor
) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v of one query a row over keys start to stop - 1.

    k and v are a whole cache, written or not. The bounds are integers on the device: a CUDA graph
    that was captured once serves every length. They end where the cache does. A row without keys
    gives zeros. No gradient. The kernel computes in float32: float64 takes the reference.
    """
    scale = 1 / math.sqrt(q_BH1D.shape[-1])
    if choose_impl("auto", q_BH1D.device) == "reference" or q_BH1D.dtype == torch.float64:
        return decode_attention_reference(q_BH1D, k_BGSD, v_BGSD, start_B, stop_B, scale)
    # Here: only a GPU has Triton.
    from ssmax_lab.model.decode import kernels

    return kernels.decode_attention(q_BH1D, k_BGSD, v_BGSD, start_B, stop_B, scale)


def decode_attention_reference(
    q_BH1D: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, start_B: Tensor, stop_B: Tensor, scale: float
) -> Tensor:
    """Look at every key and hide those outside the bounds; this runs anywhere."""
    wide = at_least_float32(q_BH1D.dtype)
    group = q_BH1D.shape[1] // k_BGSD.shape[1]
    k, v = (x.to(wide).repeat_interleave(group, dim=1) for x in (k_BGSD, v_BGSD))
    index_S = torch.arange(k.shape[2], device=k.device)
    seen_BS = (index_S >= start_B.unsqueeze(-1)) & (index_S < stop_B.unsqueeze(-1))
    seen = seen_BS[:, None, None]
    logits = (q_BH1D.to(wide) @ k.mT * scale).masked_fill(~seen, -torch.inf)
    weights = logits.softmax(-1).masked_fill(~seen, 0.0)
    # What was never written may hold anything; nothing times it has to be nothing.
    v = v.masked_fill(~seen.mT, 0.0)
    return (weights @ v).to(q_BH1D.dtype)
