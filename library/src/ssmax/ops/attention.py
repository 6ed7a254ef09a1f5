"""Scalable-Softmax attention: count n, scale the query, call the fastest softmax attention.

Scaling the query rather than the logits costs one multiply per channel, leaves cached keys those of
the softmax model, and lets every softmax kernel serve unchanged.
"""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

import math
from numbers import Real
from types import NoneType

import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.ops import plans
from ssmax.ops.backends import Backend, attend
from ssmax.ops.backends.eager import attention_weights
from ssmax.ops.dtypes import at_least_float32, autocast_dtype, check_tensor
from ssmax.ops.scale import (
    Number,
    check_finite,
    check_num_keys,
    unchecked_ssmax_factor,
)
from ssmax.ops.scale_query.api import apply_scaling, scaling_of
from ssmax.ops.scale_query.reference import scale_query
from ssmax.ops.visible import MaskSpec, can_read_without_sync, is_eager, mask_spec
from ssmax.ops.window import Window

UNREAD_EXPONENT = 4
"""The power of two that float16 queries are divided by where the factor cannot be read: enough for
every query up to a factor of 16."""


def ssmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Number,
    *,
    bias: Number | None = None,
    num_keys: int | Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    positions: Tensor | None = None,
    is_causal: bool = False,
    window: Window = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Compute softmax((s log n + b) q k^T scale) v, n being the number of keys each query sees.

    q is (B, H, T, D), k and v (B, G, S, D), as in `scaled_dot_product_attention`; s and bias are
    scalars or (H,), learnable. With fewer queries than keys the queries are the last ones, so
    `is_causal` serves cached decoding. `key_padding_mask` (B, S) is True for tokens; `window`,
    `cu_seqlens` and `positions` are as in `visible_keys`; `attn_mask` is boolean (True is visible)
    or additive (-5e3 or any lower number hides a key; what it adds is not scaled). `num_keys`
    overrides the count: a number, (T,), (B, T) or (B, H, T). `scale` is any finite number, by
    default D ** -0.5. A fully masked row gives zeros. Values of tensors are checked on the CPU
    only; on a GPU that would wait for the device. q and k arrive rotated but not scaled: after
    `apply_rope`, not after `rope_scale`.
    """
    key = None
    is_plain = (
        attn_mask is key_padding_mask is positions is cu_seqlens is num_keys is None
        and type(window) in (int, NoneType)
    )
    if is_plain and is_eager(q):
        options = (is_causal, window, scale, enable_gqa, dropout_p, backend)
        key = plans.key_of(q, k, v, s, bias, options)
        plan = plans.known.get(key)
        if plan is not None:
            return plan(q, k, v, s, bias)
    _check_heads(q, k, v, enable_gqa)
    _check_scale(scale)
    if not 0.0 <= dropout_p < 1.0:
        raise UsageError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    given = s, bias
    s = _check_per_head("s", s, q)
    bias = None if bias is None else _check_per_head("bias", bias, q)
    spec = _mask_spec(q, k, attn_mask, key_padding_mask, positions, is_causal, window, cu_seqlens)
    n = spec.num_visible() if num_keys is None else _check_num_keys(num_keys, q)
    multiplier, scale = _positive_scale(scale)
    scaling = scaling_of(q, s, bias, n)
    factor_BHT = _factor(q, s, bias, n) if scaling is None else None
    if (autocast_dtype(q.device, q.dtype) or q.dtype) == torch.float16:
        exponent = _float16_exponent(factor_BHT)
        multiplier *= 2.0**-exponent
        scale = (1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale) * 2.0**exponent
    if key is not None and backend == "auto":
        plans.keep(key, q, k, v, *given, spec, multiplier, scale, dropout_p)
    if factor_BHT is None:
        q = apply_scaling(scaling, q, s, bias, n, multiplier)
    else:
        q = scale_query(q, factor_BHT if multiplier == 1 else factor_BHT * multiplier)
    return attend(q, k, v, spec, scale=scale, dropout_p=dropout_p, backend=backend)


def attention_rows(
    q: Tensor,
    k: Tensor,
    s: Number,
    rows: Tensor | list[int],
    *,
    bias: Number | None = None,
    num_keys: int | Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    positions: Tensor | None = None,
    is_causal: bool = False,
    window: Window = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the attention weights of chosen queries, (B, H, rows, S), in float32 or wider.

    `rows` are indices among the T queries, negative ones from the end; all else is as in
    `ssmax_attention`. Memory grows with rows x keys, never with queries x keys.
    """
    _check_heads(q, k, k, enable_gqa)
    _check_scale(scale)
    rows = _check_rows(rows, q)
    spec = _mask_spec(q, k, attn_mask, key_padding_mask, positions, is_causal, window, cu_seqlens)
    s = _check_per_head("s", s, q)
    bias = None if bias is None else _check_per_head("bias", bias, q)
    n = spec.num_visible() if num_keys is None else _check_num_keys(num_keys, q)
    factor_BHT = _factor(q, s, bias, n).expand(q.shape[:3])[:, :, rows]
    # In float32 or wider throughout: a probe has no kernel to match.
    q = q[:, :, rows].to(at_least_float32(q.dtype)) * factor_BHT.unsqueeze(-1)
    return attention_weights(q, k, spec.at(rows), scale=scale)


def _mask_spec(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    positions: Tensor | None,
    is_causal: bool,
    window: Window,
    cu_seqlens: Tensor | None,
) -> MaskSpec:
    return mask_spec(
        q.shape[2],
        k.shape[2],
        is_causal=is_causal,
        window=window,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        positions=positions,
        attn_mask=attn_mask,
        batch=q.shape[0],
        num_heads=q.shape[1],
        device=q.device,
    )


def _factor(q: Tensor, s: Tensor, bias: Tensor | None, n: Tensor) -> Tensor:
    """Compute s log n + b, broadcastable to (B, H, T), in float32 or wider."""
    num_heads = q.shape[1]
    if n.dim() < 3:
        n = n.unsqueeze(-2)
    return unchecked_ssmax_factor(
        n,
        s.expand(num_heads).unsqueeze(-1),
        None if bias is None else bias.expand(num_heads).unsqueeze(-1),
    )


def _positive_scale(scale: float | None) -> tuple[float, float | None]:
    """Move the sign of `scale`, or a scale of 0, into a number that multiplies the factor.

    Fused kernels hide a key by a logit of -inf before they multiply by `scale`.
    """
    if scale is None or scale > 0:
        return 1.0, scale
    return (-1.0, -scale) if scale < 0 else (0.0, 1.0)


def _float16_exponent(factor_BHT: Tensor | None) -> int:
    """Choose the power of two that moves from the factor to `scale`, lest the query overflow.

    Kernels multiply by `scale` in float32, and powers of two are exact. On the CPU the factor is
    read and brought to at most 1; elsewhere reading it would wait for the device.
    """
    if factor_BHT is None or not can_read_without_sync(factor_BHT):
        return UNREAD_EXPONENT
    largest = factor_BHT.detach().abs().amax().item() if factor_BHT.numel() else 0.0
    return math.frexp(largest)[1] if largest > 1 else 0


def _check_scale(scale: float | None) -> None:
    is_number = scale is None or isinstance(scale, Real | torch.SymFloat)
    if not is_number or (scale is not None and not -math.inf < scale < math.inf):
        raise UsageError(
            f"scale must be a finite number or None for head_dim ** -0.5, got {scale!r}; "
            "what is learned goes into s and bias"
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested:
            kind = "a nested tensor" if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(
                f"{name} must be a tensor (batch, heads, tokens, head_dim), got {kind}; documents "
                "of several lengths go in padded with key_padding_mask, or packed with cu_seqlens"
            )
        if x.dim() != 4:
            raise UsageError(
                f"{name} must have 4 dimensions, (batch, heads, tokens, head_dim), "
                f"got shape {tuple(x.shape)}"
            )
        check_tensor(name, x, is_floating=True)
    if k.shape[:3] != v.shape[:3]:
        raise UsageError(
            f"k and v must agree in batch, heads and tokens, got {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise UsageError(
            f"q and k must agree in batch and head_dim, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if not (q.dtype == k.dtype == v.dtype or autocast_dtype(q.device, q.dtype) is not None):
        raise UsageError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise UsageError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads == kv_heads:
        return
    if kv_heads == 0 or heads % kv_heads:
        raise UsageError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}")
    if not enable_gqa:
        raise UsageError(
            f"{heads} query heads share {kv_heads} key heads; pass enable_gqa=True if that is meant"
        )


def _check_per_head(name: str, value: Number, q: Tensor) -> Tensor:
    """Return one number or one per query head as a tensor at least as wide as q."""
    if not isinstance(value, Tensor):
        if not isinstance(value, Real) or isinstance(value, bool):
            raise UsageError(
                f"{name} must be a number or a tensor of one value per query head, got {value!r}"
            )
        value = torch.tensor(float(value), dtype=at_least_float32(q.dtype))
    check_tensor(name, value, is_floating=True)
    if value.shape not in ((), (1,), (q.shape[1],)):
        raise UsageError(
            f"{name} must hold one value per query head: expected ({q.shape[1]},), got "
            f"{tuple(value.shape)}. With grouped queries, count query heads, not key heads; and "
            "is q (batch, heads, tokens, head_dim)?"
        )
    check_finite(name, value)
    return value.to(q.device, torch.promote_types(value.dtype, at_least_float32(q.dtype)))


def _check_num_keys(num_keys: int | Tensor, q: Tensor) -> Tensor:
    batch, heads, num_queries, _ = q.shape
    n = torch.as_tensor(num_keys, device=q.device)
    if n.dtype == torch.bool or n.is_complex():
        raise UsageError(f"num_keys must be numbers, got {n.dtype}")
    wanted = (num_queries, heads, batch) if n.dim() == 3 else (num_queries, batch)
    sizes = zip(n.shape[::-1], wanted, strict=False)
    if n.dim() > 3 or any(size not in (1, most) for size, most in sizes):
        raise UsageError(
            f"num_keys must be a number or broadcast to ({num_queries} queries,), "
            f"({batch}, {num_queries}) or ({batch}, {heads}, {num_queries}), got {tuple(n.shape)}"
        )
    check_num_keys(n)
    return n if n.dim() else n.expand(num_queries)


def _check_rows(rows: Tensor | list[int], q: Tensor) -> Tensor:
    if not isinstance(rows, Tensor):
        # An empty list would be of floats.
        rows = torch.tensor(rows, dtype=None if len(rows) else torch.int64)
    rows = rows.to(q.device)
    num_queries = q.shape[2]
    if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise UsageError(
            f"rows must be a list of query indices, got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    outside = (rows < -num_queries) | (rows >= num_queries)
    if can_read_without_sync(rows) and outside.any():
        raise UsageError(
            f"rows must lie in -{num_queries}..{num_queries - 1}, got {int(rows[outside][0])}"
        )
    return torch.where(rows < 0, rows + num_queries, rows)
