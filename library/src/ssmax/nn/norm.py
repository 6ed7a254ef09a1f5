"""RMSNorm for streams that are narrower than its weight."""

from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """RMSNorm as wide as its weight, handed back as x came: under autocast both differ."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm (..., width) over its last dimension."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)
