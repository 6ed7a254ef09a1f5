"""FlashAttention's variable-length form: bottom-right causality, windows and documents, no mask."""

# B batch, H query heads, G key heads, T queries, S keys, D head width

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from ssmax.ops.backends.call import Call


def attend(call: Call) -> Tensor:
    """All rows laid end to end, the bounds of rows and documents told to the kernel."""
    from torch.nn.attention.varlen import varlen_attn

    sight = call.sight
    batch, num_queries, num_keys = call.q_BHTD.shape[0], sight.num_queries, sight.num_keys
    # The longest document, or anything above it: reading the true one would wait for the GPU.
    max_queries, max_keys = num_queries, num_keys
    if sight.cu_seqlens is not None:
        cu_queries = cu_keys = _bounds_of_all_rows(sight.cu_seqlens, batch, num_keys)
        max_queries = max_keys = sight.max_seqlen
    else:
        row = torch.arange(batch + 1, dtype=torch.int32, device=call.q_BHTD.device)
        cu_queries, cu_keys = row * num_queries, row * num_keys
    left, right = sight.window
    options: dict[str, Any] = (
        {"enable_gqa": True} if call.is_grouped and _asks_for_grouping() else {}
    )
    out = varlen_attn(
        call.q_BHTD.transpose(1, 2).flatten(0, 1),
        call.k_BGSD.transpose(1, 2).flatten(0, 1),
        call.v_BGSD.transpose(1, 2).flatten(0, 1),
        cu_queries,
        cu_keys,
        max_queries,
        max_keys,
        scale=call.scale,
        window_size=(left, 0 if sight.is_causal else right),
        **options,
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, num_queries)).transpose(1, 2)


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call."""
    sight, width = call.sight, call.q_BHTD.shape[-1]
    if not call.on_gpu:
        return f"it needs CUDA tensors, got {call.q_BHTD.device}"
    if call.q_BHTD.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, got {call.q_BHTD.dtype}"
    if width > 256 or width % 8 or call.v_BGSD.shape[-1] != width:
        return (
            "it needs one head width for keys and values, a multiple of 8 up to 256, "
            f"got {width} and {call.v_BGSD.shape[-1]}"
        )
    if call.dropout_p:
        return "it has no dropout"
    if not sight.is_interval:
        return "it takes no padding and no explicit mask"
    if sight.positions is not None:
        return "it takes documents as cu_seqlens, not as positions"
    if sight.num_queries > sight.num_keys:
        return f"it needs a key per query, got {sight.num_queries} for {sight.num_keys}"
    if sight.cu_seqlens is not None and sight.num_queries != sight.num_keys:
        return "it needs the queries of whole packed documents"
    return None


def _bounds_of_all_rows(cu_seqlens: Tensor, batch: int, num_keys: int) -> Tensor:
    """The bounds of the documents of every row, rows laid end to end."""
    row = torch.arange(batch, device=cu_seqlens.device).unsqueeze(-1) * num_keys
    starts = (row + cu_seqlens[:-1]).flatten()
    return torch.cat((starts, starts.new_full((1,), batch * num_keys))).to(torch.int32)


@functools.cache
def _asks_for_grouping() -> bool:
    """torch 2.11 groups heads by their numbers alone; later releases want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
