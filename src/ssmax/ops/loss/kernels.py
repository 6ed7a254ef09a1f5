"""The Triton kernel of the loss: a row of logits becomes its own gradient, in place.

One program owns one token. It reads the row twice, once for the normaliser and once, mostly from
the second-level cache, to write the gradient over it. No other copy of the logits exists, and
nothing is added atomically: two runs give the same bits. Arithmetic is float32 (float64 for float64
logits), offsets are 64-bit.
"""

# p_ pointer, b_ block, o_ offset, m_ mask, i_ program id; n tokens, V vocabulary

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmax.ops.implementation import traceable

COLUMNS_AT_A_TIME = 8192
WARPS_PER_PROGRAM = 16


@triton.jit
def _loss_kernel(
    p_logits, p_targets, p_losses, row_stride, vocabulary, columns, ignore_index,
    BLOCK: tl.constexpr, DOUBLE: tl.constexpr, NEEDS_GRADIENT: tl.constexpr,
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
    logit = tl.load(p_row + target, mask=is_token, other=float("nan")).to(WIDE)

    # Lowest finite instead of -inf: a block of nothing but -inf must not give inf - inf.
    largest = tl.full((), -3.4028234663852886e38, WIDE)
    total = tl.zeros((), WIDE)
    for start in range(0, vocabulary, BLOCK):
        o_v = start + o_block
        b_logits = tl.load(p_row + o_v, mask=o_v < vocabulary, other=float("-inf")).to(WIDE)
        largest_so_far = tl.maximum(largest, tl.max(b_logits, axis=0))
        total = total * tl.exp(largest - largest_so_far)
        total += tl.sum(tl.exp(b_logits - largest_so_far), axis=0)
        largest = largest_so_far
    normaliser = largest + tl.log(total)
    tl.store(p_losses + i_n, tl.where(counts, normaliser - logit, 0.0))

    if NEEDS_GRADIENT:
        for start in range(0, columns, BLOCK):
            o_v = start + o_block
            b_logits = tl.load(p_row + o_v, mask=o_v < vocabulary, other=float("-inf")).to(WIDE)
            b_gradient = tl.exp(b_logits - normaliser) - tl.where(o_v == target, 1.0, 0.0)
            tl.store(p_row + o_v, tl.where(counts, b_gradient, 0.0), mask=o_v < columns)


def losses_and_gradient_(
    logits_nV: Tensor, targets_n: Tensor, vocabulary: int, ignore_index: int, gradient: bool
) -> Tensor:
    """The loss of every token; where asked, the logits are overwritten by their gradient."""
    tokens, columns = logits_nV.shape
    wide = torch.promote_types(logits_nV.dtype, torch.float32)
    losses_n = torch.empty(tokens, dtype=wide, device=logits_nV.device)
    if tokens == 0:
        return losses_n
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(logits_nV.device if logits_nV.is_cuda else -1):
        traceable(_loss_kernel)[(tokens,)](
            logits_nV, targets_n, losses_n,
            logits_nV.stride(0), vocabulary, columns, ignore_index,
            BLOCK=min(COLUMNS_AT_A_TIME, triton.next_power_of_2(columns)),
            DOUBLE=wide == torch.float64,
            NEEDS_GRADIENT=gradient,
            num_warps=WARPS_PER_PROGRAM,
        )  # fmt: skip
    return losses_n
