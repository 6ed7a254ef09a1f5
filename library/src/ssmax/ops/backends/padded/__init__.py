"""Causal attention in padded rows without a mask, which would cost four times as much.

Every row is turned until its tokens come first: what pads it is then hidden by causality. Padding
before the tokens sees nothing and gets zeros; padding behind them sees all tokens, and gets them
from variable-length attention. Where the padding lies is read once for a mask, which is one wait
for the device.
"""

# B batch, H query heads, T tokens, D head_dim

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmax.ops.backends import varlen
from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.implementation import choose_impl
from ssmax.ops.visible import is_eager

FEWEST_TOKENS = 1024
"""Shorter rows are over before they are turned."""
_KNOWN = "_ssmax_padding"


class Padding(NamedTuple):
    """Where the padding of a batch lies."""

    start_B: Tensor | None
    """The first token of every row; None: all rows begin with one."""
    behind: tuple[Tensor, ...] | None
    """Places of padding behind the tokens, and of tokens, in rows laid end to end, with the bounds
    of both by row."""
    longest: tuple[int, int]
    """The most padding behind the tokens, and the most tokens, of a row."""


def padding_of(inputs: AttentionInputs) -> Padding | None:
    """Find the padding, if turning rows serves the call; None where a mask has to."""
    spec = inputs.mask_spec
    keep_BT = spec.key_padding_mask
    if (
        not inputs.on_gpu
        or keep_BT is None
        # Asked first: a compiler cannot trace the next question.
        or not is_eager(keep_BT)
        or keep_BT.is_inference()
        or spec.num_queries < FEWEST_TOKENS
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
    plain, start_B = _plain(inputs), padding.start_B
    if start_B is not None:
        q, k, v = (
            _Turned.apply(x, start_B, False) for x in (plain.q_BHTD, plain.k_BGSD, plain.v_BGSD)
        )
        plain = replace(plain, q_BHTD=q, k_BGSD=k, v_BGSD=v)
    out: Any = attend_plain(plain)
    if start_B is not None:
        out = _Turned.apply(out, start_B, True)
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
    return out


class _Turned(torch.autograd.Function):
    """Rows whose tokens come first, padding before them last and 0; or, `back`, as they were."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, start_B: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(start_B)
        ctx.back = back
        by_kernel = choose_impl("auto", x_BHTD.device) == "triton"
        turn = _kernels().turn if by_kernel else turn_reference
        return turn(x_BHTD, start_B, back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (start_B,) = ctx.saved_tensors
        return _Turned.apply(gradients[0], start_B, not ctx.back), None, None


def turn_reference(x_BHTD: Tensor, start_B: Tensor, back: bool) -> Tensor:
    """Turn rows by their first token; what was padding before it is 0."""
    tokens = x_BHTD.shape[2]
    index = torch.arange(tokens, device=x_BHTD.device)
    start_B1 = start_B.unsqueeze(-1)
    from_BT = index - start_B1 if back else index + start_B1
    is_padding_BT = (from_BT < 0) | (from_BT >= tokens)
    place = from_BT.clamp(0, tokens - 1)[:, None, :, None].expand_as(x_BHTD)
    return x_BHTD.gather(2, place).masked_fill(is_padding_BT[:, None, :, None], 0.0)


@functools.cache
def _kernels() -> Any:
    """Import the kernel, and with it Triton."""
    from ssmax.ops.backends.padded import kernels

    return kernels


def _find(keep_BT: Tensor) -> Padding | None:
    """Find the padding of rows whose tokens stand together; None for others."""
    tokens = keep_BT.shape[1]
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
    behind = None
    if most_behind:
        places = ((index >= stop_B1).flatten().nonzero(), keep_BT.flatten().nonzero())
        lengths = (tokens - stop_B1, kept_B1)
        behind = (*(place.squeeze(-1) for place in places), *map(_bounds, lengths))
    start_B = start_B1.squeeze(-1) if most_before else None
    return Padding(start_B, behind, (most_behind, most_kept))


def _bounds(lengths_B1: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths_B1.flatten().cumsum(0), (1, 0)).to(torch.int32)


def _rows(x_BHTD: Tensor) -> Tensor:
    """Lay all rows of the batch end to end, (B T, H, D)."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def _plain(inputs: AttentionInputs) -> AttentionInputs:
    """Take the padding away."""
    return replace(inputs, mask_spec=replace(inputs.mask_spec, key_padding_mask=None))
