"""The Triton kernels of a decoding step's attention: keys in parts, then the parts together.

One query cannot fill a GPU, its keys can: each program takes a part of one key head's keys for all
query heads that share it, and leaves its maximum, its sum and its weighted values; a second kernel
joins the parts. How many parts there are follows from the room in the cache, how long each is from
the bounds on the device: the launch is the same for every length. Arithmetic is float32 with one
rounding at the end; offsets are 64-bit; nothing is added atomically.
"""

# p_ pointer, b_ block, o_ offset, m_ mask, i_ program id
# B batch, H query heads, G key heads, M query heads that share a key head, D head_dim

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmax.ops.implementation import traceable
from ssmax.ops.launch import unit_stride

KEYS_AT_A_TIME = 128
BYTES_AT_A_TIME = 1 << 14
"""Of keys, likewise of values: wide heads take fewer, or the loads ahead would not fit the chip."""
FEWEST_KEYS_OF_A_PART = 128
PROGRAMS_TOGETHER = 264
"""Parts are made until so many programs run: two for every multiprocessor of an H200."""
WARPS_PER_PROGRAM = 4
LOADS_AHEAD = 3
_LOG2_E = 1.4426950408889634


@triton.jit
def _part_kernel(
    p_q, p_k, p_v, p_start, p_stop, p_values, p_largest, p_total, scale,
    G, parts, room,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s,
    M: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_part = tl.program_id(0)
    i_b, i_g = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    # Whatever the bounds say, nothing is read outside of the cache.
    start = tl.maximum(tl.load(p_start + i_b).to(tl.int64), 0)
    stop = tl.minimum(tl.load(p_stop + i_b).to(tl.int64), room)
    # Whole blocks to every part: the last ones may have none.
    keys = (tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), BLOCK_S), parts)) * BLOCK_S
    first = start + i_part * keys
    last = tl.minimum(first + keys, stop)

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    m_q = (o_m < M)[:, None] & m_d[None, :]
    p_rows = p_q + i_b * q_b + (i_g * M + o_m)[:, None] * q_h
    p_keys = p_k + i_b * k_b + i_g * k_h + o_d[None, :]
    p_worth = p_v + i_b * v_b + i_g * v_h + o_d[None, :]
    b_q = tl.load(p_rows + o_d[None, :], mask=m_q, other=0.0).to(tl.float32)
    b_largest = tl.full((BLOCK_M,), -3.4028234663852886e38, tl.float32)
    b_total = tl.zeros((BLOCK_M,), tl.float32)
    b_values = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for s in tl.range(first, last, BLOCK_S, num_stages=STAGES):
        o_s = (s + tl.arange(0, BLOCK_S))[:, None]
        m_kv = (o_s < last) & m_d[None, :]
        b_k = tl.load(p_keys + o_s * k_s, mask=m_kv, other=0.0).to(tl.float32)
        b_v = tl.load(p_worth + o_s * v_s, mask=m_kv, other=0.0).to(tl.float32)
        if BLOCK_M == 1:
            b_logits = tl.sum(b_q * b_k, axis=1)[None, :]
        else:
            b_logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        m_s = s + tl.arange(0, BLOCK_S) < last
        b_logits = tl.where(m_s[None, :], b_logits * scale, float("-inf"))
        b_raised = tl.maximum(b_largest, tl.max(b_logits, axis=1))
        b_weights = tl.exp2(b_logits - b_raised[:, None])
        b_shrink = tl.exp2(b_largest - b_raised)
        b_total = b_total * b_shrink + tl.sum(b_weights, axis=1)
        if BLOCK_M == 1:
            b_new = tl.sum(tl.trans(b_weights) * b_v, axis=0)[None, :]
        else:
            b_new = tl.dot(b_weights, b_v, input_precision=PRECISION)
        b_values = b_values * b_shrink[:, None] + b_new
        b_largest = b_raised

    # (B, H, parts): heads of one group lie together.
    o_part = ((i_b * G + i_g) * M + o_m) * parts + i_part
    tl.store(p_largest + o_part, b_largest, mask=o_m < M)
    tl.store(p_total + o_part, b_total, mask=o_m < M)
    tl.store(p_values + o_part[:, None] * D + o_d[None, :], b_values, mask=m_q)


@triton.jit
def _join_kernel(
    p_values, p_largest, p_total, p_out, H, parts, out_b, out_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_part, o_d = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_D)
    m_part, m_d = o_part < parts, o_d < D
    o_row = (i_b * H + i_h) * parts + o_part
    b_total = tl.load(p_total + o_row, mask=m_part, other=0.0)
    b_largest = tl.load(p_largest + o_row, mask=m_part, other=-3.4028234663852886e38)
    b_values = tl.load(
        p_values + o_row[:, None] * D + o_d[None, :],
        mask=m_part[:, None] & m_d[None, :],
        other=0.0,
    )
    b_share = tl.exp2(b_largest - tl.max(b_largest, axis=0))
    total = tl.sum(b_total * b_share, axis=0)
    b_out = tl.sum(b_values * b_share[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(p_out + i_b * out_b + i_h * out_h + o_d, b_out, mask=m_d)


def decode_attention(
    q_BH1D: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, start_B: Tensor, stop_B: Tensor, scale: float
) -> Tensor:
    """One query a row over its part of the cache; laid out as q."""
    batch, heads, _, width = q_BH1D.shape
    kv_heads, room = k_BGSD.shape[1:3]
    q, k, v = (unit_stride(x) for x in (q_BH1D, k_BGSD, v_BGSD))
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    # Rounded up: between one and two for a multiprocessor, half of them would wait for the others.
    wanted = triton.cdiv(PROGRAMS_TOGETHER, batch * kv_heads)
    parts = max(1, min(room // FEWEST_KEYS_OF_A_PART, wanted))
    group, block_d = heads // kv_heads, triton.next_power_of_2(width)
    fitting = max(16, BYTES_AT_A_TIME // (block_d * k.element_size()))
    wide = {"dtype": torch.float32, "device": q.device}
    values = torch.empty(batch, heads, parts, width, **wide)
    largest, total = (torch.empty(batch, heads, parts, **wide) for _ in range(2))
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(q.device if q.is_cuda else -1):
        traceable(_part_kernel)[(parts, batch * kv_heads)](
            q, k, v, start_B, stop_B, values, largest, total, scale * _LOG2_E,
            kv_heads, parts, room,
            *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
            M=group,
            D=width,
            # The smallest product of the tensor cores, or none for a single head.
            BLOCK_M=1 if group == 1 else max(16, triton.next_power_of_2(group)),
            BLOCK_D=block_d if group == 1 else max(16, block_d),
            BLOCK_S=min(KEYS_AT_A_TIME, fitting),
            STAGES=LOADS_AHEAD,
            # Whatever 16 bits can say, tf32 can; float32 it would round.
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=WARPS_PER_PROGRAM,
        )  # fmt: skip
        traceable(_join_kernel)[(batch, heads)](
            values, largest, total, out, heads, parts, *out.stride()[:2],
            D=width,
            BLOCK_D=block_d,
            BLOCK_PARTS=triton.next_power_of_2(parts),
            num_warps=WARPS_PER_PROGRAM,
        )  # fmt: skip
    return out
