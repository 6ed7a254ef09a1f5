"""Linear layer and cross entropy in one, without the matrix of logits.

The logits of N tokens over a vocabulary of V are the largest tensor of a small language model: 13
GB in float32 for 65,536 tokens of GPT-2. Here they exist for a chunk of tokens at a time. The
gradient is made in the same pass, while the chunk's logits are there, so nothing is computed twice.
"""

# N tokens, C channels, V vocabulary

from typing import Literal, get_args

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]

CHUNK_ELEMENTS = 1 << 25
"""Logits at a time: 128 MiB in float32, enough for every product to fill a GPU."""


def linear_cross_entropy(
    hidden: Tensor,
    weight_VC: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """cross_entropy(hidden @ weight^T, targets), exact in value and gradient.

    hidden is (..., C), targets (...). The mean is over the targets that are not ignored, and 0 if
    all are. `none` gives the loss of every token, 0 where ignored, and has no gradient.
    """
    _check(hidden, weight_VC, targets, reduction)
    hidden_NC, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if reduction == "none":
        return _token_losses(hidden_NC, weight_VC, targets_N, ignore_index).reshape(targets.shape)
    total = _LinearCrossEntropy.apply(hidden_NC, weight_VC, targets_N, ignore_index)
    assert isinstance(total, Tensor)
    if reduction == "sum":
        return total
    return total / (targets_N != ignore_index).sum().clamp_min(1)


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses; its gradient is finished when the forward pass is."""

    @staticmethod
    def forward(ctx, hidden_NC, weight_VC, targets_N, ignore_index):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # float32 sums of chunks: a hundred bfloat16 roundings of one gradient would be heard.
        wide = torch.promote_types(weight_VC.dtype, torch.float32)
        dhidden = torch.empty_like(hidden_NC) if needs_hidden else None
        dweight = torch.zeros_like(weight_VC, dtype=wide) if needs_weight else None
        total = hidden_NC.new_zeros((), dtype=wide)
        for chunk, logits_nV in _chunks(hidden_NC, weight_VC):
            target_n1 = targets_N[chunk].unsqueeze(-1)
            counts_n1 = target_n1 != ignore_index
            target_n1 = target_n1.masked_fill(~counts_n1, 0)
            log_weights_nV = logits_nV.to(wide).log_softmax(-1)
            total -= (log_weights_nV.gather(-1, target_n1) * counts_n1).sum()
            if dhidden is None and dweight is None:
                continue
            dlogits_nV = log_weights_nV.exp_()
            dlogits_nV.scatter_add_(-1, target_n1, -torch.ones_like(target_n1, dtype=wide))
            dlogits_nV = (dlogits_nV * counts_n1).to(logits_nV.dtype)
            if dhidden is not None:
                dhidden[chunk] = (dlogits_nV @ weight_VC.to(logits_nV.dtype)).to(dhidden.dtype)
            if dweight is not None:
                dweight += dlogits_nV.t() @ hidden_NC[chunk].to(logits_nV.dtype)
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight_VC.dtype))
        return total

    @staticmethod
    def backward(ctx, *gradients):
        (dtotal,) = gradients
        dhidden, dweight = ctx.saved_tensors
        return (
            None if dhidden is None else dhidden * dtotal.to(dhidden.dtype),
            None if dweight is None else dweight * dtotal.to(dweight.dtype),
            None,
            None,
        )


def _token_losses(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, ignore_index: int
) -> Tensor:
    """The loss of every token, 0 where ignored."""
    with torch.no_grad():
        wide = torch.promote_types(weight_VC.dtype, torch.float32)
        losses_N = hidden_NC.new_zeros(targets_N.shape, dtype=wide)
        for chunk, logits_nV in _chunks(hidden_NC, weight_VC):
            losses_N[chunk] = torch.nn.functional.cross_entropy(
                logits_nV.to(wide), targets_N[chunk], ignore_index=ignore_index, reduction="none"
            )
        return losses_N


def _chunks(hidden_NC: Tensor, weight_VC: Tensor):
    """Slices of the tokens with their logits, in autocast's dtype where it is on."""
    device = hidden_NC.device.type
    dtype = torch.promote_types(hidden_NC.dtype, weight_VC.dtype)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    weight_CV = weight_VC.to(dtype).t()
    tokens = max(1, CHUNK_ELEMENTS // weight_VC.shape[0])
    for start in range(0, hidden_NC.shape[0], tokens):
        chunk = slice(start, start + tokens)
        yield chunk, hidden_NC[chunk].to(dtype) @ weight_CV


def _check(hidden: Tensor, weight_VC: Tensor, targets: Tensor, reduction: str) -> None:
    if reduction not in get_args(Reduction):
        raise ValueError(
            f"reduction must be one of {', '.join(get_args(Reduction))}, got {reduction!r}"
        )
    if weight_VC.dim() != 2 or hidden.shape[-1:] != weight_VC.shape[1:]:
        raise ValueError(
            "weight must be (vocabulary, channels) with the channels of hidden, "
            f"got {tuple(weight_VC.shape)} for hidden {tuple(hidden.shape)}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must hold one token for each of hidden's {tuple(hidden.shape[:-1])}, "
            f"got {tuple(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64, got {targets.dtype}; write .long()")
