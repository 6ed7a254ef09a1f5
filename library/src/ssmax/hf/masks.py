"""n of a converted model: what its attention implementation is given, as a mask spec.

Positions do not give n: a left-padded batch arrives with positions 0 to T - 1 in every row. Nor do
the keys: a static cache is longer than what was written, a causal query sees a part of them. What a
kernel masks with does. Each masks in its own way; the counting is that of `ssmax.ops.visible`.
"""

# B batch, H heads, Q queries, K keys

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ssmax.errors import UsageError
from ssmax.ops.visible import MaskSpec, Ramp, is_tracing, is_visible
from ssmax.ops.window import UNBOUNDED

Kind = Literal["eager", "sdpa", "flash", "flex", "engine"]
Count = Ramp | Tensor
"""n of every query: two numbers, or (Q,), (B, Q) or (B, H, Q)."""

# Implementations that compute on an engine's own cache: the model sees neither keys nor mask.
_ENGINES = ("vllm", "tgi", "sglang")
# The keys that such a cache, or a paged one, may hold: more than any query stands at.
_ANY_KEYS = 1 << 40
_SDPA = torch.nn.functional.scaled_dot_product_attention
# Where a mask remembers its counts.
_COUNTED = "_ssmax_num_keys"


def kind_of(implementation: str | None) -> Kind:
    """Find how an implementation masks."""
    name = (implementation or "eager").removeprefix("paged|")
    if name in ("eager", "sdpa"):
        return name
    if name == "flex_attention":
        return "flex"
    if name in _ENGINES:
        return "engine"
    if "flash" in name:
        return "flash"
    raise UsageError(
        f"the attention implementation {implementation!r} is not known, so it cannot be known what "
        "it masks; use eager, sdpa, flex_attention or flash attention"
    )


def is_split(function: Any, kind: Kind) -> bool:
    """True where the kernel joins keys of several ranks, each with a part of the sequence.

    DeepSpeed's Ulysses takes the place of an implementation, PyTorch's ring, which Accelerate uses,
    that of SDPA.
    """
    if getattr(function, "__module__", "").startswith("deepspeed."):
        return True
    sdpa = torch.nn.functional.scaled_dot_product_attention
    # A graph can be made of the comparison, not of the question for a builtin's module.
    return kind == "sdpa" and sdpa is not _SDPA and "context_parallel" in sdpa.__module__


def count_split(kind: Kind, query_BHQD: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Count by positions where a sequence is split over ranks, whose masks are not heeded."""
    positions = options.get("position_ids")
    if not isinstance(positions, Tensor):
        raise UsageError(
            "the sequence is split over ranks and attention was called without position_ids, so n "
            "cannot be known; pass position_ids, split as the tokens are"
        )
    if kind != "flash" and options.get("sliding_window") is not None:
        raise UsageError(
            f"{kind} attention over a sequence that is split over ranks does not apply its sliding "
            "window; use flash attention, or whole sequences"
        )
    if torch.compiler.is_compiling():
        return _positions_spec(query_BHQD, options).num_visible()

    def count() -> Tensor:
        if kind != "flash" and not bool((positions.diff(dim=-1) > 0).all()):
            raise UsageError(
                f"{kind} attention over a sequence that is split over ranks sees beyond the packed "
                "documents whose positions start again; use flash attention, or one document a row"
            )
        return _positions_spec(query_BHQD, options).num_visible()

    return _remembered(positions, (kind, options.get("sliding_window")), count)


def count_keys(
    kind: Kind,
    module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    mask: Any,
    options: Mapping[str, Any],
    *,
    as_ramp: bool = False,
) -> Count:
    """Count the keys that each query sees, at least 1: (Q,), (B, Q) or (B, H, Q).

    `as_ramp` allows two numbers where position alone decides.
    """
    queries, keys = query_BHQD.shape[2], key_BGKD.shape[2]
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and kind in ("eager", "flex"):
        raise UsageError(
            f"{kind} attention adds its mask to the logits, where a boolean would hide nothing, "
            f"got a boolean mask {tuple(mask.shape)}; give 0 where a key is seen and "
            "torch.finfo(model.dtype).min where it is hidden, or use sdpa"
        )
    if isinstance(mask, Tensor) and mask.dim() == 4:
        # Transformers gives FlexAttention the first head's for all.
        if kind == "flex" and mask.shape[1] > 1:
            mask = mask[:, :1]
        # A paged cache joins the keys later: its mask is over all of them.
        is_joined_later = options.get("cache") is not None
        keys = mask.shape[-1] if is_joined_later else min(keys, mask.shape[-1])
        return count_mask(mask, keys, kind == "eager" and _has_table(module, queries, options))
    if kind == "flex" and mask is not None:
        return _remembered(mask, queries, lambda: _count_block_mask(mask, query_BHQD))
    if kind == "flash" and mask is not None and not torch.compiler.is_compiling():
        asked = (queries, _is_causal(module, options), options.get("sliding_window"))
        spec_of = functools.partial(_flash_spec, module, query_BHQD, keys, mask, options)
        return _remembered(mask, asked, lambda: spec_of().num_visible())
    if kind == "flash":
        spec = _flash_spec(module, query_BHQD, keys, mask, options)
        return (spec.ramp() if as_ramp else None) or spec.num_visible()
    return _count_unmasked(kind, module, query_BHQD, keys, options, as_ramp)


# In a graph this is one call (ssmax.hf.hook says so), and there remembers too.
def count_mask(mask_BHQK: Tensor, num_keys: int, is_causal: bool = False) -> Tensor:
    """Count once for all layers: a graph that makes no gradients would repeat it for each."""
    return _remembered(
        mask_BHQK, (num_keys, is_causal), lambda: _count_mask(mask_BHQK, num_keys, is_causal)
    )


def _count_mask(mask_BHQK: Tensor, num_keys: int, is_causal: bool) -> Tensor:
    spec = MaskSpec(
        num_queries=mask_BHQK.shape[2],
        num_keys=num_keys,
        is_causal=is_causal,
        mask=is_visible(mask_BHQK[..., :num_keys]),
        device=mask_BHQK.device,
    )
    n_BHQ = spec.num_visible()
    return n_BHQ.squeeze(1) if n_BHQ.shape[1] == 1 else n_BHQ


def _count_block_mask(mask: Any, query_BHQD: Tensor) -> Tensor:
    """Evaluate FlexAttention's mask, which is a function, in blocks of queries."""
    batch, heads, queries, keys = mask.shape
    device = query_BHQD.device
    b, h, q, k = (torch.arange(size, device=device) for size in (batch, heads, queries, keys))
    b, h = b[:, None, None, None], h[:, None, None]
    parts = [
        _count_mask(mask.mask_mod(b, h, part[:, None], k).expand(batch, heads, -1, -1), keys, False)
        for part in q.split(1024)
    ]
    return torch.cat(parts, dim=-1)[..., : query_BHQD.shape[2]]


def _remembered(mask: Any, asked: Any, count: Callable[[], Tensor]) -> Tensor:
    """Count once for a mask, which many layers share, as long as it is not changed in place."""
    # Tensors of inference mode have no version. A count that a CUDA graph captures, or a
    # trace, must not come from before it, nor go beyond; what torch.compile traces is new.
    if isinstance(mask, Tensor) and (
        mask.is_inference()
        or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
        or (type(mask) is Tensor and is_tracing())
    ):
        return count()
    version = mask._version if isinstance(mask, Tensor) else 0
    known = getattr(mask, _COUNTED, None)
    if known is None or known[0] != version:
        known = (version, [])
        setattr(mask, _COUNTED, known)
    # Not a dictionary: a length in a graph is a symbol, which has no hash.
    found = next((n for each, n in known[1] if each == asked), None)
    if found is None:
        found = count()
        known[1].append((asked, found))
    return found


def _count_unmasked(
    kind: Kind,
    module: nn.Module,
    query: Tensor,
    keys: int,
    options: Mapping[str, Any],
    as_ramp: bool,
) -> Count:
    """Count by what eager code, FlexAttention, SDPA or an engine hides without a mask."""
    queries, device = query.shape[2], query.device
    if kind == "engine":
        if not isinstance(options.get("position_ids"), Tensor):
            raise UsageError(
                "an engine's attention was called without position_ids, so n cannot be known; "
                "run this model with sdpa, eager or flash attention"
            )
        return _positions_spec(query, options).num_visible()
    is_causal = kind == "eager" and _has_table(module, queries, options)
    stands_at = None
    if kind == "sdpa" and queries > 1 and _is_causal(module, options):
        # From the upper left.
        is_causal = True
        if queries > keys:
            stands_at = torch.arange(queries, device=device)
        else:
            keys = queries
    if as_ramp and keys and queries and (queries <= keys or not is_causal):
        return Ramp(keys - queries + 1 if is_causal else keys, keys)
    return MaskSpec(
        num_queries=queries, num_keys=keys, is_causal=is_causal, stands_at=stands_at, device=device
    ).num_visible()


def _has_table(module: nn.Module, queries: int, options: Mapping[str, Any]) -> bool:
    """True where GPT-2's eager code of Transformers 5.1 hides later keys by a table of its own.

    Not in cross attention, nor behind a paged cache, which has eager code of its own.
    """
    table = module._buffers.get("bias") if queries > 1 else None
    if table is None or table.dim() != 4 or table.dtype != torch.bool:
        return False
    return not getattr(module, "is_cross_attention", False) and options.get("cache") is None


def _flash_spec(
    module: nn.Module, query: Tensor, keys: int, mask: Any, options: Mapping[str, Any]
) -> MaskSpec:
    """Lay rows without their padding, or packed documents, end to end, as flash attention does."""
    batch, _, queries, _ = query.shape
    bounds: Tensor | None = None
    stands_at: Tensor | None = None
    if isinstance(mask, Tensor):
        is_token_BK = mask.bool()
        bounds = nn.functional.pad(is_token_BK.sum(-1).cumsum(0), (1, 0))
        rank_BQ = is_token_BK.cumsum(-1)[:, -queries:].clamp_min(1)
        stands_at = bounds[:-1, None] + rank_BQ - 1
    elif (packed := _packed(query, options)) is not None:
        bounds_q, bounds = packed
        index_BQ = torch.arange(batch * queries, device=query.device).view(batch, queries)
        document = torch.searchsorted(bounds_q[1:].contiguous(), index_BQ, right=True)
        # The queries of a document are its last keys.
        offset = (bounds - bounds_q)[1:]
        stands_at = index_BQ + offset[document.clamp_max(offset.shape[0] - 1)]
    if bounds is not None and stands_at is not None:
        keys, stands_at = _ANY_KEYS, torch.minimum(stands_at, bounds[-1] - 1)
    is_causal, window = _is_causal(module, options), options.get("sliding_window")
    left = UNBOUNDED if window is None else window - 1
    return MaskSpec(
        num_queries=queries,
        num_keys=keys,
        is_causal=is_causal,
        window=(left, UNBOUNDED if is_causal else left),
        cu_seqlens=bounds,
        stands_at=stands_at,
        device=query.device,
    )


def _packed(query: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Find where packed documents begin and end, for queries and keys, if flash attention does."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    given: list[Any] = [options.get(name) for name in names]
    if all(value is not None for value in given):
        bounds_q, bounds_k, *_ = given
        if isinstance(bounds_k, Mapping):
            # Continuous batching keeps bounds for every kind of layer, those of windowed layers cut
            # to the window. The widest are those of full ones; the window is this layer's own.
            bounds_k = torch.stack(tuple(bounds_k.values())).amax(0)
        return bounds_q.to(query.device).long(), bounds_k.to(query.device).long()
    positions = options.get("position_ids")
    # Packed documents as Transformers finds them: one row whose positions do not just rise by one.
    if not isinstance(positions, Tensor) or query.shape[0] != 1 or positions.shape[-1] == 1:
        return None
    rising = torch.arange(positions.shape[-1], device=positions.device) + positions.min()
    if not bool((rising != positions).any()):
        return None
    starts = (positions == positions.min()).flatten().nonzero().flatten()
    bounds = nn.functional.pad(starts, (0, 1), value=query.shape[2])
    return bounds, bounds


def _positions_spec(query: Tensor, options: Mapping[str, Any]) -> MaskSpec:
    """Read the positions, those of the sequence, where nothing else is handed over."""
    positions = options["position_ids"]
    window = options.get("sliding_window")
    return MaskSpec(
        num_queries=positions.shape[-1],
        num_keys=_ANY_KEYS,
        is_causal=True,
        window=(UNBOUNDED if window is None else window - 1, UNBOUNDED),
        stands_at=positions.reshape(-1, positions.shape[-1]),
        device=query.device,
    )


def _is_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True)) if given is None else bool(given)
