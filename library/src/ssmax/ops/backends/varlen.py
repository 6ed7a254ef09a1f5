"""FlashAttention's variable-length form: bottom-right causality, windows and documents, no mask."""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from ssmax.ops.backends.inputs import AttentionInputs


def attend(inputs: AttentionInputs) -> Tensor:
    """Lay all rows end to end and give the kernel the bounds of rows and documents."""
    mask_spec = inputs.mask_spec
    batch, num_queries, num_keys = inputs.q_BHTD.shape[0], mask_spec.num_queries, mask_spec.num_keys
    # The longest document, or anything above it: reading the true one would wait for the GPU.
    max_queries, max_keys = num_queries, num_keys
    if mask_spec.cu_seqlens is not None:
        cu_queries = cu_keys = _bounds_of_all_rows(mask_spec.cu_seqlens, batch, num_keys)
        if mask_spec.max_seqlen is not None:
            max_queries = max_keys = mask_spec.max_seqlen
    else:
        row = torch.arange(batch + 1, dtype=torch.int32, device=inputs.q_BHTD.device)
        cu_queries, cu_keys = row * num_queries, row * num_keys
    left, right = mask_spec.window
    out = call(
        inputs.q_BHTD.transpose(1, 2).flatten(0, 1),
        inputs.k_BGSD.transpose(1, 2).flatten(0, 1),
        inputs.v_BGSD.transpose(1, 2).flatten(0, 1),
        cu_queries,
        cu_keys,
        max_queries,
        max_keys,
        inputs=inputs,
        window=(left, 0 if mask_spec.is_causal else right),
    )
    return out.unflatten(0, (batch, num_queries)).transpose(1, 2)


def call(*heads_and_bounds: Any, inputs: AttentionInputs, window: tuple[int, int]) -> Tensor:
    """Call the kernel with scale and grouping of `inputs`."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = (
        {"enable_gqa": True} if inputs.is_grouped and _asks_for_grouping() else {}
    )
    out = varlen_attn(*heads_and_bounds, scale=inputs.scale, window_size=window, **options)
    assert isinstance(out, Tensor)
    return out


def unsupported_reason(inputs: AttentionInputs) -> str | None:
    """Say why this kernel cannot serve the call."""
    mask_spec, width = inputs.mask_spec, inputs.q_BHTD.shape[-1]
    if not inputs.on_gpu:
        return f"it needs CUDA tensors, got {inputs.q_BHTD.device}"
    if inputs.q_BHTD.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, got {inputs.q_BHTD.dtype}"
    if width > 256 or width % 8 or inputs.v_BGSD.shape[-1] != width:
        return (
            "it needs one head_dim for keys and values, a multiple of 8 up to 256, "
            f"got {width} and {inputs.v_BGSD.shape[-1]}"
        )
    if inputs.dropout_p:
        return "it has no dropout"
    if not mask_spec.is_interval:
        return "it takes no padding and no explicit mask"
    if mask_spec.positions is not None:
        return "it takes documents as cu_seqlens, not as positions"
    if mask_spec.num_queries > mask_spec.num_keys:
        return f"it needs a key per query, got {mask_spec.num_queries} for {mask_spec.num_keys}"
    if mask_spec.cu_seqlens is not None and mask_spec.num_queries != mask_spec.num_keys:
        return "it needs the queries of whole packed documents"
    return None


def _bounds_of_all_rows(cu_seqlens: Tensor, batch: int, num_keys: int) -> Tensor:
    """Find the bounds of the documents of every row, rows laid end to end."""
    row = torch.arange(batch, device=cu_seqlens.device).unsqueeze(-1) * num_keys
    starts = (row + cu_seqlens[:-1]).flatten()
    return torch.cat((starts, starts.new_full((1,), batch * num_keys))).to(torch.int32)


@functools.cache
def _asks_for_grouping() -> bool:
    """True where torch needs a flag to group heads: 2.11 groups them by their numbers."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
