"""The Triton kernels of scale_query: the product, and its gradients.

A program owns a block of tokens of one head of one row. It makes n and log n itself, from the
position or from the counts that it is given, so that nothing but q is read and nothing but the
scaled q is written. The gradients of s and b leave it as one partial sum each, which one reduction
adds up: nothing is added atomically, and two runs give the same bits. Arithmetic is float32 with
one rounding at the store; offsets are 64-bit before any product of strides.
"""

# p_ pointer, b_ block, o_ offset, m_ mask, i_ program id; B batch, T tokens, H heads, D head_dim

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmax.ops.launch import Prepared, unit_stride

ELEMENTS_PER_PROGRAM = 4096


@triton.jit
def _factor(
    p_s, p_bias, p_n, first, most, multiplier, i_b, i_h, o_t, m_t, s_h, bias_h, n_b, n_t,
    HAS_BIAS: tl.constexpr, HAS_N: tl.constexpr,
):  # fmt: skip
    if HAS_N:
        b_n = tl.load(p_n + i_b * n_b + o_t * n_t, mask=m_t, other=1).to(tl.float32)
    else:
        b_n = tl.minimum(o_t + first, most).to(tl.float32)
    b_log_n = tl.log(b_n)
    b_factor = tl.load(p_s + i_h * s_h).to(tl.float32) * b_log_n
    if HAS_BIAS:
        b_factor += tl.load(p_bias + i_h * bias_h).to(tl.float32)
    return b_factor * multiplier, b_log_n


# Not specialised for n: a decoder has another for every token.
@triton.jit(do_not_specialize=["first", "most", "multiplier"])
def _forward_kernel(
    p_q, p_y, p_s, p_bias, p_n, first, most, multiplier, T, H,
    q_b, q_h, q_t, y_b, y_h, y_t, s_h, bias_h, n_b, n_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_N: tl.constexpr,
):  # fmt: skip
    i_b, i_h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_t = o_t < T
    m = m_t[:, None] & (o_d < D)
    b_q = tl.load(p_q + i_b * q_b + i_h * q_h + o_t[:, None] * q_t + o_d, mask=m, other=0.0)
    b_factor, _ = _factor(
        p_s, p_bias, p_n, first, most, multiplier, i_b, i_h, o_t, m_t, s_h, bias_h, n_b, n_t,
        HAS_BIAS, HAS_N,
    )  # fmt: skip
    b_y = b_q.to(tl.float32) * b_factor[:, None]
    tl.store(p_y + i_b * y_b + i_h * y_h + o_t[:, None] * y_t + o_d, b_y, mask=m)


@triton.jit(do_not_specialize=["first", "most", "multiplier"])
def _backward_kernel(
    p_dy, p_q, p_dq, p_parts, p_s, p_bias, p_n, first, most, multiplier, T, H, parts,
    dy_b, dy_h, dy_t, q_b, q_h, q_t, dq_b, dq_h, dq_t, s_h, bias_h, n_b, n_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_N: tl.constexpr, NEEDS_PARTS: tl.constexpr,
):  # fmt: skip
    i_b, i_h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_t = o_t < T
    m = m_t[:, None] & (o_d < D)
    b_dy = tl.load(p_dy + i_b * dy_b + i_h * dy_h + o_t[:, None] * dy_t + o_d, mask=m, other=0.0)
    b_dy = b_dy.to(tl.float32)
    b_factor, b_log_n = _factor(
        p_s, p_bias, p_n, first, most, multiplier, i_b, i_h, o_t, m_t, s_h, bias_h, n_b, n_t,
        HAS_BIAS, HAS_N,
    )  # fmt: skip
    if NEEDS_PARTS:
        b_q = tl.load(p_q + i_b * q_b + i_h * q_h + o_t[:, None] * q_t + o_d, mask=m, other=0.0)
        b_dot = tl.sum(b_dy * b_q.to(tl.float32), axis=1) * multiplier
        # The parts of one head side by side: (2, H, parts), those of s before those of b.
        p_part = p_parts + i_h * parts + i_b * tl.num_programs(0) + tl.program_id(0)
        tl.store(p_part, tl.sum(b_dot * b_log_n, axis=0))
        if HAS_BIAS:
            tl.store(p_part + H.to(tl.int64) * parts, tl.sum(b_dot, axis=0))
    p_row = p_dq + i_b * dq_b + i_h * dq_h + o_t[:, None] * dq_t + o_d
    tl.store(p_row, b_dy * b_factor[:, None], mask=m)


class Scaling:
    """Both kernels, prepared for queries of one shape and layout."""

    def __init__(
        self,
        q_BHTD: Tensor,
        s_H: Tensor,
        bias_H: Tensor | None,
        n: Tensor | None,
        is_per_head: bool,
    ) -> None:
        batch, heads, tokens, width = q_BHTD.shape
        block_d = triton.next_power_of_2(width)
        block_t = min(max(ELEMENTS_PER_PROGRAM // block_d, 1), triton.next_power_of_2(tokens))
        self.is_per_head = is_per_head
        self._device = q_BHTD.device
        self._grid = triton.cdiv(tokens, block_t), batch * heads
        parts = batch * self._grid[0]
        self._parts = (heads, parts) if bias_H is None else (2, heads, parts)
        self._sizes = tokens, heads
        n_b = 0 if n is None or n.dim() == 1 or n.shape[0] == 1 else n.stride(0)
        bias_h = 0 if bias_H is None else bias_H.stride(0)
        self._constants = (
            *(s_H.stride(0), bias_h, n_b, 0 if n is None else n.stride(-1)),
            *(width, block_d, block_t, bias_H is not None, n is not None),
        )
        q = unit_stride(q_BHTD)
        strides = *q.stride()[:3], *torch.empty_like(q).stride()[:3]
        fixed = *self._sizes, *strides, *self._constants
        self._forward = Prepared(_forward_kernel, self._grid, fixed, self._device)
        self._backwards: dict[tuple[tuple[int, ...], bool], Prepared] = {}

    def forward(
        self,
        q_BHTD: Tensor,
        s_H: Tensor,
        bias_H: Tensor | None,
        n: Tensor | None,
        numbers: tuple[int, int, float],
    ) -> Tensor:
        """Compute q (s log n + b) multiplier, laid out as q; `numbers`: first, most, multiplier.

        n of query t is min(first + t, most), or what `n`, (T,) or (B | 1, T), holds for it.
        """
        q = unit_stride(q_BHTD)
        y = torch.empty_like(q)
        self._forward(q, y, s_H, bias_H, n, numbers=numbers)
        return y

    def backward(
        self,
        dy_BHTD: Tensor,
        q_BHTD: Tensor | None,
        s_H: Tensor,
        bias_H: Tensor | None,
        n: Tensor | None,
        numbers: tuple[int, int, float],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute dq and, where q is given, the gradients of s and b."""
        dy, needs_parts = unit_stride(dy_BHTD), q_BHTD is not None
        q = unit_stride(q_BHTD) if needs_parts else dy
        dq = torch.empty_like(dy)
        launch = self._backwards.get((dy.stride(), needs_parts))
        if launch is None:
            strides = *dy.stride()[:3], *q.stride()[:3], *dq.stride()[:3]
            parts = self._parts[-1]
            fixed = *self._sizes, parts, *strides, *self._constants, needs_parts
            launch = Prepared(_backward_kernel, self._grid, fixed, self._device)
            self._backwards[dy.stride(), needs_parts] = launch
        if not needs_parts:
            launch(dy, q, dq, s_H, s_H, bias_H, n, numbers=numbers)
            return dq, None, None
        parts = s_H.new_empty(self._parts)
        launch(dy, q, dq, parts, s_H, bias_H, n, numbers=numbers)
        sums = parts.sum(-1)
        return (dq, sums, None) if bias_H is None else (dq, *sums.unbind())
