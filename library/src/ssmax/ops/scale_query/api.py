"""Scaling the query by s log n + b, in one kernel where there is one for it."""

# B batch, H query heads, T queries, D head_dim

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.ops.implementation import choose_impl
from ssmax.ops.scale import Number, unchecked_ssmax_factor
from ssmax.ops.scale_query.reference import scale_by_ssmax_reference, scale_query
from ssmax.ops.visible import Ramp, is_eager

MOST_KEPT = 1024
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_scalings: dict[Hashable, Any] = {}


def scale_by_ssmax(q_BHTD: Tensor, s: Number, bias: Number | None, n: Tensor | Ramp) -> Tensor:
    """Multiply q by s log n + b, in float32 or wider, cast once; nothing is checked.

    s and bias are numbers or (H,); n is two numbers, (T,) or (B | 1, T).
    """
    scaling = scaling_of(q_BHTD, s, bias, n)
    if scaling is None:
        return scale_by_ssmax_reference(q_BHTD, s, bias, n)
    return apply_scaling(scaling, q_BHTD, s, bias, n)


def scaling_of(q_BHTD: Tensor, s: Number, bias: Number | None, n: Tensor | Ramp) -> Any:
    """Find the kernels for such a call, prepared once; None where plain code has to serve.

    They serve eager code on a GPU, with numbers, or float32 values per head, for s and b.
    """
    if not is_eager(q_BHTD):
        return None
    key = q_BHTD.shape, q_BHTD.stride(), q_BHTD.dtype, q_BHTD.device, kind(s), kind(bias), kind(n)
    try:
        return _scalings[key]
    except KeyError:
        if len(_scalings) >= MOST_KEPT:
            _scalings.clear()
        is_served = (
            choose_impl("auto", q_BHTD.device) == "triton"
            and q_BHTD.dtype in _NARROW
            and all(_is_per_head(value, q_BHTD) for value in (s, bias))
            and (isinstance(n, Ramp) or (type(n) is Tensor and n.dim() in (1, 2)))
        )
        _scalings[key] = _prepare(q_BHTD, s, bias, n) if is_served else None
        return _scalings[key]


def _prepare(q_BHTD: Tensor, s: Number, bias: Number | None, n: Tensor | Ramp) -> Any:
    s_H, bias_H = (_per_head(value, q_BHTD) for value in (s, bias))
    counts = None if isinstance(n, Ramp) else n
    return _kernels().Scaling(q_BHTD, s_H, bias_H, counts, s_H is s and bias_H is bias)


def kind(value: object) -> Hashable:
    """Collect what a choice of kernels asks of an argument: not the values that it holds."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.device
    return type(value)


def apply_scaling(
    scaling: Any,
    q_BHTD: Tensor,
    s: Number,
    bias: Number | None,
    n: Tensor | Ramp,
    multiplier: float = 1.0,
) -> Tensor:
    """Multiply by (s log n + b) multiplier with what `scaling_of` found."""
    s_H: Any = s if scaling.is_per_head else _per_head(s, q_BHTD)
    bias_H: Any = bias if scaling.is_per_head else _per_head(bias, q_BHTD)
    counts, numbers = (None, (*n, multiplier)) if type(n) is Ramp else (n, (0, 0, multiplier))
    if torch.is_grad_enabled() and (
        q_BHTD.requires_grad or s_H.requires_grad or (bias_H is not None and bias_H.requires_grad)
    ):
        return _scale_with_gradients(q_BHTD, s_H, bias_H, counts, scaling, numbers)
    return scaling.forward(q_BHTD, s_H, bias_H, counts, numbers)


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
        dq, ds, db = backward(gradients[0], *ctx.saved_tensors, ctx.numbers)
        return dq, ds, db, None, None, None


# As Function.apply ends: before it that looks for transforms, which `is_eager` has ruled out.
# The super object gets no name: vLLM looks into the values of all modules, and fails at one.
_scale_with_gradients: Any = super(torch.autograd.Function, _ScaleBySSMax).apply  # pyright: ignore[reportAttributeAccessIssue]


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


def _is_per_head(value: Number | None, q_BHTD: Tensor) -> bool:
    return not isinstance(value, Tensor) or (
        type(value) in (Tensor, nn.Parameter)
        and value.dtype == torch.float32
        and value.shape in ((), (1,), (q_BHTD.shape[1],))
        and value.device == q_BHTD.device
    )


def _per_head(value: Number | None, q_BHTD: Tensor) -> Any:
    """Return one value per head, (H,)."""
    heads, device = q_BHTD.shape[1], q_BHTD.device
    if value is None or isinstance(value, Tensor):
        return value if value is None or value.shape == (heads,) else value.expand(heads)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # What a CUDA graph makes holds nothing before the graph runs.
        return torch.full((heads,), value, device=device)
    return _constant(value, heads, device)


@functools.lru_cache(maxsize=64)
def _constant(value: float, heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((heads,), float(value), dtype=torch.float32, device=device)
