"""The definition by brute force: every pair of query and key is checked, the mask is counted, and
n**(s z) is evaluated in float64. Slow on purpose; there is nothing here to get wrong.
"""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

from typing import Any, NamedTuple

import torch
from torch import Tensor


def oracle_mask(
    num_queries: int,
    num_keys: int,
    *,
    batch: int = 1,
    num_heads: int = 1,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    positions: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Find who sees whom, (B, H, T, S), True is visible, one pair after the other."""
    left, right = (window - 1, 0) if isinstance(window, int) else window or (-1, -1)
    starts = [] if cu_seqlens is None else cu_seqlens.tolist()[1:]
    mask = torch.zeros(batch, num_heads, num_queries, num_keys, dtype=torch.bool)
    for b in range(batch):
        position = None
        if positions is not None:
            position = positions.expand(batch, num_queries)[b].tolist()
        for t in range(num_queries):
            i = num_keys - num_queries + t  # the key at which this query stands
            for j in range(num_keys):
                if is_causal and j > i:
                    continue
                if (left >= 0 and j < i - left) or (right >= 0 and j > i + right):
                    continue
                if sum(start <= j for start in starts) != sum(start <= i for start in starts):
                    continue
                if position is not None and not _in_one_run(position, t, i, j):
                    continue
                if key_padding_mask is not None and not key_padding_mask[b, j]:
                    continue
                mask[b, :, t, j] = True
    if attn_mask is not None:
        mask = mask & ~_hidden(attn_mask).expand(mask.shape)
    return mask


def _hidden(attn_mask: Tensor) -> Tensor:
    """Find what a mask hides: False, or in an additive one -5e3 and below (docs/counting.md)."""
    # Written out once more: the oracle imports nothing that it judges.
    return ~attn_mask if attn_mask.dtype == torch.bool else attn_mask <= -5e3


def _in_one_run(position: list[int], t: int, i: int, j: int) -> bool:
    """A key before the query is of its document if it is not before the document's start; one
    after it, if the positions rise by one all the way.
    """
    if j <= i:
        return j >= i - position[t]
    return all(position[m + 1] == position[m] + 1 for m in range(i, j))


def oracle_attention(q: Tensor, k: Tensor, v: Tensor, s: float | Tensor, **options: Any) -> Tensor:
    """Compute n**(s z) / sum of n**(s z), times v, in float64; with a bias, times exp(b z).

    Options are those of `ssmax.ssmax_attention`.
    """
    q, k, v = (x.double() for x in (q, k, v))
    call = _read(q, k, v, s, **options)
    z = q @ call.k.mT * call.scale
    if options.get("bias") is None and call.added is None:
        weights = call.n ** _below_the_largest(call.s * z, call.mask)
    else:
        added = 0.0 if call.added is None else call.added
        exponent = (call.s * call.n.log() + call.b) * z + added
        weights = torch.e ** _below_the_largest(exponent, call.mask)
    weights = torch.where(call.mask, weights, 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    return weights @ call.v


def naive_attention(q: Tensor, k: Tensor, v: Tensor, s: float | Tensor, **options: Any) -> Tensor:
    """Compute with explicit logits in the dtype of q: its error is the budget of the rest.

    Differentiable in q, k, v, s and bias, so in float64 its gradients are the reference.
    """
    call = _read(q, k, v, s, **options)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = (call.s * call.n.log() + call.b).to(wide)
    logits = (q.to(wide) * factor).to(q.dtype) @ call.k.mT * call.scale
    if call.added is not None:
        logits = logits + call.added.to(q.dtype)
    hidden = ~call.mask.any(-1, keepdim=True)
    weights = logits.to(wide).masked_fill(~(call.mask | hidden), -torch.inf).softmax(-1)
    return weights.masked_fill(hidden, 0.0).to(q.dtype) @ call.v


class _Call(NamedTuple):
    """What both need: the mask, n as (B, H, T, 1), s and b as columns of heads, float64."""

    mask: Tensor
    n: Tensor
    s: Tensor
    b: Tensor
    k: Tensor
    """Of every query head, like v."""
    v: Tensor
    scale: float
    added: Tensor | None
    """What an additive mask adds to the scaled logits, 0 where it hides."""


def _read(
    q, k, v, s, *, bias=None, num_keys=None, scale=None, enable_gqa=False, **mask_options
) -> _Call:
    batch, num_heads, num_queries, width = q.shape
    mask = oracle_mask(num_queries, k.shape[2], batch=batch, num_heads=num_heads, **mask_options)
    n = mask.sum(-1, keepdim=True).clamp_min(1)
    if num_keys is not None:
        n = torch.as_tensor(num_keys, dtype=torch.float64).unsqueeze(-1)
        n = n.unsqueeze(1) if n.dim() == 3 else n
    s, b = (
        torch.as_tensor(value, dtype=torch.float64).reshape(-1, 1, 1)
        for value in (s, 0.0 if bias is None else bias)
    )
    k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    added = mask_options.get("attn_mask")
    if added is not None:
        is_boolean = added.dtype == torch.bool
        added = None if is_boolean else added.double().masked_fill(_hidden(added), 0.0)
    scale = width**-0.5 if scale is None else scale
    return _Call(mask=mask, n=n.double(), s=s, b=b, k=k, v=v, scale=scale, added=added)


def _below_the_largest(exponent: Tensor, mask: Tensor) -> Tensor:
    """Subtract the largest visible exponent of a row: a constant, which cancels."""
    largest = exponent.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    return exponent - largest.nan_to_num(neginf=0.0)
