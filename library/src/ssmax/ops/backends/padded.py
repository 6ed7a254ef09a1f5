"""Causal attention in padded rows without a mask, which would cost four times as much.

Every row is turned until its tokens come first: what pads it is then hidden by causality. Padding
before the tokens sees nothing and gets zeros; padding behind them sees all tokens, and gets them
from variable-length attention. Where the padding lies is read once for a mask, which is one wait
for the device.
"""

# B batch, H query heads, T tokens, D head_dim

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmax.ops.backends import varlen
from ssmax.ops.backends.inputs import AttentionInputs

FEWEST_TOKENS = 1024
"""Shorter rows are over before they are turned."""
_KNOWN = "_ssmax_padding"


class Padding(NamedTuple):
    """Where the padding of a batch lies, in places of its rows laid end to end."""

    turn: tuple[Tensor, Tensor] | None
    """The place that each token comes from, and where each went; None: all rows begin with one."""
    is_before_BT: Tensor | None
    """True for padding before the tokens."""
    behind: tuple[Tensor, ...] | None
    """Places of padding behind the tokens, and of tokens, with the bounds of both by row."""
    longest: tuple[int, int]
    """The most padding behind the tokens, and the most tokens, of a row."""


def padding_of(inputs: AttentionInputs) -> Padding | None:
    """Find the padding, if turning rows serves the call; None where a mask has to."""
    spec = inputs.mask_spec
    keep_BT = spec.key_padding_mask
    if (
        not inputs.on_gpu
        or type(keep_BT) is not Tensor
        or keep_BT.is_inference()
        or spec.num_queries < FEWEST_TOKENS
        or torch.compiler.is_compiling()
        or torch.cuda.is_current_stream_capturing()
        or not (plain := _plain(inputs)).mask_spec.is_plain_causal
        or varlen.unsupported_reason(plain) is not None
    ):
        return None
    known = getattr(keep_BT, _KNOWN, None)
    if known is None or known[0] != keep_BT._version:
        known = keep_BT._version, _find(keep_BT.expand(inputs.q_BHTD.shape[0], -1))
        setattr(keep_BT, _KNOWN, known)
    return known[1]


def attend(
    inputs: AttentionInputs, padding: Padding, attend_plain: Callable[[AttentionInputs], Tensor]
) -> Tensor:
    """Attend causally in padded rows; `attend_plain` does in rows without padding."""
    plain, turn = _plain(inputs), padding.turn
    if turn is not None:
        q, k, v = (_Turned.apply(x, *turn) for x in (plain.q_BHTD, plain.k_BGSD, plain.v_BGSD))
        plain = replace(plain, q_BHTD=q, k_BGSD=k, v_BGSD=v)
    out: Any = attend_plain(plain)
    if turn is not None:
        out = _Turned.apply(out, *turn[::-1])
    if padding.behind is not None:
        queries, keys, cu_queries, cu_keys = padding.behind
        seen = varlen.call(
            _rows(inputs.q_BHTD).index_select(0, queries),
            _rows(inputs.k_BGSD).index_select(0, keys),
            _rows(inputs.v_BGSD).index_select(0, keys),
            *(cu_queries, cu_keys, *padding.longest),
            inputs=inputs,
            window=(-1, -1),
        )
        out = _rows(out).index_copy(0, queries, seen)
        out = out.unflatten(0, (inputs.q_BHTD.shape[0], -1)).transpose(1, 2)
    if padding.is_before_BT is not None:
        out = out.masked_fill(padding.is_before_BT[:, None, :, None], 0.0)
    return out


class _Turned(torch.autograd.Function):
    """Tokens in another order, whose gradient goes back by the order's inverse."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        rows = _rows(x_BHTD).index_select(0, order)
        return rows.unflatten(0, (x_BHTD.shape[0], -1)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        return _Turned.apply(gradients[0], inverse, order), None, None


def _find(keep_BT: Tensor) -> Padding | None:
    """Find the padding of rows whose tokens stand together; None for others."""
    batch, tokens = keep_BT.shape
    index = torch.arange(tokens, device=keep_BT.device)
    kept_B1 = keep_BT.sum(-1, keepdim=True)
    # The first of the largest: the first token; a row without one is all before it.
    start_B1 = torch.where(kept_B1 > 0, keep_BT.int().argmax(-1, keepdim=True), tokens)
    stop_B1 = start_B1 + kept_B1
    together = (keep_BT == ((start_B1 <= index) & (index < stop_B1))).all()
    numbers = torch.stack(
        (together, start_B1.max(), (tokens - stop_B1).max(), kept_B1.max())
    ).tolist()
    is_together, most_before, most_behind, most_kept = numbers
    if not is_together:
        return None
    turn = is_before = behind = None
    if most_before:
        first = torch.arange(batch, device=keep_BT.device).unsqueeze(-1) * tokens
        to_front, back = (first + (index + by) % tokens for by in (start_B1, -start_B1))
        turn, is_before = (to_front.flatten(), back.flatten()), index < start_B1
    if most_behind:
        places = ((index >= stop_B1).flatten().nonzero(), keep_BT.flatten().nonzero())
        lengths = (tokens - stop_B1, kept_B1)
        behind = (*(place.squeeze(-1) for place in places), *map(_bounds, lengths))
    return Padding(turn, is_before, behind, (most_behind, most_kept))


def _bounds(lengths_B1: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths_B1.flatten().cumsum(0), (1, 0)).to(torch.int32)


def _rows(x_BHTD: Tensor) -> Tensor:
    """Lay all rows of the batch end to end, (B T, H, D)."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def _plain(inputs: AttentionInputs) -> AttentionInputs:
    """Take the padding away."""
    return replace(inputs, mask_spec=replace(inputs.mask_spec, key_padding_mask=None))
