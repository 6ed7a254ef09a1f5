"""FlexAttention with a block mask. The factor sits in q: in a score_mod its gradient crawls."""

# B batch, H query heads, G key heads, T queries, S keys, D head width

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssmax.ops.backends.call import Call
from ssmax.ops.visible import MaskSpec

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def attend(call: Call) -> Tensor:
    """Compiled on the GPU; on the CPU, where the compiled form is wrong for short rows, plain."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask_spec, q_BHTD = call.mask_spec, call.q_BHTD
    attention, mask_of = flex_attention, create_block_mask
    if call.on_gpu and not torch.compiler.is_compiling():
        attention, mask_of = _compiled()
    block_mask = None
    if not mask_spec.sees_all:
        block_mask = mask_of(
            _mask_mod(mask_spec),
            q_BHTD.shape[0],
            q_BHTD.shape[1] if mask_spec.mask is not None and mask_spec.mask.shape[1] > 1 else None,
            mask_spec.num_queries,
            mask_spec.num_keys,
            device=str(q_BHTD.device),
        )
    run = functools.partial(
        attention,
        q_BHTD,
        call.k_BGSD,
        call.v_BGSD,
        block_mask=block_mask,
        scale=call.scale,
        enable_gqa=call.is_grouped,
    )
    if torch.compiler.is_compiling():
        return run()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return run()


def unsupported_reason(call: Call) -> str | None:
    """Why FlexAttention cannot serve the call."""
    if call.dropout_p:
        return "it has no dropout"
    if call.mask_spec.bias is not None:
        return "it takes boolean masks, not additive ones"
    if call.wants_gradient and not call.on_gpu:
        return "it has no gradient on the CPU"
    if call.on_gpu and call.q_BHTD.dtype == torch.float64:
        return "it has no float64 on the GPU"
    return None


def _mask_mod(mask_spec: MaskSpec) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The visibility as FlexAttention asks for it: one query and one key at a time."""
    start, stop = (end if end.dim() == 2 else end.unsqueeze(0) for end in mask_spec.ends())
    keep, mask = mask_spec.key_padding_mask, mask_spec.mask

    def at(table: Tensor, *index: Tensor) -> Tensor:
        return table[tuple(i if table.shape[d] > 1 else i * 0 for d, i in enumerate(index))]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j >= at(start, b, i)) & (j < at(stop, b, i))
        if keep is not None:
            seen = seen & at(keep, b, j)
        return seen if mask is None else seen & at(mask, b, h, i, j)

    return visible


@functools.cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., "BlockMask"]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)
