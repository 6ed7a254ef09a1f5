"""Scalable-Softmax of logits, with softmax's signature, and its definition kept as the oracle."""

from numbers import Real

import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.ops.dtypes import at_least_float32, check_tensor
from ssmax.ops.scale import Number, check_finite, unchecked_ssmax_factor


def ssmax(
    z: Tensor, s: Number, *, bias: Number | None = None, mask: Tensor | None = None, dim: int = -1
) -> Tensor:
    """Compute softmax((s log n + b) z) along dim, n being the number of visible entries.

    `mask` is True where visible and broadcasts to z; an entry of -inf is hidden too. A row in which
    nothing is visible gives zeros. s and bias are numbers or tensors that broadcast to z and do not
    vary along dim: (H, 1, 1) for the logits (B, H, T, S) of H heads.
    """
    visible, num_visible = _visible_entries(z, mask, dim)
    factor = _factor(z, s, bias, num_visible, dim)
    # The hidden entries leave before the product: -inf times a factor of 0 would be NaN.
    logits = factor * z.masked_fill(~visible, 0.0).to(factor.dtype)
    # A row with nothing to see is left whole and zeroed afterwards: its gradient stays finite.
    logits = logits.masked_fill(~visible & (num_visible > 0), -torch.inf)
    return logits.softmax(dim).masked_fill(num_visible == 0, 0.0).to(z.dtype)


def ssmax_power(z: Tensor, s: Number, *, mask: Tensor | None = None, dim: int = -1) -> Tensor:
    """Compute n**(s z) / sum of n**(s z): the definition, evaluated as it is written."""
    visible, num_visible = _visible_entries(z, mask, dim)
    exponent = _along(z, "s", s, dim) * z.masked_fill(~visible, 0.0)
    # A common factor of all entries: it keeps the powers in range and cancels in the ratio.
    largest = exponent.masked_fill(~visible, -torch.inf).amax(dim, keepdim=True)
    exponent = exponent - largest.masked_fill(num_visible == 0, 0.0)
    # Hidden exponents are not bounded by the largest; they leave before they can overflow.
    exponent = exponent.masked_fill(~visible, 0.0)
    power = torch.where(visible, num_visible.to(exponent.dtype) ** exponent, 0.0)
    total = power.sum(dim, keepdim=True)
    return (power / total).masked_fill(num_visible == 0, 0.0).to(z.dtype)


def _visible_entries(z: Tensor, mask: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """Find which entries are visible, and how many along dim (kept as 1)."""
    check_tensor("z", z, is_floating=True)
    if z.dim() == 0 or not -z.dim() <= dim < z.dim():
        raise UsageError(f"dim must name one of the {z.dim()} dimensions of z, got {dim}")
    visible = z != -torch.inf
    if mask is not None:
        check_tensor("mask", mask)
        if mask.dtype != torch.bool:
            raise UsageError(
                f"mask must be boolean, True is visible, got {mask.dtype}; an additive mask is "
                "added to z by the caller: its -inf is read as hidden"
            )
        try:
            visible = visible & mask.expand(z.shape)
        except RuntimeError:
            raise UsageError(
                f"mask must broadcast to the shape of z, {tuple(z.shape)}, got {tuple(mask.shape)}"
            ) from None
    return visible, visible.sum(dim, keepdim=True)


def _factor(z: Tensor, s: Number, bias: Number | None, num_visible: Tensor, dim: int) -> Tensor:
    """Compute s log n + b in float32 or wider, shaped to multiply z."""
    s = _along(z, "s", s, dim)
    bias = None if bias is None else _along(z, "bias", bias, dim)
    # One more dimension than z: the values line up with z, none is taken for heads.
    n = num_visible.clamp_min(1).unsqueeze(0)
    return unchecked_ssmax_factor(
        n, s.unsqueeze(0), None if bias is None else bias.unsqueeze(0)
    ).squeeze(0)


def _along(z: Tensor, name: str, value: Number, dim: int) -> Tensor:
    """Shape a value to z's rank, checked not to vary along dim, as wide as z and float32."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number or (isinstance(value, Tensor) and value.is_floating_point())):
        raise UsageError(f"{name} must be a number or a floating tensor, got {value!r}")
    if not isinstance(value, Tensor):
        value = torch.tensor(float(value), dtype=at_least_float32(z.dtype))
    shape = (1,) * (z.dim() - value.dim()) + tuple(value.shape)
    fits = len(shape) == z.dim() and all(a in (1, b) for a, b in zip(shape, z.shape, strict=True))
    if not fits or shape[dim] != 1:
        raise UsageError(
            f"{name} must be a number, or broadcast to z of shape {tuple(z.shape)} with size 1 "
            f"along dim {dim}, got {tuple(value.shape)}; for one value per head of (B, H, T, S) "
            "logits pass it as (H, 1, 1)"
        )
    check_finite(name, value)
    wide = torch.promote_types(z.dtype, at_least_float32(value.dtype))
    return value.to(z.device, wide).reshape(shape)
