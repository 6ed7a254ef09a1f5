"""Calls of ssmax_attention that were seen before: checked, counted and chosen once for a shape.

What a call decides by shapes, dtypes and options is kept as a plan, so that the next call of the
kind scales the query and attends. Only calls whose n follows from their shapes have one. What
depends on values (is s finite?) is asked in every call, on the CPU as ever.
"""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.ops.backends import attend
from ssmax.ops.backends.sdpa import in_best_order, plain_attention
from ssmax.ops.dtypes import at_least_float32, autocast_dtype
from ssmax.ops.scale import Number, check_finite
from ssmax.ops.scale_query.api import apply_scaling, kind, scaling_of
from ssmax.ops.scale_query.reference import scale_query
from ssmax.ops.visible import MaskSpec, Ramp

Plan = Callable[[Tensor, Tensor, Tensor, Number, Number | None], Tensor]

MOST_KEPT = 1024
_PLAIN = (Tensor, nn.Parameter)
known: dict[Hashable, Plan] = {}


def key_of(
    q: Tensor, k: Tensor, v: Tensor, s: Number, bias: Number | None, options: Hashable
) -> Hashable:
    """Collect all that a plan depends on."""
    return (
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        *(q.stride(), type(k), type(v), _kind(s), _kind(bias), options),
        autocast_dtype(q.device, q.dtype),
    )


def keep(
    key: Hashable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Number,
    bias: Number | None,
    spec: MaskSpec,
    multiplier: float,
    scale: float | None,
    dropout_p: float,
) -> None:
    """Keep a plan for calls like this one, which was checked, if there can be one."""
    ramp = spec.ramp()
    is_plain = type(k) in _PLAIN and type(v) in _PLAIN
    if ramp is None or not is_plain or 0 in (q.numel(), k.numel(), v.shape[-1]):
        return
    if len(known) >= MOST_KEPT:
        known.clear()
    finish = plain = plain_attention(q, k, spec, scale, dropout_p)
    if finish is None:
        finish = functools.partial(attend, mask_spec=spec, scale=scale, dropout_p=dropout_p)
    scaling = scaling_of(q, s, bias, ramp)
    if scaling is not None:
        known[key] = _on_gpu(scaling, ramp, multiplier, finish)
    elif _is_fused_on_cpu(q, v) and plain is not None and not dropout_p and multiplier == 1:
        known[key] = _on_cpu(_log_n(ramp, q, s), finish)


def _on_gpu(scaling: Any, ramp: Ramp, multiplier: float, finish: Callable[..., Tensor]) -> Plan:
    def plan(q: Tensor, k: Tensor, v: Tensor, s: Number, bias: Number | None) -> Tensor:
        return in_best_order(finish, apply_scaling(scaling, q, s, bias, ramp, multiplier), k, v)

    return plan


def _on_cpu(log_n_T: Tensor, finish: Callable[..., Tensor]) -> Plan:
    def plan(q: Tensor, k: Tensor, v: Tensor, s: Number, bias: Number | None) -> Tensor:
        check_finite("s", s)
        factor_HT = _column(s) * log_n_T
        if bias is not None:
            check_finite("bias", bias)
            factor_HT = factor_HT + _column(bias)
        # Elsewhere than in the last dimension strides are free; there the fused kernel declines.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return finish(scale_query(q, factor_HT), k, v)

    return plan


def _column(value: Number) -> Number:
    return value.unsqueeze(-1) if isinstance(value, Tensor) and value.dim() else value


def _log_n(ramp: Ramp, q: Tensor, s: Number) -> Tensor:
    """Compute log n, (T,) or (1,), in the dtype of the factor."""
    dtype = at_least_float32(q.dtype)
    if isinstance(s, Tensor):
        dtype = torch.promote_types(dtype, s.dtype)
    with torch.inference_mode(False):
        return ramp.counts(1 if ramp.first == ramp.most else q.shape[2]).to(dtype).log()


def _is_fused_on_cpu(q: Tensor, v: Tensor) -> bool:
    return (
        q.device.type == "cpu"
        and q.dtype != torch.float16
        and q.shape[-1] == v.shape[-1]
        and autocast_dtype(q.device, q.dtype) is None
    )


def _kind(value: Number | None) -> Hashable:
    return kind(value) if isinstance(value, Tensor) else value
