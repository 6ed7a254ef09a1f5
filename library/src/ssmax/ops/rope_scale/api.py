"""rope_scale: checks, the choice of implementation, the custom op and its gradient."""

# B batch, H query heads, G key heads, T tokens, D head_dim

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.ops.dtypes import at_least_float32, check_tensor
from ssmax.ops.implementation import Impl, choose_impl, register_op
from ssmax.ops.launch import launch_traced, unit_stride
from ssmax.ops.rope import check_tables
from ssmax.ops.rope_scale.reference import rope_scale_reference, rope_scale_step
from ssmax.ops.scale import Number, ssmax_factor
from ssmax.ops.visible import is_eager


def rope_scale(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor: Tensor, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotate q and k and scale q by its factor: plain softmax attention comes after it.

    `ssmax_attention` would scale q twice; it goes with `apply_rope`.
    cos and sin come from `rope_tables`: (T, R / 2) or (B, T, R / 2) for rotary width R <= D.
    `factor` broadcasts to (B, H, T). Differentiable in q, k and factor. A named impl never falls
    back to another.
    """
    _check_heads(q_BHTD, k_BGTD, cos, sin)
    factor = _check_factor(factor, q_BHTD)
    if impl == "auto" and q_BHTD.is_cuda and q_BHTD.shape[2] == 1 and torch.compiler.is_compiling():
        return rope_scale_step(q_BHTD, k_BGTD, cos, sin, factor)
    are_learned = cos.requires_grad or sin.requires_grad
    if choose_impl(impl, q_BHTD.device) == "reference" or (impl == "auto" and are_learned):
        return rope_scale_reference(q_BHTD, k_BGTD, cos, sin, factor)
    if are_learned:
        raise UsageError(
            "the kernel has no gradient for cos and sin; pass them detached, or impl='reference'"
        )
    if is_eager(q_BHTD):
        return rope_scale_by_kernel(q_BHTD, k_BGTD, *_alike(cos, sin), factor)
    return _rope_scale_op(q_BHTD, k_BGTD, *_alike(cos, sin), factor)


def rope_scale_by_kernel(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_1HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate and scale in eager code: an operator's door takes longer than small kernels run.

    Nothing is checked. `factor_1HT` is (1, H, T) or (B, H, T).
    """
    if torch.is_grad_enabled():
        return _RopeScale.apply(q_BHTD, k_BGTD, cos, sin, factor_1HT)
    return _kernels().forward(q_BHTD, k_BGTD, cos, sin, factor_1HT)


def rope_ssmax(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_keys: Tensor,
    s: Number,
    bias: Number | None = None,
    *,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate q and k and scale q by s log n + b: plain softmax attention comes after it.

    A step of a decoder is over before the launch of a second kernel would be: for one token that
    asks for no gradient, the factor is made where the query is rotated.
    """
    _check_heads(q_BHTD, k_BGTD, cos, sin)
    check_tensor("num_keys", num_keys)
    if choose_impl(impl, q_BHTD.device) == "triton":
        inputs = [x for x in (q_BHTD, k_BGTD, cos, sin, s, bias) if isinstance(x, Tensor)]
        is_plain = not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs)
        if is_plain and _is_step(q_BHTD, num_keys, s, bias):
            step: Any = _kernels().step if is_eager(q_BHTD) else _rope_ssmax_op
            return step(q_BHTD, k_BGTD, *_alike(cos, sin), num_keys, s, bias)
    return rope_scale(q_BHTD, k_BGTD, cos, sin, ssmax_factor(num_keys, s, bias), impl=impl)


@register_op("ssmax::rope_scale", mutates_args=())
def _rope_scale_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    return _kernels().forward(q, k, cos, sin, factor, launch=launch_traced)


@register_op("ssmax::rope_scale_backward", mutates_args=())
def _rope_scale_backward_op(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, cos: Tensor, sin: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _kernels().backward(dq_out, dk_out, q, cos, sin, factor, launch=launch_traced)


@register_op("ssmax::rope_ssmax", mutates_args=())
def _rope_ssmax_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, num_keys: Tensor, s: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _kernels().step(q, k, cos, sin, num_keys, s, bias, launch=launch_traced)


@_rope_ssmax_op.register_fake
def _(q, k, cos, sin, num_keys, s, bias):
    return torch.empty_like(unit_stride(q)), torch.empty_like(unit_stride(k))


@_rope_scale_op.register_fake
def _(q, k, cos, sin, factor):
    return torch.empty_like(unit_stride(q)), torch.empty_like(unit_stride(k))


@_rope_scale_backward_op.register_fake
def _(dq_out, dk_out, q, cos, sin, factor):
    dfactor = factor.new_empty(factor.shape if q is not None else 0)
    dq, dk = (torch.empty_like(unit_stride(x)) for x in (dq_out, dk_out))
    return dq, dk, dfactor


def _setup_context(ctx, inputs, output) -> None:
    q, _, cos, sin, factor = inputs
    # Only the factor's gradient looks at q: a fixed factor keeps no extra activation alive.
    ctx.save_for_backward(q if ctx.needs_input_grad[4] else None, cos, sin, factor)


def _backward(ctx, dq_out, dk_out):
    q, cos, sin, factor = ctx.saved_tensors
    dq, dk, dfactor = _rope_scale_backward_op(dq_out, dk_out, q, cos, sin, factor)
    return dq, dk, None, None, dfactor if q is not None else None


_rope_scale_op.register_autograd(_backward, setup_context=_setup_context)


class _RopeScale(torch.autograd.Function):
    """The same for eager code."""

    @staticmethod
    def forward(ctx: Any, q, k, cos, sin, factor):
        out = _kernels().forward(q, k, cos, sin, factor)
        _setup_context(ctx, (q, k, cos, sin, factor), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        dq_out, dk_out = gradients
        q, cos, sin, factor = ctx.saved_tensors
        dq, dk, dfactor = _kernels().backward(dq_out, dk_out, q, cos, sin, factor)
        return dq, dk, None, None, dfactor if q is not None else None


@functools.cache
def _kernels():
    require("triton", install="ssmax[triton]", purpose="impl='triton'")
    from ssmax.ops.rope_scale import kernels

    return kernels


def _is_step(q: Tensor, num_keys: Tensor, s: Number, bias: Number | None) -> bool:
    """True for one token with float32 values per head: what the kernel of a step takes."""
    values = [s] if bias is None else [s, bias]
    return (
        q.shape[2] == 1
        and q.dtype != torch.float64
        and q.numel() > 0
        and num_keys.shape in ((1,), (1, 1), (q.shape[0], 1))
        and all(
            isinstance(x, Tensor) and x.dtype == torch.float32 and x.shape == (q.shape[1],)
            and x.is_contiguous() and x.device == q.device
            for x in values
        )
    )  # fmt: skip


def _alike(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Make tables that one set of strides serves."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        return cos.contiguous(), sin.contiguous()
    return cos, sin


def _check_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise on what cannot be rotated."""
    check_tables(q, cos, sin)
    check_tables(k, cos, sin)
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise UsageError(
            "q and k must have one batch, one number of tokens and one head_dim, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}; rotate new keys before they are cached"
        )
    if q.dtype != k.dtype:
        raise UsageError(f"q and k must have one dtype, got {q.dtype} and {k.dtype}")


def _check_factor(factor: Tensor, q: Tensor) -> Tensor:
    """Raise on what is no factor of these queries; return it as (B or 1, H, T)."""
    check_tensor("factor", factor, is_floating=True)
    factor = factor.to(at_least_float32(factor.dtype))
    try:
        return _for_every_head_and_token(factor, q)
    except RuntimeError:
        raise UsageError(
            f"factor must broadcast to (batch, query heads, tokens) = {tuple(q.shape[:3])}, "
            f"got {tuple(factor.shape)}"
        ) from None


def _for_every_head_and_token(factor: Tensor, q: Tensor) -> Tensor:
    """Expand to (B, H, T), or (1, H, T) where the rows share it: it is then read once."""
    is_shared = factor.dim() < 3 or factor.shape[0] == 1
    return factor.expand(1 if is_shared else q.shape[0], *q.shape[1:3])
