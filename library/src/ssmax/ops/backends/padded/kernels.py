"""The Triton kernel that turns padded rows: every token is read and written once."""

# p_ pointer, b_ block, o_ offset, m_ mask, i_ program id; B batch, H heads, T tokens, D head_dim

import triton
import triton.language as tl
from torch import Tensor

from ssmax.ops.launch import launch, unit_stride

ELEMENTS_PER_PROGRAM = 4096


@triton.jit
def _turn_kernel(
    p_x, p_y, p_start, T, H, x_b, x_h, x_t, y_b, y_h, y_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    i_b, i_h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    start = tl.load(p_start + i_b)
    o_from = o_t - start if BACK else o_t + start
    m = (o_t < T)[:, None] & (o_d < D)
    m_from = m & ((o_from >= 0) & (o_from < T))[:, None]
    b_x = tl.load(p_x + i_b * x_b + i_h * x_h + o_from[:, None] * x_t + o_d, mask=m_from, other=0.0)
    tl.store(p_y + i_b * y_b + i_h * y_h + o_t[:, None] * y_t + o_d, b_x, mask=m)


def turn(x_BHTD: Tensor, start_B: Tensor, back: bool) -> Tensor:
    """Turn rows as `turn_reference` does, into one layout, whatever that of x is.

    cuDNN's backward keeps its plan by the layout of q, k and v alone (torch 2.11): a gradient that
    is laid out otherwise than the first of its shape was would be read wrongly.
    """
    batch, heads, tokens, width = x_BHTD.shape
    x = unit_stride(x_BHTD)
    y = x.new_empty((batch, tokens, heads, width)).transpose(1, 2)
    block_d = triton.next_power_of_2(width)
    block_t = max(ELEMENTS_PER_PROGRAM // block_d, 1)
    numbers = tokens, heads, *x.stride()[:3], *y.stride()[:3], width, block_d, block_t, back
    grid = triton.cdiv(tokens, block_t), batch * heads
    launch(_turn_kernel, grid, (x, y, start_B), numbers)
    return y
