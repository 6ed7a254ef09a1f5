"""The Triton kernels of rope_scale, and nothing else that touches a GPU.

One kernel serves both directions: the gradient of a rotation is the rotation turned back, that of a
product with the factor is the same product. One program owns a few tokens of one head of q or of k
in a few rows of the batch: tables and factors that the rows share are read once for all of them,
and the factor's gradient leaves the program summed over them. A second kernel is the step of a
decoder, where one launch is what counts: it makes the factor from s, b and n itself.
Every output element is written by exactly one program and nothing is added atomically: two runs
give the same bits. Arithmetic is float32 (in training float64 for float64 inputs) with one rounding
at the store; offsets are 64-bit before any product of strides.
"""

# p_ pointer, b_ block, o_ offset, m_ mask, i_ program id; T tokens, H query heads, G key heads

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmax.ops.launch import Launch, launch, unit_stride

# Measured on an H200 (LOG.md): within 3 % of the best in both directions at head_dim 64 and 128.
TOKENS_PER_PROGRAM = 16
ROWS_PER_PROGRAM = 8
WARPS_PER_PROGRAM = 4
LOADS_AHEAD = 2
HEADS_PER_STEP = 8


@triton.jit
def _load(pointer, mask, other, WIDE: tl.constexpr):
    return tl.load(pointer, mask=mask, other=other).to(WIDE)


@triton.jit
def _load_tables(p_cos, p_sin, o_table, mask, WIDE: tl.constexpr, BACKWARD: tl.constexpr):
    b_cos = _load(p_cos + o_table, mask, 0.0, WIDE)
    b_sin = _load(p_sin + o_table, mask, 0.0, WIDE)
    return b_cos, -b_sin if BACKWARD else b_sin


@triton.jit(do_not_specialize=["B", "T", "blocks_per_row"])
def _turn_kernel(
    p_q, p_k, p_cos, p_sin, p_factor, p_q_out, p_k_out, p_saved_q, p_dfactor,
    B, T, blocks_per_row, H,
    q_b, q_h, q_t, k_b, k_h, k_t,
    qo_b, qo_h, qo_t, ko_b, ko_h, ko_t,
    c_b, c_t, f_b, f_h, f_t,
    sq_b, sq_h, sq_t, df_b, df_h,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, DOUBLE: tl.constexpr,
    ONE_TABLE: tl.constexpr, ONE_FACTOR: tl.constexpr,
    BACKWARD: tl.constexpr, NEEDS_DFACTOR: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    i_chunk = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    o_t = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < T
    o_low = tl.arange(0, BLOCK_HALF)[None, :]
    o_high = HALF + o_low
    o_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    m_half = m_t[:, None] & (o_low < HALF)
    m_rest = m_t[:, None] & (o_rest < 2 * HALF + REST)
    o_table = o_t[:, None] * c_t + o_low
    if HALF > 0 and ONE_TABLE:
        b_cos, b_sin = _load_tables(p_cos, p_sin, o_table, m_half, WIDE, BACKWARD)

    i_h = tl.program_id(1).to(tl.int64)
    is_query = i_h < H
    # Keys have the factor 1, and nothing to read or write for its gradient.
    m_query = o_t < tl.where(is_query, T, 0)
    m_query_half = m_query[:, None] & (o_low < HALF)
    m_query_rest = m_query[:, None] & (o_rest < 2 * HALF + REST)
    if is_query:
        p_x, x_b, x_h, x_t = p_q, q_b, q_h, q_t
        p_y, y_b, y_h, y_t = p_q_out, qo_b, qo_h, qo_t
    else:
        i_h -= H
        p_x, x_b, x_h, x_t = p_k, k_b, k_h, k_t
        p_y, y_b, y_h, y_t = p_k_out, ko_b, ko_h, ko_t

    p_head_factor = p_factor + i_h * f_h + o_t * f_t
    p_head_dfactor = p_dfactor + i_h * df_h + o_t
    if ONE_FACTOR:
        b_factor = _load(p_head_factor, m_query, 1.0, WIDE)[:, None]
    b_product = tl.zeros((BLOCK_T, BLOCK_HALF), dtype=WIDE)
    b_product_rest = tl.zeros((BLOCK_T, BLOCK_REST), dtype=WIDE)
    last = tl.minimum(i_chunk * ROWS + ROWS, B)
    for i_b in tl.range(i_chunk * ROWS, last, num_stages=STAGES):
        if not ONE_FACTOR:
            b_factor = _load(p_head_factor + i_b * f_b, m_query, 1.0, WIDE)[:, None]
        p_row = p_x + i_b * x_b + i_h * x_h + o_t[:, None] * x_t
        p_row_out = p_y + i_b * y_b + i_h * y_h + o_t[:, None] * y_t
        p_row_q = p_saved_q + i_b * sq_b + i_h * sq_h + o_t[:, None] * sq_t
        # All loads come before the first store: no load may be moved across it.
        if HALF > 0:
            if not ONE_TABLE:
                b_cos, b_sin = _load_tables(
                    p_cos, p_sin, i_b * c_b + o_table, m_half, WIDE, BACKWARD
                )
            b_low = _load(p_row + o_low, m_half, 0.0, WIDE)
            b_high = _load(p_row + o_high, m_half, 0.0, WIDE)
            b_low_turned = b_low * b_cos - b_high * b_sin
            b_high_turned = b_high * b_cos + b_low * b_sin
            if NEEDS_DFACTOR:
                b_product += b_low_turned * _load(p_row_q + o_low, m_query_half, 0.0, WIDE)
                b_product += b_high_turned * _load(p_row_q + o_high, m_query_half, 0.0, WIDE)
        if REST > 0:
            b_rest = _load(p_row + o_rest, m_rest, 0.0, WIDE)
            if NEEDS_DFACTOR:
                b_product_rest += b_rest * _load(p_row_q + o_rest, m_query_rest, 0.0, WIDE)
            tl.store(p_row_out + o_rest, b_rest * b_factor, mask=m_rest)
        if HALF > 0:
            tl.store(p_row_out + o_low, b_low_turned * b_factor, mask=m_half)
            tl.store(p_row_out + o_high, b_high_turned * b_factor, mask=m_half)
        if NEEDS_DFACTOR and not ONE_FACTOR:
            b_dfactor = tl.sum(b_product, axis=1) + tl.sum(b_product_rest, axis=1)
            tl.store(p_head_dfactor + i_b * df_b, b_dfactor, mask=m_query)
            b_product = tl.zeros((BLOCK_T, BLOCK_HALF), dtype=WIDE)
            b_product_rest = tl.zeros((BLOCK_T, BLOCK_REST), dtype=WIDE)
    if NEEDS_DFACTOR and ONE_FACTOR:
        b_dfactor = tl.sum(b_product, axis=1) + tl.sum(b_product_rest, axis=1)
        tl.store(p_head_dfactor + i_chunk * df_b, b_dfactor, mask=m_query)


@triton.jit
def _step_kernel(
    p_q, p_k, p_cos, p_sin, p_n, p_s, p_bias, p_q_out, p_k_out, H, heads,
    q_b, q_h, k_b, k_h, qo_b, qo_h, ko_b, ko_h, c_b, n_b,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(1).to(tl.int64)
    o_h = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    m_h, m_query = o_h < heads, o_h < H
    b_n = tl.load(p_n + i_b * n_b).to(tl.float32)
    b_s = tl.load(p_s + o_h, mask=m_query, other=0.0)
    b_bias = tl.load(p_bias + o_h, mask=m_query, other=0.0) if HAS_BIAS else 0.0
    # Chosen element by element: a branch, though all its threads agree, takes 0.25 us.
    p_x = tl.where(m_query, p_q + i_b * q_b + o_h * q_h, p_k + i_b * k_b + (o_h - H) * k_h)
    p_y = tl.where(
        m_query, p_q_out + i_b * qo_b + o_h * qo_h, p_k_out + i_b * ko_b + (o_h - H) * ko_h
    )
    o_low = tl.arange(0, BLOCK_HALF)[None, :]
    o_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    m_half, m_rest = m_h & (o_low < HALF), m_h & (o_rest < 2 * HALF + REST)
    b_low = _load(p_x + o_low, m_half, 0.0, tl.float32)
    b_high = _load(p_x + HALF + o_low, m_half, 0.0, tl.float32)
    b_cos, b_sin = _load_tables(p_cos, p_sin, i_b * c_b + o_low, o_low < HALF, tl.float32, False)
    if REST > 0:
        b_rest = _load(p_x + o_rest, m_rest, 0.0, tl.float32)
    b_factor = tl.where(m_query, b_s * tl.log(b_n) + b_bias, 1.0)
    if REST > 0:
        tl.store(p_y + o_rest, b_rest * b_factor, mask=m_rest)
    tl.store(p_y + o_low, (b_low * b_cos - b_high * b_sin) * b_factor, mask=m_half)
    tl.store(p_y + HALF + o_low, (b_high * b_cos + b_low * b_sin) * b_factor, mask=m_half)


def step(
    q_BH1D: Tensor,
    k_BG1D: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_keys: Tensor,
    s_H: Tensor,
    bias_H: Tensor | None,
    *,
    launch: Launch = launch,
) -> tuple[Tensor, Tensor]:
    """One token of a decoder: q rotated and times s log n + b, k rotated, in one launch.

    `num_keys` is (1,) for all rows or (B, 1); float32 throughout, so not for float64.
    """
    batch, query_heads, _, width = q_BH1D.shape
    kv_heads, half = k_BG1D.shape[1], cos.shape[-1]
    q, k = unit_stride(q_BH1D), unit_stride(k_BG1D)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    rest = width - 2 * half
    one_table = cos.dim() == 2 or cos.shape[0] == 1
    launch(
        _step_kernel,
        (triton.cdiv(query_heads + kv_heads, HEADS_PER_STEP), batch),
        (q, k, cos, sin, num_keys, s_H, s_H if bias_H is None else bias_H, q_out, k_out),
        (
            *(query_heads, query_heads + kv_heads),
            *(*q.stride()[:2], *k.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2]),
            0 if one_table else cos.stride(0),
            0 if num_keys.numel() == 1 else num_keys.stride(0),
            *_widths(half, rest),
            HEADS_PER_STEP,
            bias_H is not None,
        ),
        num_warps=WARPS_PER_PROGRAM,
    )
    return q_out, k_out


def forward(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    cos: Tensor,
    sin: Tensor,
    factor: Tensor,
    *,
    launch: Launch = launch,
) -> tuple[Tensor, Tensor]:
    """q rotated and scaled, k rotated, both fresh and laid out as they came.

    `factor` is (B, H, T), or (1, H, T) where all rows share it.
    """
    q, k = unit_stride(q_BHTD), unit_stride(k_BGTD)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _turn(launch, q, k, cos, sin, factor, q_out, k_out)
    return q_out, k_out


def backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q_BHTD: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    factor: Tensor,
    *,
    launch: Launch = launch,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and, where q is given, the factor's gradient; else an empty tensor."""
    dq_out, dk_out = unit_stride(dq_out), unit_stride(dk_out)
    dq, dk = torch.empty_like(dq_out), torch.empty_like(dk_out)
    if q_BHTD is None:
        _turn(launch, dq_out, dk_out, cos, sin, factor, dq, dk, backward=True)
        return dq, dk, factor.new_empty(0)
    batch, *heads_and_tokens = dq.shape[:3]
    is_shared = factor.shape[0] == 1
    parts = triton.cdiv(batch, ROWS_PER_PROGRAM) if is_shared else batch
    dfactor = factor.new_empty(parts, *heads_and_tokens)
    _turn(launch, dq_out, dk_out, cos, sin, factor, dq, dk, q_BHTD, dfactor, backward=True)
    return dq, dk, dfactor.sum(0, keepdim=True) if is_shared else dfactor


def _turn(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    factor: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    saved_q: Tensor | None = None,
    dfactor: Tensor | None = None,
    *,
    backward: bool = False,
) -> None:
    batch, query_heads, tokens, width = q.shape
    kv_heads, half = k.shape[1], cos.shape[-1]
    if batch * tokens * (query_heads + kv_heads) * width == 0:
        return
    rest = width - 2 * half
    one_table = cos.dim() == 2 or cos.shape[0] == 1
    block_t = TOKENS_PER_PROGRAM if tokens > 1 else 1
    blocks_per_row = triton.cdiv(tokens, block_t)
    programs = triton.cdiv(batch, ROWS_PER_PROGRAM) * blocks_per_row
    needs_dfactor = saved_q is not None
    saved_q = q if saved_q is None else unit_stride(saved_q)
    dfactor = factor if dfactor is None else dfactor
    launch(
        _turn_kernel,
        (programs, query_heads + kv_heads),
        (q, k, cos, sin, factor, q_out, k_out, saved_q, dfactor),
        (
            *(batch, tokens, blocks_per_row, query_heads),
            *(*q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3]),
            *(0 if one_table else cos.stride(0), cos.stride(-2)),
            *(*factor.stride(), *saved_q.stride()[:3], *dfactor.stride()[:2]),
            *_widths(half, rest),
            *(block_t, ROWS_PER_PROGRAM, LOADS_AHEAD, q.dtype == torch.float64),
            *(one_table, factor.shape[0] == 1, backward, needs_dfactor),
        ),
        num_warps=WARPS_PER_PROGRAM if tokens > 1 else 1,
    )


def _widths(half: int, rest: int) -> tuple[int, int, int, int]:
    """Half of what turns, what does not, and the powers of two that hold them."""
    powers = (triton.next_power_of_2(max(width, 1)) for width in (half, rest))
    return half, rest, *powers
