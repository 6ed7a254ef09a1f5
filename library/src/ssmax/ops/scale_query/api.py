"""Scaling the query by s log n + b, in one kernel where there is one for it."""

# B batch, H query heads, T queries, D head_dim

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.ops.implementation import choose_impl
from ssmax.ops.scale import Number, unchecked_ssmax_factor
from ssmax.ops.scale_query.reference import (
    is_transformed,
    scale_by_ssmax_reference,
    scale_query,
)
from ssmax.ops.visible import Ramp

MOST_KEPT = 1024
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_scalings: dict[Any, Any] = {}


def scale_by_ssmax(q_BHTD: Tensor, s: Number, bias: Number | None, n: Tensor | Ramp) -> Tensor:
    """Multiply q by s log n + b, in float32 or wider, cast once; nothing is checked.

    s and bias are numbers or (H,); n is two numbers, (T,) or (B | 1, T).
    """
    by_kernel = can_scale_by_kernel(q_BHTD, s, bias, n)
    return (scale_by_kernel if by_kernel else scale_by_ssmax_reference)(q_BHTD, s, bias, n)


def scale_by_kernel(
    q_BHTD: Tensor, s: Number, bias: Number | None, n: Tensor | Ramp, multiplier: float = 1.0
) -> Tensor:
    """Multiply by (s log n + b) multiplier in one kernel, which has to take the call."""
    heads, device = q_BHTD.shape[1], q_BHTD.device
    s_H = per_head(s, heads, device)
    bias_H = None if bias is None else per_head(bias, heads, device)
    ramp, counts = (n, None) if isinstance(n, Ramp) else (Ramp(0, 0), n)
    scaling = scaling_of(q_BHTD, s_H, bias_H, counts)
    return apply_scaling(scaling, q_BHTD, s_H, bias_H, counts, (ramp.first, ramp.most, multiplier))


def scaling_of(q_BHTD: Tensor, s_H: Tensor, bias_H: Tensor | None, n: Tensor | None) -> Any:
    """Prepare the kernels for queries like this one, once."""
    counts = None if n is None else (n.shape, n.dtype, n.stride())
    strides = s_H.stride(), None if bias_H is None else bias_H.stride()
    key = q_BHTD.shape, q_BHTD.dtype, q_BHTD.device, strides, counts
    scaling = _scalings.get(key)
    if scaling is None:
        if len(_scalings) >= MOST_KEPT:
            _scalings.clear()
        scaling = _scalings[key] = _kernels().Scaling(q_BHTD, s_H, bias_H, n)
    return scaling


def apply_scaling(
    scaling: Any,
    q_BHTD: Tensor,
    s_H: Tensor,
    bias_H: Tensor | None,
    n: Tensor | None,
    numbers: tuple[int, int, float],
) -> Tensor:
    """Multiply by prepared kernels; `numbers` are first, most and multiplier."""
    if torch.is_grad_enabled() and (
        q_BHTD.requires_grad or s_H.requires_grad or (bias_H is not None and bias_H.requires_grad)
    ):
        return _ScaleBySSMax.apply(q_BHTD, s_H, bias_H, n, scaling, numbers)
    return scaling.forward(q_BHTD, s_H, bias_H, n, numbers)


def can_scale_by_kernel(q_BHTD: Tensor, s: Number, bias: Number | None, n: Tensor | Ramp) -> bool:
    """True where the kernel takes the call: eager code, on a GPU, values per head in float32."""
    return (
        choose_impl("auto", q_BHTD.device) == "triton"
        and is_eager(q_BHTD)
        and q_BHTD.dtype in _NARROW
        and _is_per_head(s, q_BHTD)
        and (bias is None or _is_per_head(bias, q_BHTD))
        and (isinstance(n, Ramp) or (type(n) is Tensor and n.dim() in (1, 2)))
    )


def is_eager(tensor: Tensor) -> bool:
    """True for a plain tensor that nothing traces, transforms or stands in for."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        # Fake tensors and make_fx are modes; torch.jit.trace is none.
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not is_transformed()
    )


@functools.cache
def _kernels() -> Any:
    """Import the kernels, and with them Triton."""
    from ssmax.ops.scale_query import kernels

    return kernels


class _ScaleBySSMax(torch.autograd.Function):
    """The kernels with their gradient; what is differentiated twice takes plain code."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        s: Tensor,
        bias: Tensor | None,
        n: Tensor | None,
        scaling: Any,
        numbers: tuple[int, int, float],
    ) -> Tensor:
        # Only the gradients of s and b look at q: fixed ones keep no activation alive.
        is_fixed = not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        ctx.save_for_backward(None if is_fixed else q, s, bias, n)
        ctx.scaling, ctx.numbers = scaling, numbers
        return scaling.forward(q, s, bias, n, numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        backward: Any = _plain_backward if torch.is_grad_enabled() else ctx.scaling.backward
        return *backward(gradients[0], *ctx.saved_tensors, ctx.numbers), None, None, None


def _plain_backward(
    dy: Tensor,
    q: Tensor | None,
    s: Tensor,
    bias: Tensor | None,
    n: Tensor | None,
    numbers: tuple[int, int, float],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    *ramp, multiplier = numbers
    if n is None:
        n = Ramp(*ramp).counts(dy.shape[2], dy.device)
    factor = unchecked_ssmax_factor(n, s, bias) * multiplier
    dq = scale_query(dy, factor)
    if q is None:
        return dq, None, None
    dot_BHT = (dy.float() * q.float()).sum(-1) * multiplier
    ds = (dot_BHT * n.float().log().unsqueeze(-2)).sum((0, 2))
    return dq, ds, None if bias is None else dot_BHT.sum((0, 2))


def _is_per_head(value: Number, q_BHTD: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return True
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.dtype == torch.float32
        and value.shape in ((), (1,), (q_BHTD.shape[1],))
        and value.device == q_BHTD.device
    )


def per_head(value: Number, heads: int, device: torch.device) -> Tensor:
    """Return one value per head, (H,)."""
    if isinstance(value, Tensor):
        return value if value.dim() and value.shape[0] == heads else value.expand(heads)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # What a CUDA graph makes holds nothing before the graph runs.
        return torch.full((heads,), value, device=device)
    return _constant(value, heads, device)


@functools.lru_cache(maxsize=64)
def _constant(value: float, heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((heads,), float(value), dtype=torch.float32, device=device)
