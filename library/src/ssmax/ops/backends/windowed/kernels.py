"""The Triton kernel that merges both halves of a window: one pass instead of six."""

# p_ pointer, b_ block, o_ offset, m_ mask, i_ program id; B batch, N blocks, H heads, W window

import triton
import triton.language as tl
from torch import Tensor

from ssmax.ops.launch import launch

ELEMENTS_PER_PROGRAM = 4096


@triton.jit
def _merge_kernel(
    p_out, p_lse, p_far, p_far_lse, N, H, W,
    out_b, out_n, out_h, out_t, far_b, far_n, far_h, far_t,
    lse_b, lse_n, lse_h, lse_t, flse_b, flse_n, flse_h, flse_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    i_h = (tl.program_id(1) % H).to(tl.int64)
    i_n = (tl.program_id(1) // H % (N - 1)).to(tl.int64)
    i_b = (tl.program_id(1) // H // (N - 1)).to(tl.int64)
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_far = W - 2 - o_t
    m_t = o_t < W - 1
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m = m_t[:, None] & (o_d < D)
    # The first block has none before it.
    p_lse += i_b * lse_b + (i_n + 1) * lse_n + i_h * lse_h + o_t * lse_t
    p_far_lse += i_b * flse_b + i_n * flse_n + i_h * flse_h + o_far * flse_t
    b_near = tl.load(p_lse, mask=m_t, other=0.0)
    b_far = tl.load(p_far_lse, mask=m_t, other=0.0)
    b_most = tl.maximum(b_near, b_far)
    b_lse = b_most + tl.log(tl.exp(b_near - b_most) + tl.exp(b_far - b_most))
    tl.store(p_lse, b_lse, mask=m_t)
    p_row = p_out + i_b * out_b + (i_n + 1) * out_n + i_h * out_h + o_t[:, None] * out_t + o_d
    p_far_row = p_far + i_b * far_b + i_n * far_n + i_h * far_h + o_far[:, None] * far_t + o_d
    b_out = tl.load(p_row, mask=m, other=0.0).to(tl.float32) * tl.exp(b_near - b_lse)[:, None]
    b_out += tl.load(p_far_row, mask=m, other=0.0).to(tl.float32) * tl.exp(b_far - b_lse)[:, None]
    tl.store(p_row, b_out, mask=m)


def merge(out: Tensor, lse: Tensor, far_out: Tensor, far_lse: Tensor) -> None:
    """Merge the halves as `merge_reference` does."""
    batch, blocks, heads, window, width = out.shape
    block_d = triton.next_power_of_2(width)
    block_t = max(ELEMENTS_PER_PROGRAM // block_d, 1)
    assert out.stride(-1) == far_out.stride(-1) == 1
    strides = [n for x in (out, far_out, lse, far_lse) for n in x.stride()[:4]]
    grid = triton.cdiv(window - 1, block_t), batch * (blocks - 1) * heads
    numbers = blocks, heads, window, *strides, width, block_d, block_t
    launch(_merge_kernel, grid, (out, lse, far_out, far_lse), numbers)
