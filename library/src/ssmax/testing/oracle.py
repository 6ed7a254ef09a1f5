"""The definition by brute force: every pair of query and key is checked, the mask is counted, and
n**(s z) is evaluated in float64. Slow on purpose; there is nothing here to get wrong.
"""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

from typing import Any

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


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: float | Tensor,
    *,
    bias: float | Tensor | None = None,
    num_keys: int | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **mask_options: Any,
) -> Tensor:
    """Compute n**(s z) / sum of n**(s z), times v, in float64; with a bias, times exp(b z)."""
    q, k, v = (x.double() for x in (q, k, v))
    mask, n, s, b = _count(q, k, s, bias, num_keys, mask_options)
    z = _logits(q, k, scale)
    added = _added(mask_options.get("attn_mask"))
    if bias is None and added is None:
        weights = n ** _below_the_largest(s * z, mask)
    else:
        added = 0.0 if added is None else added
        weights = torch.e ** _below_the_largest((s * n.log() + b) * z + added, mask)
    weights = torch.where(mask, weights, 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: float | Tensor,
    *,
    bias: float | Tensor | None = None,
    num_keys: int | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **mask_options: Any,
) -> Tensor:
    """Compute with explicit logits in the dtype of q: its error is the budget of the rest.

    Differentiable in q, k, v, s and bias, so in float64 its gradients are the reference.
    """
    mask, n, s, b = _count(q, k, s, bias, num_keys, mask_options)
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = _logits((q.to(wide) * (s * n.log() + b).to(wide)).to(q.dtype), k, scale)
    if (added := _added(mask_options.get("attn_mask"))) is not None:
        logits = logits + added.to(q.dtype)
    hidden = ~mask.any(-1, keepdim=True)
    weights = logits.to(wide).masked_fill(~(mask | hidden), -torch.inf).softmax(-1)
    return weights.masked_fill(hidden, 0.0).to(q.dtype) @ v.repeat_interleave(
        q.shape[1] // v.shape[1], dim=1
    )


def _count(q, k, s, bias, num_keys, mask_options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the mask, n as (B, H, T, 1), and s and b as columns of heads, float64."""
    batch, num_heads, num_queries, _ = q.shape
    mask = oracle_mask(num_queries, k.shape[2], batch=batch, num_heads=num_heads, **mask_options)
    n = mask.sum(-1, keepdim=True).clamp_min(1)
    if num_keys is not None:
        n = torch.as_tensor(num_keys, dtype=torch.float64).unsqueeze(-1)
        n = n.unsqueeze(1) if n.dim() == 3 else n
    s, b = (
        torch.as_tensor(value, dtype=torch.float64).reshape(-1, 1, 1)
        for value in (s, 0.0 if bias is None else bias)
    )
    return mask, n.double(), s, b


def _below_the_largest(exponent: Tensor, mask: Tensor) -> Tensor:
    """Subtract the largest visible exponent of a row: a constant, which cancels."""
    largest = exponent.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    return exponent - largest.nan_to_num(neginf=0.0)


def _logits(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _added(attn_mask: Tensor | None) -> Tensor | None:
    """Find what an additive mask adds to the scaled logits, 0 where it hides."""
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return None
    return attn_mask.double().masked_fill(_hidden(attn_mask), 0.0)
