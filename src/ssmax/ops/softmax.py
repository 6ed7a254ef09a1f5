"""Scalable-Softmax of logits, with softmax's signature, and its definition kept as the oracle."""

import torch
from torch import Tensor

from ssmax.ops.scale import Number, ssmax_factor
from ssmax.ops.visible import values_are_readable


def ssmax(
    z: Tensor, s: Number, *, bias: Number | None = None, mask: Tensor | None = None, dim: int = -1
) -> Tensor:
    """softmax((s log n + b) z) along dim, n being the number of visible entries.

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
    """n**(s z) / sum of n**(s z): the definition, evaluated as it is written in z's own dtype."""
    visible, num_visible = _visible_entries(z, mask, dim)
    _check_along(z, "s", torch.as_tensor(s), dim)
    exponent = torch.as_tensor(s).to(z.device) * z.masked_fill(~visible, 0.0)
    # A common factor of all entries: it keeps the powers in range and cancels in the ratio.
    exponent = exponent - exponent.masked_fill(~visible, -torch.inf).amax(dim, keepdim=True).clamp(
        min=torch.finfo(z.dtype).min
    )
    power = torch.where(visible, num_visible.clamp_min(1).to(z.dtype) ** exponent, 0.0)
    return (power / power.sum(dim, keepdim=True)).masked_fill(num_visible == 0, 0.0)


def _visible_entries(z: Tensor, mask: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """Which entries are visible, and how many along dim (kept as 1)."""
    if not z.is_floating_point():
        raise ValueError(f"z must be floating point, got {z.dtype}; write z.float()")
    if z.dim() == 0 or not -z.dim() <= dim < z.dim():
        raise ValueError(f"dim must name one of the {z.dim()} dimensions of z, got {dim}")
    visible = z != -torch.inf
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be boolean, True is visible, got {mask.dtype}; an additive mask is "
                "added to z by the caller: its -inf is read as hidden"
            )
        try:
            visible = visible & mask.expand(z.shape)
        except RuntimeError:
            raise ValueError(
                f"mask must broadcast to the shape of z, {tuple(z.shape)}, got {tuple(mask.shape)}"
            ) from None
    return visible, visible.sum(dim, keepdim=True)


def _factor(
    z: Tensor, s: Number, bias: Number | None, num_visible: Tensor, dim: int
) -> Tensor:
    """s log n + b in float32 or wider, shaped to multiply z."""
    columns = []
    for name, value in (("s", s), ("bias", bias)):
        if value is None:
            columns.append(None)
            continue
        value = torch.as_tensor(value, device=z.device)
        _check_along(z, name, value, dim)
        dtype = torch.promote_types(z.dtype, torch.promote_types(value.dtype, torch.float32))
        # Two dimensions at least: here the values line up with z, not with heads.
        columns.append(value.to(dtype)[(None,) * max(0, z.dim() - value.dim())])
    if z.dim() == 1:
        columns = [None if value is None else value.reshape(()) for value in columns]
    return ssmax_factor(num_visible.clamp_min(1), columns[0], columns[1])


def _check_along(z: Tensor, name: str, value: Tensor, dim: int) -> None:
    """A value must broadcast to z without varying along dim and without NaN."""
    axis = dim % z.dim() - z.dim()
    varies = value.dim() >= -axis and value.shape[axis] != 1
    too_deep = value.dim() > z.dim()
    if varies or too_deep or any(
        a not in (1, b) for a, b in zip(value.shape[::-1], z.shape[::-1], strict=False)
    ):
        raise ValueError(
            f"{name} must be a number, or broadcast to z of shape {tuple(z.shape)} with size 1 "
            f"along dim {dim}, got {tuple(value.shape)}; for one value per head of (B, H, T, S) "
            "logits pass it as (H, 1, 1)"
        )
    if values_are_readable(value) and value.isnan().any():
        raise ValueError(f"{name} holds NaN; the training that made it has diverged")
