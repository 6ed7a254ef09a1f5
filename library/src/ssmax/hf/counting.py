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

from ssmax.errors import UsageError
from ssmax.ops.visible import is_recorded, is_visible

Kind = Literal["eager", "sdpa", "flash", "flex", "engine"]
Count = int | Tensor
"""n of every query: one number for all, or (Q,), (B, Q) or (B, H, Q)."""

# Implementations that compute on an engine's own cache: the model sees neither keys nor mask.
_ENGINES = ("vllm", "tgi", "sglang")
# Kernels that add what they are given, where SDPA would take booleans for what is seen.
_ADDING = ("eager", "flex")
# Where a mask remembers its counts.
_COUNTED = "_ssmax_num_keys"


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


def known_keys(
    kind: Kind,
    module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    mask: Any,
    options: Mapping[str, Any],
) -> int | None:
    """n where it is the same for all queries and no tensor has to be read."""
    queries, keys = query_BHQD.shape[2], key_BGKD.shape[2]
    if mask is not None or kind not in ("eager", "sdpa", "flash"):
        return None
    if kind == "flash":
        is_plain = options.get("sliding_window") is None and options.get("cu_seq_lens_k") is None
        return keys if queries == 1 and is_plain else None
    if _own_mask(kind, module, queries, keys, options) is not None:
        return None
    # Without a mask eager code hides nothing, and SDPA is causal from the upper left.
    sees_all = kind == "eager" or queries == 1 or not _is_causal(module, options)
    return keys if sees_all else None


def as_tensor(num_keys: Count, like: Tensor) -> Tensor:
    """(Q,) on the device of the query `like`; a tensor as it is."""
    if isinstance(num_keys, int):
        return torch.full((like.shape[2],), num_keys, device=like.device)
    return num_keys


def visible_keys(
    kind: Kind,
    module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    mask: Any,
    options: Mapping[str, Any],
) -> Tensor:
    """(Q,), (B, Q) or, where heads differ, (B, H, Q): at least 1."""
    if kind in _ADDING and isinstance(mask, Tensor) and mask.dtype == torch.bool:
        raise UsageError(
            f"{kind} attention adds its mask to the logits, so that booleans hide nothing, and was "
            f"given a mask of them, {tuple(mask.shape)}; give 0 where a key is seen and "
            "torch.finfo(model.dtype).min where it is hidden, or use sdpa"
        )
    own = _own_mask(kind, module, query_BHQD.shape[2], key_BGKD.shape[2], options)
    if own is not None:
        mask = own if mask is None else own & is_visible(mask[..., : key_BGKD.shape[2]])
    if kind == "flex" and not isinstance(mask, Tensor):
        return _of_block_mask(mask, query_BHQD, key_BGKD).clamp_min(1)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        # Transformers gives FlexAttention the first head's for all.
        if kind == "flex" and mask.shape[1] > 1:
            mask = mask[:, :1]
        # A paged cache joins the keys later: its mask is over all of them.
        is_joined_later = options.get("cache") is not None
        length = mask.shape[-1] if is_joined_later else min(key_BGKD.shape[2], mask.shape[-1])
        return of_mask(mask, length)
    count = {"eager": _of_eager, "sdpa": _of_sdpa, "flash": _of_flash, "engine": _of_engine}
    counts = count[kind](module, query_BHQD, key_BGKD, mask, options)
    # The others have no padding, which sees nothing, unless they have a mask.
    return counts.clamp_min(1) if kind in ("flash", "engine") else counts


# In a graph this is one call (ssmax.hf.hook says so), and there remembers too.
def of_mask(mask_BHQK: Tensor, length: int) -> Tensor:
    """Counted once for all layers: a graph that makes no gradients would repeat it for each."""
    remembers = not _forgets(mask_BHQK)
    known = getattr(mask_BHQK, _COUNTED, None) if remembers else None
    if known is not None and known[:2] == (mask_BHQK._version, length):
        return known[2]
    mask = mask_BHQK[..., :length]
    counts_BHQ = is_visible(mask).sum(-1)
    counts = counts_BHQ.squeeze(1) if counts_BHQ.shape[1] == 1 else counts_BHQ
    counts = counts.clamp_min(1)
    if remembers:
        setattr(mask_BHQK, _COUNTED, (mask_BHQK._version, length, counts))
    return counts


def _own_mask(
    kind: Kind, module: nn.Module, queries: int, keys: int, options: Mapping[str, Any]
) -> Tensor | None:
    """(1, 1, Q, K): what GPT-2's eager code of Transformers 5.1 hides besides, by its own table.

    None where there is none: in later versions, in cross attention, and behind a paged cache, which
    has eager code of its own.
    """
    table = module._buffers.get("bias") if kind == "eager" and queries > 1 else None
    if table is None or table.dim() != 4 or table.dtype != torch.bool:
        return None
    if getattr(module, "is_cross_attention", False) or options.get("cache") is not None:
        return None
    return table[:, :, keys - queries : keys, :keys]


def _forgets(mask: Tensor) -> bool:
    """True where a count must not come from before, nor go beyond: while a graph is recorded of it.

    Tensors of inference mode do not tell of changes in place.
    """
    if mask.is_inference() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    # What torch.compile traces is of a type of its own, and new.
    return type(mask) is Tensor and is_recorded()


def _of_eager(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Mapping[str, Any]
) -> Tensor:
    """Without a mask eager code hides nothing."""
    return _all_keys(query, key)


def _of_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Mapping[str, Any]
) -> Tensor:
    """Without a mask SDPA is causal from the upper left, unless there is but one query."""
    queries, keys = query.shape[2], key.shape[2]
    if queries > 1 and _is_causal(module, options):
        counts = torch.arange(1, queries + 1, device=query.device)
        return counts if queries <= keys else counts.clamp_max(keys)
    return _all_keys(query, key)


def _of_flash(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Mapping[str, Any]
) -> Tensor:
    """A padding mask (B, K), bounds of packed documents, positions that restart, or nothing."""
    queries, keys = query.shape[2], key.shape[2]
    causal = _is_causal(module, options)
    bounds = _bounds(options)
    positions = options.get("position_ids")
    if isinstance(mask, Tensor):
        real_BK = mask.bool()
        rank = real_BK.cumsum(-1)[:, -queries:]
        total = real_BK.sum(-1, keepdim=True).expand(-1, queries)
    elif bounds is not None:
        rank, total = _in_documents(*bounds, query)
    elif _restarts(positions, query):
        assert isinstance(positions, Tensor)
        starts = (positions == positions.min()).flatten().nonzero().flatten()
        end = torch.tensor([queries], device=starts.device)
        places = torch.cat((starts, end))
        rank, total = _in_documents(places, places, query)
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
        raise UsageError(
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
    known = getattr(mask, _COUNTED, None)
    if known is not None:
        return known
    batch, heads, queries, keys = mask.shape
    b, h, q, k = (torch.arange(size, device=query.device) for size in (batch, heads, queries, keys))
    b, h = b[:, None, None, None], h[:, None, None]
    parts = [
        mask.mask_mod(b, h, part[:, None], k).expand(batch, heads, part.shape[0], keys).sum(-1)
        for part in q.split(1024)
    ]
    counts_BHQ = torch.cat(parts, dim=-1)[..., : query.shape[2]]
    counts = counts_BHQ.squeeze(1) if heads == 1 else counts_BHQ
    setattr(mask, _COUNTED, counts)
    return counts


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


def _bounds(options: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Where packed documents begin and end, for queries and keys, if flash attention heeds it."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    given: list[Any] = [options.get(name) for name in names]
    if any(value is None for value in given):
        return None
    bounds_q, bounds_k, *_ = given
    if isinstance(bounds_k, Mapping):
        # Continuous batching keeps bounds for every kind of layer, those of windowed layers cut to
        # the window. The widest are those of full ones; windows are taken off later.
        bounds_k = torch.stack(tuple(bounds_k.values())).amax(0)
    return bounds_q, bounds_k


def _in_documents(bounds_q: Tensor, bounds_k: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """(B, Q) each: rank and number of keys of every query, aligned at the ends of its document.

    Bounds go through all rows of a batch, one behind the other.
    """
    batch, _, queries, _ = query.shape
    device = query.device
    place = torch.arange(batch * queries, device=device)
    document = torch.searchsorted(bounds_q[1:].to(device).long().contiguous(), place, right=True)
    document = document.clamp_max(bounds_q.shape[0] - 2)
    starts_q, ends_q = (bounds_q.to(device).long()[document + i] for i in (0, 1))
    starts_k, ends_k = (bounds_k.to(device).long()[document + i] for i in (0, 1))
    keys = ends_k - starts_k
    rank = keys - (ends_q - starts_q) + (place - starts_q) + 1
    return rank.view(batch, queries), keys.view(batch, queries)


def _in_window(rank: Tensor, total: Tensor, window: int) -> Tensor:
    """Both ways: the window's keys that there are before and behind a query in its document."""
    return (rank - 1).clamp(0, window - 1) + 1 + (total - rank).clamp(0, window - 1)
