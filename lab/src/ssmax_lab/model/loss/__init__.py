"""Compute a linear layer and its cross entropy in one, without the matrix of logits.

The logits of N tokens over a vocabulary of V are the largest tensor of a small language model: 13
GB in float32 for 65,536 tokens of GPT-2. Here they exist for a chunk of tokens at a time. The
gradient is made in the same pass, while the chunk's logits are there, so nothing is computed twice.
"""

# N tokens, n tokens of a chunk, C channels, V vocabulary (padded where the product wants it)

import functools
from typing import Literal, get_args

import torch
from torch import Tensor

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.ops.dtypes import at_least_float32, autocast_dtype
from ssmax.ops.implementation import Impl, choose_impl, register_op

Reduction = Literal["mean", "sum", "none"]

CHUNK_BYTES = {"reference": 1 << 27, "triton": 1 << 29}
"""Logits at a time: enough for every product to fill the device, few of what a model takes."""
TOKENS_TOGETHER = 128
"""A chunk is a multiple of this where it can be: tiles of a product."""
COLUMNS_TOGETHER = 128
"""Likewise for the vocabulary on a GPU. GPT-2's 50,257 columns are odd: as they stand, a product of
16-bit numbers over them cannot use the tensor cores of the last two generations (LOG.md)."""


def linear_cross_entropy(
    hidden: Tensor,
    weight_VC: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    impl: Impl = "auto",
) -> Tensor:
    """Compute cross_entropy(hidden @ weight^T, targets), exact in value and gradient.

    hidden is (..., C), targets (...). The mean is over the targets that are not ignored, and 0 if
    all are. `none` gives the loss of every token, 0 where ignored, and has no gradient. The
    gradient has none of its own: to differentiate it again raises, except under torch.compile,
    which takes it for a constant. A named impl never falls back to another.
    """
    _check(hidden, weight_VC, targets, reduction)
    impl = choose_impl(impl, hidden.device)
    hidden_NC, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if reduction == "none":
        with torch.no_grad():
            losses_N = _token_losses(hidden_NC, weight_VC, targets_N, ignore_index, impl)
        return losses_N.reshape(targets.shape)
    if torch.is_grad_enabled():
        total, _ = _LinearCrossEntropy.apply(hidden_NC, weight_VC, targets_N, ignore_index, impl)
        assert isinstance(total, Tensor)
    else:
        total = _token_losses(hidden_NC, weight_VC, targets_N, ignore_index, impl).sum()
    if reduction == "sum":
        return total
    return total / (targets_N != ignore_index).sum().clamp_min(1)


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses; its gradient is finished when the forward pass is.

    The second output is empty. Saved, it ties the gradient to the inputs without keeping them, and
    without caring what the caller writes into the sum.
    """

    @staticmethod
    def forward(ctx, hidden_NC, weight_VC, targets_N, ignore_index, impl):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        tie = hidden_NC.new_empty(0)
        if not needs_hidden and not needs_weight:
            return _token_losses(hidden_NC, weight_VC, targets_N, ignore_index, impl).sum(), tie
        vocabulary = weight_VC.shape[0]
        weight = _for_product(weight_VC, hidden_NC)
        dhiddens, dweight, total = [], None, 0.0
        # No tensor is written into here: torch 2.11 compiled that into wrong gradients (LOG.md).
        for start, stop in _chunks(hidden_NC, weight, impl):
            hidden_nC = hidden_NC[start:stop].to(weight.dtype)
            losses_n, dlogits_nV = _losses_and_gradient(
                hidden_nC @ weight.t(), targets_N[start:stop], vocabulary, ignore_index, True, impl
            )
            total = total + losses_n.sum()
            if needs_hidden:
                dhiddens.append((dlogits_nV @ weight).to(hidden_NC.dtype))
            if needs_weight:
                dweight = _plus_product(dweight, dlogits_nV.t(), hidden_nC)
        dhidden = torch.cat(dhiddens) if needs_hidden else None
        if dweight is not None:
            dweight = dweight[:vocabulary].to(weight_VC.dtype)
        ctx.save_for_backward(dhidden, dweight, tie)
        return total, tie

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        dtotal, _ = gradients
        dhidden, dweight, tie = ctx.saved_tensors
        # A scalar keeps its float32 and does not widen the product.
        dhidden = None if dhidden is None else dhidden * dtotal
        dweight = None if dweight is None else dweight * dtotal
        # Enabled under create_graph=True, and where torch.compile traces a backward of its own.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            dhidden = None if dhidden is None else _Once.apply(dhidden, tie)
            dweight = None if dweight is None else _Once.apply(dweight, tie)
        return dhidden, dweight, None, None, None


class _Once(torch.autograd.Function):
    """A gradient as it is, tied to what it depends on and refused where it is differentiated.

    torch's once_differentiable ties it to nothing: the gradient would pass for a constant.
    """

    @staticmethod
    def forward(ctx, gradient, tie):
        return gradient

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "linear_cross_entropy is differentiable once, and its gradient was differentiated "
            "again; take F.cross_entropy(hidden @ weight.t(), targets) for second derivatives, or "
            "detach the gradient where it is a constant"
        )


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to the total in float32 or wider: a hundred bfloat16 roundings would show."""
    # On a GPU the product itself adds; torch.compile has no such product.
    if a.is_cuda and a.element_size() == 2 and not torch.compiler.is_compiling():
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = (a @ b).to(at_least_float32(a.dtype))
    return product if total is None else total + product


def _token_losses(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, ignore_index: int, impl: Impl
) -> Tensor:
    """Compute the loss of every token, 0 where ignored."""
    weight = _for_product(weight_VC, hidden_NC)
    losses = []
    for start, stop in _chunks(hidden_NC, weight, impl):
        logits_nV = hidden_NC[start:stop].to(weight.dtype) @ weight.t()
        targets_n = targets_N[start:stop]
        losses_n, _ = _losses_and_gradient(
            logits_nV, targets_n, weight_VC.shape[0], ignore_index, False, impl
        )
        losses.append(losses_n)
    return torch.cat(losses)


def _losses_and_gradient(
    logits_nV: Tensor,
    targets_n: Tensor,
    vocabulary: int,
    ignore_index: int,
    gradient: bool,
    impl: Impl,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of every token, and its gradient, which may overwrite the logits."""
    if impl == "reference":
        return reference_losses_and_gradient(
            logits_nV, targets_n, vocabulary, ignore_index, gradient
        )
    losses_n = _losses_and_gradient_op(logits_nV, targets_n, vocabulary, ignore_index, gradient)
    return losses_n, logits_nV


def reference_losses_and_gradient(
    logits_nV: Tensor, targets_n: Tensor, vocabulary: int, ignore_index: int, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of every token, 0 where ignored, and its gradient, or the logits.

    It runs anywhere and defines the kernel. Losses are float32 or wider.

    Columns from `vocabulary` on are padding: they have no part in the loss and no gradient.
    """
    wide = at_least_float32(logits_nV.dtype)
    target_n1 = targets_n.unsqueeze(-1)
    counts_n1 = target_n1 != ignore_index
    target_n1 = target_n1.masked_fill(~counts_n1, 0)
    log_weights_nV = logits_nV[:, :vocabulary].to(wide).log_softmax(-1)
    losses_n = torch.where(counts_n1, -log_weights_nV.gather(-1, target_n1), 0.0).squeeze(-1)
    if not gradient:
        return losses_n, logits_nV
    dlogits_nV = log_weights_nV.exp_()
    dlogits_nV.scatter_add_(-1, target_n1, -torch.ones_like(target_n1, dtype=wide))
    dlogits_nV = torch.where(counts_n1, dlogits_nV, 0.0).to(logits_nV.dtype)
    padding = logits_nV.shape[1] - vocabulary
    return losses_n, torch.nn.functional.pad(dlogits_nV, (0, padding)) if padding else dlogits_nV


@register_op("ssmax::losses_and_gradient_", mutates_args={"logits"})
def _losses_and_gradient_op(
    logits: Tensor, targets: Tensor, vocabulary: int, ignore_index: int, gradient: bool
) -> Tensor:
    return _kernels().losses_and_gradient_(logits, targets, vocabulary, ignore_index, gradient)


@_losses_and_gradient_op.register_fake
def _(logits, targets, vocabulary, ignore_index, gradient):
    wide = at_least_float32(logits.dtype)
    return logits.new_empty(logits.shape[0], dtype=wide)


def _for_product(weight_VC: Tensor, hidden_NC: Tensor) -> Tensor:
    """Cast the weight to the product's dtype, autocast's where it is on, and pad its width."""
    dtype = torch.promote_types(hidden_NC.dtype, weight_VC.dtype)
    weight_VC = weight_VC.to(autocast_dtype(hidden_NC.device, dtype) or dtype)
    padding = -weight_VC.shape[0] % COLUMNS_TOGETHER if weight_VC.is_cuda else 0
    return torch.nn.functional.pad(weight_VC, (0, 0, 0, padding)) if padding else weight_VC


def _chunks(hidden_NC: Tensor, weight_VC: Tensor, impl: Impl) -> list[tuple[int, int]]:
    """Cut tokens into runs, nearly equal, whose logits fit into CHUNK_BYTES."""
    tokens, row_bytes = hidden_NC.shape[0], weight_VC.shape[0] * weight_VC.element_size()
    number = max(1, -(-tokens // max(1, CHUNK_BYTES[impl] // row_bytes)))
    each = max(1, -(-tokens // number))
    if each > TOKENS_TOGETHER:
        each += -each % TOKENS_TOGETHER
    return [(start, min(start + each, tokens)) for start in range(0, max(1, tokens), each)]


@functools.cache
def _kernels():
    require("triton", install="ssmax[triton]", purpose="impl='triton'")
    from ssmax_lab.model.loss import kernels

    return kernels


def _check(hidden: Tensor, weight_VC: Tensor, targets: Tensor, reduction: str) -> None:
    if reduction not in get_args(Reduction):
        raise UsageError(
            f"reduction must be one of {', '.join(get_args(Reduction))}, got {reduction!r}"
        )
    if weight_VC.dim() != 2 or hidden.shape[-1:] != weight_VC.shape[1:]:
        raise UsageError(
            "weight must be (vocabulary, channels) with the channels of hidden, "
            f"got {tuple(weight_VC.shape)} for hidden {tuple(hidden.shape)}"
        )
    if weight_VC.shape[0] == 0:
        raise UsageError(
            "weight must have a row for every word of the vocabulary, at least one, "
            f"got {tuple(weight_VC.shape)}; pass the weight of the head"
        )
    if targets.shape != hidden.shape[:-1]:
        raise UsageError(
            f"targets must hold one token for each of hidden's {tuple(hidden.shape[:-1])}, "
            f"got {tuple(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise UsageError(f"targets must be int64, got {targets.dtype}; write .long()")
