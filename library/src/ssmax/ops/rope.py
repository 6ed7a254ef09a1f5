"""Rotary position embedding: tables and rotation, in plain PyTorch.

The rotated part of a head is its first `2 * cos.shape[-1]` channels, split in two halves that turn
together (the layout of GPT-NeoX and Llama); the channels after it pass through.
"""

# B batch, H heads, T tokens, D head_dim, R rotary width

import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.ops.dtypes import at_least_float32, check_tensor


def rope_tables(positions: Tensor, width: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Make cos and sin of every position and frequency, (..., T, R / 2), for rotary width R.

    The angles are taken in float64: at ten million tokens a float32 angle is off by half a radian.
    """
    check_rotary(width, theta)
    check_tensor("positions", positions)
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(width // 2, dtype=exact, device=positions.device)
    angle = positions.to(exact).unsqueeze(-1) * theta ** (-2.0 * pair / max(width, 1))
    return angle.cos().float(), angle.sin().float()


def check_rotary(width: int, theta: float) -> None:
    """Raise on a rotary width or a base that there is none of; width 0 rotates nothing."""
    if width < 0 or width % 2:
        raise UsageError(f"the rotary width must be even and at least 0, got {width}")
    if not theta > 0:
        raise UsageError(f"theta must be positive, got {theta}")


def apply_rope(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head by its position; `ssmax_attention` comes after it and scales the query.

    cos and sin come from `rope_tables`: (T, R / 2) or (B, T, R / 2).
    """
    check_tables(x_BHTD, cos, sin)
    return rotate(x_BHTD, cos, sin).to(x_BHTD.dtype)


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in float32 or wider, not yet cast back."""
    wide = at_least_float32(x_BHTD.dtype)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1]
    x_BHTD = x_BHTD.to(wide)
    low, high, rest = x_BHTD.split((half, half, x_BHTD.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def check_tables(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise where the tables do not belong to these heads."""
    if x_BHTD.dim() != 4 or not x_BHTD.is_floating_point():
        raise UsageError(
            "heads must be floating point of shape (batch, heads, tokens, width), "
            f"got {x_BHTD.dtype} of shape {tuple(x_BHTD.shape)}"
        )
    batch, _, tokens, width = x_BHTD.shape
    if cos.shape != sin.shape or not (cos.is_floating_point() and sin.is_floating_point()):
        raise UsageError(
            "cos and sin must be floating point and of one shape, "
            f"got {cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
        )
    if (
        cos.dim() not in (2, 3)
        or cos.shape[-2] != tokens
        or cos.shape[:-2] not in ((), (1,), (batch,))
    ):
        raise UsageError(
            f"cos and sin must be ({tokens} tokens, rotary width / 2), or with a batch of {batch} "
            f"before it, got {tuple(cos.shape)}; make them with rope_tables(positions, width)"
        )
    if 2 * cos.shape[-1] > width:
        raise UsageError(
            f"cos and sin rotate {2 * cos.shape[-1]} channels, a head has {width}; "
            "they hold one column per pair of channels, so at most half the head_dim"
        )
