"""Attend with one query a row over a cache, its bounds read on the device."""

# B batch, H query heads, G key heads, S keys there is room for, D head_dim

import functools
import math

import torch
from torch import Tensor

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.ops.dtypes import at_least_float32
from ssmax.ops.implementation import Impl, choose_impl, register_op


def decode_attention(
    q_BH1D: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    start_B: Tensor,
    stop_B: Tensor,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Compute softmax(q k^T scale) v of one query a row over keys start to stop - 1.

    k and v are a whole cache, written or not. The bounds are integers on the device: a CUDA graph
    that was captured once serves every length. They end where the cache does. A row without keys
    gives zeros. No gradient. A named impl never falls back to another.
    """
    scale = 1 / math.sqrt(q_BH1D.shape[-1]) if scale is None else scale
    is_double = q_BH1D.dtype == torch.float64
    if impl == "triton" and is_double:
        raise UsageError("the kernel computes in float32; for float64 pass impl='reference'")
    if choose_impl(impl, q_BH1D.device) == "reference" or is_double:
        return decode_attention_reference(q_BH1D, k_BGSD, v_BGSD, start_B, stop_B, scale)
    return _decode_attention_op(q_BH1D, k_BGSD, v_BGSD, start_B, stop_B, scale)


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


@register_op("ssmax_lab::decode_attention", mutates_args=())
def _decode_attention_op(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor, scale: float
) -> Tensor:
    return _kernels().decode_attention(q, k, v, start, stop, scale)


@_decode_attention_op.register_fake
def _(q, k, v, start, stop, scale):
    return torch.empty_like(q)


@functools.cache
def _kernels():
    require("triton", install="ssmax[triton]", purpose="impl='triton'")
    from ssmax_lab.model.decode import kernels

    return kernels
