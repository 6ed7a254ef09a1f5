"""The Triton kernel of the loss: a row of logits becomes its own gradient, in place.

One program owns one token. It reads the row twice, once for the normaliser and once, mostly from
the second-level cache, to write the gradient over it. No other copy of the logits exists, and
nothing is added atomically: two runs give the same bits. Arithmetic is float32 (float64 for float64
logits), offsets are 64-bit. Of a step of the paper's model on one H200 it takes 4.7 ms, where
PyTorch's own passes over float32 logits took 70 (LOG.md).
"""

# p_ pointer, b_ block, o_ offset, m_ mask, i_ program id; n tokens, V vocabulary

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmax.ops.dtypes import at_least_float32
from ssmax.ops.implementation import traceable

# Measured on an H200 (LOG.md): the best of fifteen.
COLUMNS_AT_A_TIME = 4096
WARPS_PER_PROGRAM = 16
LOADS_AHEAD = 3
# Logits are taken to base 2, in which the hardware has its exponentials: as bits.
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _add_to(b_largest, b_total, b_bits):
    """Add to the maximum and sum of every column of a block: no thread waits for another."""
    b_raised = tl.maximum(b_largest, b_bits)
    return b_raised, b_total * tl.exp2(b_largest - b_raised) + tl.exp2(b_bits - b_raised)


@triton.jit
def _loss_kernel(
    p_logits, p_targets, p_losses, row_stride, vocabulary, columns, ignore_index,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, DOUBLE: tl.constexpr, NEEDS_GRADIENT: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    i_n = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_n * row_stride
    o_block = tl.arange(0, BLOCK)
    target = tl.load(p_targets + i_n)
    counts = target != ignore_index
    # Before the first reduction, whose barrier keeps it ahead of every store. A target that is no
    # token is not read past the row: it makes the loss NaN, which the caller sees.
    is_token = (target >= 0) & (target < vocabulary)
    bits = tl.load(p_row + target, mask=is_token, other=float("nan")).to(WIDE) * _LOG2_E

    # Blocks that need no mask, then the last. Lowest finite instead of -inf: a column of nothing
    # but -inf must not give inf - inf.
    whole = vocabulary // BLOCK * BLOCK
    b_largest = tl.full((BLOCK,), -3.4028234663852886e38, WIDE)
    b_total = tl.zeros((BLOCK,), WIDE)
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        b_bits = tl.load(p_row + start + o_block).to(WIDE) * _LOG2_E
        b_largest, b_total = _add_to(b_largest, b_total, b_bits)
    o_last = whole + o_block
    m_last = o_last < vocabulary
    b_bits = tl.load(p_row + o_last, mask=m_last, other=float("-inf")).to(WIDE) * _LOG2_E
    b_largest, b_total = _add_to(b_largest, b_total, b_bits)
    largest = tl.max(b_largest, axis=0)
    normaliser = largest + tl.log2(tl.sum(b_total * tl.exp2(b_largest - largest), axis=0))
    tl.store(p_losses + i_n, tl.where(counts, (normaliser - bits) * _LOG_2, 0.0))

    if NEEDS_GRADIENT:
        # 2^-inf: the gradient of a token that does not count.
        normaliser = tl.where(counts, normaliser, float("inf"))
        for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
            o_v = start + o_block
            b_bits = tl.load(p_row + o_v).to(WIDE) * _LOG2_E
            tl.store(p_row + o_v, tl.exp2(b_bits - normaliser))
        b_bits = tl.load(p_row + o_last, mask=m_last, other=float("-inf")).to(WIDE) * _LOG2_E
        tl.store(p_row + o_last, tl.exp2(b_bits - normaliser), mask=o_last < columns)
        # The target's own column once more, after whichever thread wrote it above.
        tl.debug_barrier()
        tl.store(p_row + target, tl.exp2(bits - normaliser) - 1.0, mask=counts & is_token)


def losses_and_gradient_(
    logits_nV: Tensor, targets_n: Tensor, vocabulary: int, ignore_index: int, gradient: bool
) -> Tensor:
    """Compute the loss of every token; where asked, overwrite the logits by their gradient."""
    tokens, columns = logits_nV.shape
    wide = at_least_float32(logits_nV.dtype)
    losses_n = torch.empty(tokens, dtype=wide, device=logits_nV.device)
    if tokens == 0:
        return losses_n
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(logits_nV.device if logits_nV.is_cuda else -1):
        traceable(_loss_kernel)[(tokens,)](
            logits_nV, targets_n, losses_n,
            logits_nV.stride(0), vocabulary, columns, ignore_index,
            BLOCK=min(COLUMNS_AT_A_TIME, triton.next_power_of_2(columns)),
            STAGES=LOADS_AHEAD,
            DOUBLE=wide == torch.float64,
            NEEDS_GRADIENT=gradient,
            num_warps=WARPS_PER_PROGRAM,
        )  # fmt: skip
    return losses_n
