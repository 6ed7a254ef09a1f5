"""n for every query, read from what the attention kernel itself masks with.

Positions do not tell n: a left-padded batch arrives with positions 0 to T - 1 in every row. Nor do
the keys: a static cache is longer than what was written, a causal query sees a part of them. What a
kernel is given does tell it, kernel by kernel, and then n is right whoever called.
"""

# B batch, H heads, Q queries, K keys

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["eager", "sdpa", "flash", "flex", "engine"]

# Implementations that compute on an engine's own cache: the model sees neither keys nor mask.
_ENGINES = ("vllm", "tgi", "sglang")
# An additive mask hides by -inf, the dtype's lowest number, -1e9 or, at the mildest, -1e4. The exp of
# float32 is 0 from -104 on, so nothing that is meant to be seen is as low as this.
_HIDDEN = -5e3
# All four, or Transformers' flash attention takes no notice of any.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def kind_of(implementation: str | None) -> Kind | None:
    """How an implementation masks; None for one that is not known."""
    name = (implementation or "eager").removeprefix("paged|")
    if name in ("eager", "sdpa"):
        return name
    if name == "flex_attention":
        return "flex"
    if name in _ENGINES:
        return "engine"
    return "flash" if "flash" in name else None


def visible_keys(
    kind: Kind,
    module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    mask: Any,
    options: Mapping[str, Any],
) -> Tensor:
    """(Q,), (B, Q) or, where heads differ, (B, H, Q): at least 1."""
    if kind == "flex" and not isinstance(mask, Tensor):
        return _of_block_mask(mask, query_BHQD, key_BGKD).clamp_min(1)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        # A paged cache joins the keys later: its mask is over all of them.
        length = None if options.get("cache") is not None else key_BGKD.shape[2]
        return _of_mask(mask[..., :length]).clamp_min(1)
    count = {"eager": _of_eager, "sdpa": _of_sdpa, "flash": _of_flash, "engine": _of_engine}
    return count[kind](module, query_BHQD, key_BGKD, mask, options).clamp_min(1)


def _of_mask(mask_BHQK: Tensor) -> Tensor:
    """Counted."""
    seen = mask_BHQK if mask_BHQK.dtype == torch.bool else mask_BHQK > _HIDDEN
    counts_BHQ = seen.sum(-1)
    return counts_BHQ.squeeze(1) if counts_BHQ.shape[1] == 1 else counts_BHQ


def _of_eager(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Mapping[str, Any]
) -> Tensor:
    """Without a mask eager code hides nothing."""
    return _all_keys(query, key)


def _of_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Mapping[str, Any]
) -> Tensor:
    """Without a mask SDPA is causal from the upper left, unless there is but one query."""
    if query.shape[2] > 1 and _is_causal(module, options):
        return torch.arange(1, query.shape[2] + 1, device=query.device).clamp_max(key.shape[2])
    return _all_keys(query, key)


def _of_flash(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Mapping[str, Any]
) -> Tensor:
    """A padding mask (B, K), bounds of packed documents, positions that restart, or nothing."""
    queries, keys = query.shape[2], key.shape[2]
    causal = _is_causal(module, options)
    bounds = [options.get(name) for name in _BOUNDS]
    positions = options.get("position_ids")
    if isinstance(mask, Tensor):
        real_BK = mask.bool()
        rank = real_BK.cumsum(-1)[:, -queries:]
        total = real_BK.sum(-1, keepdim=True).expand(-1, queries)
    elif all(bound is not None for bound in bounds):
        bounds_q, bounds_k = bounds[:2]
        if isinstance(bounds_k, Mapping):
            # Continuous batching keeps bounds for every kind of layer, those of windowed layers cut
            # to the window. The widest are those of full ones; windows are taken off below.
            bounds_k = torch.stack(tuple(bounds_k.values())).amax(0)
        rank, total = _in_documents(bounds_q, bounds_k, queries, query.device)
    elif _restarts(positions, query):
        assert isinstance(positions, Tensor)
        starts = (positions == positions.min()).flatten().nonzero().flatten()
        end = torch.tensor([queries], device=starts.device)
        bounds = torch.cat((starts, end)).to(torch.int32)
        rank, total = _in_documents(bounds, bounds, queries, query.device)
    else:
        rank = torch.arange(keys - queries + 1, keys + 1, device=query.device)
        total = torch.full_like(rank, keys)
    window = options.get("sliding_window")
    if causal:
        return rank if window is None else rank.clamp_max(window)
    return total if window is None else _in_window(rank, total, window)


def _of_engine(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Mapping[str, Any]
) -> Tensor:
    """An engine hands over positions alone, and they are those of the sequence."""
    positions = options.get("position_ids")
    if not isinstance(positions, Tensor):
        raise ValueError(
            "an engine's attention was called without position_ids, so n cannot be known; "
            "run this model with sdpa, eager or flash attention"
        )
    counts = positions.reshape(-1, positions.shape[-1]) + 1
    window = options.get("sliding_window")
    return counts if window is None else counts.clamp_max(window)


def _of_block_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """FlexAttention's mask is a function: evaluated once for a mask, in blocks of queries."""
    if mask is None:
        return _all_keys(query, key)
    known = getattr(mask, "_ssmax_num_keys", None)
    if known is not None:
        return known
    batch, _, queries, keys = mask.shape
    device = query.device
    b = torch.arange(batch, device=device)[:, None, None]
    k = torch.arange(keys, device=device)
    head = torch.zeros((), dtype=torch.long, device=device)
    parts = []
    for start in range(0, queries, 1024):
        q = torch.arange(start, min(start + 1024, queries), device=device)[:, None]
        parts.append(mask.mask_mod(b, head, q, k).expand(batch, q.shape[0], keys).sum(-1))
    counts_BQ = torch.cat(parts, dim=1)[:, : query.shape[2]]
    mask._ssmax_num_keys = counts_BQ
    return counts_BQ


def _is_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True)) if given is None else bool(given)


def _all_keys(query: Tensor, key: Tensor) -> Tensor:
    return torch.full((query.shape[2],), key.shape[2], device=query.device)


def _restarts(positions: Any, query: Tensor) -> bool:
    """As Transformers tells packed documents: one row whose positions do not just go on."""
    if not isinstance(positions, Tensor) or query.shape[0] != 1 or positions.shape[-1] == 1:
        return False
    steps = torch.arange(positions.shape[-1], device=positions.device) + positions.min()
    return bool((steps != positions).any())


def _in_documents(
    bounds_q: Tensor, bounds_k: Tensor, queries: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rank and number of keys of every query of a row of documents, aligned at their ends."""
    place = torch.arange(queries, device=device)
    document = torch.searchsorted(bounds_q[1:].to(device).long().contiguous(), place, right=True)
    document = document.clamp_max(bounds_q.shape[0] - 2)
    starts_q, ends_q = (bounds_q.to(device).long()[document + i] for i in (0, 1))
    starts_k, ends_k = (bounds_k.to(device).long()[document + i] for i in (0, 1))
    keys = ends_k - starts_k
    rank = keys - (ends_q - starts_q) + (place - starts_q) + 1
    return rank.unsqueeze(0), keys.unsqueeze(0)


def _in_window(rank: Tensor, total: Tensor, window: int) -> Tensor:
    """Both ways: the window's keys that there are before and behind a query in its document."""
    return (rank - 1).clamp(0, window - 1) + 1 + (total - rank).clamp(0, window - 1)
