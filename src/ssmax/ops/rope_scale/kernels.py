"""The Triton kernels of rope_scale, and nothing else that touches a GPU.

One program owns BLOCK_T tokens of one row and a few heads of q or of k, so that cos and sin are
read once for those heads. Every output element is written by exactly one program and nothing is
added atomically: two runs give the same bits. Arithmetic is float32 (float64 for float64 inputs)
with one rounding at the store; offsets are 64-bit before any product of strides.
"""

# p_ pointer, b_ block, o_ offset, i_ program id; T tokens, H query heads, G key heads

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_PER_PROGRAM = 4
TOKENS_PER_PROGRAM = 32


@triton.jit
def _load_tables(p_cos, p_sin, i_b, o_t, o_half, m_half, c_b, c_t, WIDE: tl.constexpr):
    o_table = i_b * c_b + o_t[:, None] * c_t + o_half[None, :]
    b_cos = tl.load(p_cos + o_table, mask=m_half, other=0.0).to(WIDE)
    b_sin = tl.load(p_sin + o_table, mask=m_half, other=0.0).to(WIDE)
    return b_cos, b_sin


@triton.jit(do_not_specialize=["T", "blocks_per_row"])
def _forward_kernel(
    p_q, p_k, p_cos, p_sin, p_factor, p_q_out, p_k_out,
    T, blocks_per_row, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, qo_b, qo_h, qo_t, ko_b, ko_h, ko_t,
    c_b, c_t, f_b, f_h, f_t,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    i_b = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    o_t = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_group = tl.program_id(1)
    m_t = o_t < T
    o_half, o_rest = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    m_half = m_t[:, None] & (o_half < HALF)[None, :]
    m_rest = m_t[:, None] & (o_rest < REST)[None, :]
    if HALF > 0:
        b_cos, b_sin = _load_tables(p_cos, p_sin, i_b, o_t, o_half, m_half, c_b, c_t, WIDE)

    query_groups = tl.cdiv(H, HEADS)
    is_query = i_group < query_groups
    if is_query:
        p_x, x_b, x_h, x_t = p_q, q_b, q_h, q_t
        p_y, y_b, y_h, y_t = p_q_out, qo_b, qo_h, qo_t
        first_head, num_heads = i_group * HEADS, H
    else:
        p_x, x_b, x_h, x_t = p_k, k_b, k_h, k_t
        p_y, y_b, y_h, y_t = p_k_out, ko_b, ko_h, ko_t
        first_head, num_heads = (i_group - query_groups) * HEADS, G

    for i in tl.static_range(HEADS):
        i_h = (first_head + i).to(tl.int64)
        m_h = i_h < num_heads
        o_x = i_b * x_b + i_h * x_h + o_t[:, None] * x_t
        o_y = i_b * y_b + i_h * y_h + o_t[:, None] * y_t
        b_factor = tl.load(
            p_factor + i_b * f_b + i_h * f_h + o_t * f_t, mask=m_t & m_h & is_query, other=1.0
        ).to(WIDE)[:, None]
        if HALF > 0:
            m = m_half & m_h
            b_low = tl.load(p_x + o_x + o_half[None, :], mask=m, other=0.0).to(WIDE)
            b_high = tl.load(p_x + o_x + HALF + o_half[None, :], mask=m, other=0.0).to(WIDE)
            b_low_out = (b_low * b_cos - b_high * b_sin) * b_factor
            b_high_out = (b_high * b_cos + b_low * b_sin) * b_factor
            tl.store(p_y + o_y + o_half[None, :], b_low_out, mask=m)
            tl.store(p_y + o_y + HALF + o_half[None, :], b_high_out, mask=m)
        if REST > 0:
            m = m_rest & m_h
            b_rest = tl.load(p_x + o_x + 2 * HALF + o_rest[None, :], mask=m, other=0.0).to(WIDE)
            tl.store(p_y + o_y + 2 * HALF + o_rest[None, :], b_rest * b_factor, mask=m)


@triton.jit(do_not_specialize=["T", "blocks_per_row"])
def _backward_kernel(
    p_dq_out, p_dk_out, p_q, p_cos, p_sin, p_factor, p_dq, p_dk, p_dfactor,
    T, blocks_per_row, H, G,
    gq_b, gq_h, gq_t, gk_b, gk_h, gk_t, q_b, q_h, q_t,
    dq_b, dq_h, dq_t, dk_b, dk_h, dk_t,
    c_b, c_t, f_b, f_h, f_t, df_b, df_h,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr, NEEDS_FACTOR: tl.constexpr,
):  # fmt: skip
    i_b = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    o_t = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_group = tl.program_id(1)
    m_t = o_t < T
    o_half, o_rest = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    m_half = m_t[:, None] & (o_half < HALF)[None, :]
    m_rest = m_t[:, None] & (o_rest < REST)[None, :]
    if HALF > 0:
        b_cos, b_sin = _load_tables(p_cos, p_sin, i_b, o_t, o_half, m_half, c_b, c_t, WIDE)

    query_groups = tl.cdiv(H, HEADS)
    is_query = i_group < query_groups
    if is_query:
        p_g, g_b, g_h, g_t = p_dq_out, gq_b, gq_h, gq_t
        p_d, d_b, d_h, d_t = p_dq, dq_b, dq_h, dq_t
        first_head, num_heads = i_group * HEADS, H
    else:
        p_g, g_b, g_h, g_t = p_dk_out, gk_b, gk_h, gk_t
        p_d, d_b, d_h, d_t = p_dk, dk_b, dk_h, dk_t
        first_head, num_heads = (i_group - query_groups) * HEADS, G

    for i in tl.static_range(HEADS):
        i_h = (first_head + i).to(tl.int64)
        m_h = i_h < num_heads
        o_g = i_b * g_b + i_h * g_h + o_t[:, None] * g_t
        o_d = i_b * d_b + i_h * d_h + o_t[:, None] * d_t
        o_q = i_b * q_b + i_h * q_h + o_t[:, None] * q_t
        m_query = m_h & is_query
        b_factor = tl.load(
            p_factor + i_b * f_b + i_h * f_h + o_t * f_t, mask=m_t & m_query, other=1.0
        ).to(WIDE)[:, None]
        b_dfactor = tl.zeros((BLOCK_T,), dtype=WIDE)
        if HALF > 0:
            m = m_half & m_h
            b_low = tl.load(p_g + o_g + o_half[None, :], mask=m, other=0.0).to(WIDE)
            b_high = tl.load(p_g + o_g + HALF + o_half[None, :], mask=m, other=0.0).to(WIDE)
            # The rotation's transpose turns the gradient back.
            b_low_back = b_low * b_cos + b_high * b_sin
            b_high_back = b_high * b_cos - b_low * b_sin
            tl.store(p_d + o_d + o_half[None, :], b_low_back * b_factor, mask=m)
            tl.store(p_d + o_d + HALF + o_half[None, :], b_high_back * b_factor, mask=m)
            if NEEDS_FACTOR:
                m = m & is_query
                b_q_low = tl.load(p_q + o_q + o_half[None, :], mask=m, other=0.0).to(WIDE)
                b_q_high = tl.load(p_q + o_q + HALF + o_half[None, :], mask=m, other=0.0).to(WIDE)
                b_dfactor += tl.sum(b_low_back * b_q_low + b_high_back * b_q_high, axis=1)
        if REST > 0:
            m = m_rest & m_h
            b_rest = tl.load(p_g + o_g + 2 * HALF + o_rest[None, :], mask=m, other=0.0).to(WIDE)
            tl.store(p_d + o_d + 2 * HALF + o_rest[None, :], b_rest * b_factor, mask=m)
            if NEEDS_FACTOR:
                m = m & is_query
                b_q = tl.load(p_q + o_q + 2 * HALF + o_rest[None, :], mask=m, other=0.0).to(WIDE)
                b_dfactor += tl.sum(b_rest * b_q, axis=1)
        if NEEDS_FACTOR:
            tl.store(p_dfactor + i_b * df_b + i_h * df_h + o_t, b_dfactor, mask=m_t & m_query)


def forward(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """q rotated and scaled, k rotated, both fresh and laid out as they came."""
    q_BHTD, k_BGTD = _unit_width_stride(q_BHTD), _unit_width_stride(k_BGTD)
    q_out, k_out = torch.empty_like(q_BHTD), torch.empty_like(k_BGTD)
    grid, blocks_per_row, options = _plan(q_BHTD, k_BGTD, cos)
    if grid[0] and grid[1]:
        with _on(q_BHTD.device):
            _forward_kernel[grid](
                q_BHTD, k_BGTD, cos, sin, factor_BHT, q_out, k_out,
                q_BHTD.shape[2], blocks_per_row, q_BHTD.shape[1], k_BGTD.shape[1],
                *q_BHTD.stride()[:3], *k_BGTD.stride()[:3],
                *q_out.stride()[:3], *k_out.stride()[:3],
                *_table_strides(cos), *factor_BHT.stride(),
                **options,
            )  # fmt: skip
    return q_out, k_out


def backward(
    dq_out: Tensor, dk_out: Tensor, q_BHTD: Tensor | None, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and, where q is given, the factor's gradient (B, H, T); else an empty tensor."""
    dq_out, dk_out = _unit_width_stride(dq_out), _unit_width_stride(dk_out)
    dq, dk = torch.empty_like(dq_out), torch.empty_like(dk_out)
    needs_factor = q_BHTD is not None
    dfactor = factor_BHT.new_empty(dq.shape[:3] if needs_factor else (0, 0, 0))
    q_BHTD = _unit_width_stride(q_BHTD) if q_BHTD is not None else dq_out
    grid, blocks_per_row, options = _plan(dq_out, dk_out, cos)
    if grid[0] and grid[1]:
        with _on(dq_out.device):
            _backward_kernel[grid](
                dq_out, dk_out, q_BHTD, cos, sin, factor_BHT, dq, dk, dfactor,
                dq_out.shape[2], blocks_per_row, dq_out.shape[1], dk_out.shape[1],
                *dq_out.stride()[:3], *dk_out.stride()[:3], *q_BHTD.stride()[:3],
                *dq.stride()[:3], *dk.stride()[:3],
                *_table_strides(cos), *factor_BHT.stride(), *dfactor.stride()[:2],
                NEEDS_FACTOR=needs_factor,
                **options,
            )  # fmt: skip
    return dq, dk, dfactor


def _plan(q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor) -> tuple[tuple[int, int], int, dict]:
    batch, query_heads, tokens, width = q_BHTD.shape
    half = cos.shape[-1]
    rest = width - 2 * half
    block_t = min(TOKENS_PER_PROGRAM, triton.next_power_of_2(max(tokens, 1)))
    heads = HEADS_PER_PROGRAM if tokens > 1 else 1
    blocks_per_row = triton.cdiv(tokens, block_t)
    groups = triton.cdiv(query_heads, heads) + triton.cdiv(k_BGTD.shape[1], heads)
    options = {
        "HALF": half,
        "REST": rest,
        "BLOCK_HALF": triton.next_power_of_2(max(half, 1)),
        "BLOCK_REST": triton.next_power_of_2(max(rest, 1)),
        "BLOCK_T": block_t,
        "HEADS": heads,
        "WIDE": tl.float64 if q_BHTD.dtype == torch.float64 else tl.float32,
        "num_warps": 4 if tokens > 1 else 1,
    }
    return (batch * blocks_per_row, groups), blocks_per_row, options


def _table_strides(cos: Tensor) -> tuple[int, int]:
    """(batch, token) strides; the batch stride is 0 where all rows share one table."""
    batch_stride = cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0
    return batch_stride, cos.stride(-2)


def _unit_width_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _on(device: torch.device):
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
