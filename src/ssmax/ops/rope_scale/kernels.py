"""The Triton kernel of rope_scale, and nothing else that touches a GPU.

One kernel serves both directions: the gradient of a rotation is the rotation turned back, that of a
product with the factor is the same product. One program owns a few tokens of one row and a few
heads of q or of k, so that cos and sin are read once for those heads. Every output element is
written by exactly one program and nothing is added atomically: two runs give the same bits.
Arithmetic is float32 (float64 for float64 inputs) with one rounding at the store; offsets are
64-bit before any product of strides.
"""

# p_ pointer, b_ block, o_ offset, m_ mask, i_ program id; T tokens, H query heads, G key heads

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

# Measured on an H200 (LOG.md): within 3 % of the best in both directions at head widths 64 and 128.
TOKENS_PER_PROGRAM = 16
HEADS_PER_PROGRAM = 2
WARPS_PER_PROGRAM = 4


@triton.jit
def _load(pointer, mask, WIDE: tl.constexpr):
    return tl.load(pointer, mask=mask, other=0.0).to(WIDE)


@triton.jit(do_not_specialize=["T", "blocks_per_row"])
def _turn_kernel(
    p_q, p_k, p_cos, p_sin, p_factor, p_q_out, p_k_out, p_saved_q, p_dfactor,
    T, blocks_per_row, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t,
    qo_b, qo_h, qo_t, ko_b, ko_h, ko_t,
    c_b, c_t, f_b, f_h, f_t,
    sq_b, sq_h, sq_t, df_b, df_h,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr, HEADS: tl.constexpr, DOUBLE: tl.constexpr,
    BACKWARD: tl.constexpr, NEEDS_DFACTOR: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    i_b = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    o_t = (tl.program_id(0) % blocks_per_row).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < T
    o_low = tl.arange(0, BLOCK_HALF)[None, :]
    o_high = HALF + o_low
    o_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    m_half = m_t[:, None] & (o_low < HALF)
    m_rest = m_t[:, None] & (o_rest < 2 * HALF + REST)
    if HALF > 0:
        o_table = i_b * c_b + o_t[:, None] * c_t + o_low
        b_cos = _load(p_cos + o_table, m_half, WIDE)
        b_sin = _load(p_sin + o_table, m_half, WIDE)
        if BACKWARD:
            b_sin = -b_sin

    i_group = tl.program_id(1)
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
        if i_h < num_heads:
            p_row = p_x + i_b * x_b + i_h * x_h + o_t[:, None] * x_t
            p_row_out = p_y + i_b * y_b + i_h * y_h + o_t[:, None] * y_t
            p_row_q = p_saved_q + i_b * sq_b + i_h * sq_h + o_t[:, None] * sq_t
            b_factor = tl.full((BLOCK_T, 1), 1.0, dtype=WIDE)
            if is_query:
                b_factor = _load(p_factor + i_b * f_b + i_h * f_h + o_t * f_t, m_t, WIDE)[:, None]
            b_dfactor = tl.zeros((BLOCK_T,), dtype=WIDE)
            if HALF > 0:
                b_low = _load(p_row + o_low, m_half, WIDE)
                b_high = _load(p_row + o_high, m_half, WIDE)
                b_low_turned = b_low * b_cos - b_high * b_sin
                b_high_turned = b_high * b_cos + b_low * b_sin
                tl.store(p_row_out + o_low, b_low_turned * b_factor, mask=m_half)
                tl.store(p_row_out + o_high, b_high_turned * b_factor, mask=m_half)
                if NEEDS_DFACTOR and is_query:
                    b_q_low = _load(p_row_q + o_low, m_half, WIDE)
                    b_q_high = _load(p_row_q + o_high, m_half, WIDE)
                    b_dfactor += tl.sum(b_low_turned * b_q_low + b_high_turned * b_q_high, axis=1)
            if REST > 0:
                b_rest = _load(p_row + o_rest, m_rest, WIDE)
                tl.store(p_row_out + o_rest, b_rest * b_factor, mask=m_rest)
                if NEEDS_DFACTOR and is_query:
                    b_dfactor += tl.sum(b_rest * _load(p_row_q + o_rest, m_rest, WIDE), axis=1)
            if NEEDS_DFACTOR and is_query:
                tl.store(p_dfactor + i_b * df_b + i_h * df_h + o_t, b_dfactor, mask=m_t)


def forward(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """q rotated and scaled, k rotated, both fresh and laid out as they came."""
    q_out, k_out = torch.empty_like(q_BHTD), torch.empty_like(k_BGTD)
    _launch(q_BHTD, k_BGTD, cos, sin, factor_BHT, q_out, k_out)
    return q_out, k_out


def backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q_BHTD: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    factor_BHT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and, where q is given, the factor's gradient (B, H, T); else an empty tensor."""
    dq, dk = torch.empty_like(dq_out), torch.empty_like(dk_out)
    dfactor = factor_BHT.new_empty(dq.shape[:3] if q_BHTD is not None else (0, 0, 0))
    _launch(
        dq_out, dk_out, cos, sin, factor_BHT, dq, dk,
        saved_q=q_BHTD, dfactor=dfactor, backward=True,
    )  # fmt: skip
    return dq, dk, dfactor


def _launch(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    factor: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    *,
    saved_q: Tensor | None = None,
    dfactor: Tensor | None = None,
    backward: bool = False,
) -> None:
    batch, query_heads, tokens, width = q.shape
    key_heads, half = k.shape[1], cos.shape[-1]
    if batch * tokens * (query_heads + key_heads) * width == 0:
        return
    rest = width - 2 * half
    # A single token, as in decoding, has no neighbours to share its tables with.
    block_t, heads = (TOKENS_PER_PROGRAM, HEADS_PER_PROGRAM) if tokens > 1 else (1, 1)
    blocks_per_row = triton.cdiv(tokens, block_t)
    groups = triton.cdiv(query_heads, heads) + triton.cdiv(key_heads, heads)
    needs_dfactor = saved_q is not None
    q, k = _unit_width_stride(q), _unit_width_stride(k)
    saved_q = q if saved_q is None else _unit_width_stride(saved_q)
    dfactor = factor if dfactor is None else dfactor
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(q.device if q.is_cuda else -1):
        _kernel()[(batch * blocks_per_row, groups)](
            q, k, cos, sin, factor, q_out, k_out, saved_q, dfactor,
            tokens, blocks_per_row, query_heads, key_heads,
            *q.stride()[:3], *k.stride()[:3],
            *q_out.stride()[:3], *k_out.stride()[:3],
            # One table for all rows has a batch stride of 0.
            cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0, cos.stride(-2),
            *factor.stride(), *saved_q.stride()[:3], *dfactor.stride()[:2],
            HALF=half,
            REST=rest,
            BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
            BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
            BLOCK_T=block_t,
            HEADS=heads,
            DOUBLE=q.dtype == torch.float64,
            BACKWARD=backward,
            NEEDS_DFACTOR=needs_dfactor,
            num_warps=WARPS_PER_PROGRAM if tokens > 1 else 1,
        )  # fmt: skip


def _kernel():
    """The kernel as torch.compile can trace it; the interpreter's is traced as a whole op."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _turn_kernel
    return torch.library.wrap_triton(_turn_kernel)


def _unit_width_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
