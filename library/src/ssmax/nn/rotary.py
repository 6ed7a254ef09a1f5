"""Rotary position embedding as a module without state."""

from torch import Tensor, nn

from ssmax.ops.rope import check_rotary, rope_tables


class RotaryEmbedding(nn.Module):
    """cos and sin for `apply_rope` and `rope_scale`.

    No table is stored, so `rotary.theta = 500_000.0` holds from the next call on, at any length.
    Width 0 rotates nothing.
    """

    def __init__(self, width: int, theta: float = 10_000.0) -> None:
        super().__init__()
        check_rotary(width, theta)
        self.width = width
        self.theta = theta

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Make tables (..., T, width / 2), float32, for positions (..., T)."""
        return rope_tables(positions, self.width, self.theta)

    def extra_repr(self) -> str:
        """Describe it in the module's print-out."""
        return f"{self.width}, theta={self.theta:g}"
