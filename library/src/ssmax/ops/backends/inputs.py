"""What a backend is given, and the questions that backends ask of it."""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

from dataclasses import dataclass

from torch import Tensor

from ssmax.ops.dtypes import at_least_float32
from ssmax.ops.visible import MaskSpec


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one softmax attention, its query scaled already."""

    q_BHTD: Tensor
    k_BGSD: Tensor
    v_BGSD: Tensor
    mask_spec: MaskSpec
    scale: float | None
    dropout_p: float

    @property
    def on_gpu(self) -> bool:
        """True on CUDA, where the fused kernels are."""
        return self.q_BHTD.is_cuda

    @property
    def is_grouped(self) -> bool:
        """True where query heads share key heads."""
        # A branch, not the comparison: see MaskSpec.is_plain_causal.
        if self.q_BHTD.shape[1] != self.k_BGSD.shape[1]:  # noqa: SIM103 (a branch on purpose)
            return True
        return False

    @property
    def needs_mask(self) -> bool:
        """True unless all is visible or the causal triangle is, which every kernel has built in."""
        return not (self.mask_spec.sees_all or self.mask_spec.is_plain_causal)

    @property
    def adds_wider_bias(self) -> bool:
        """True where an additive mask is wider than the heads it is added to."""
        bias = self.mask_spec.bias
        return (
            bias is not None
            and at_least_float32(self.q_BHTD.dtype) != self.q_BHTD.dtype
            and bias.dtype != self.q_BHTD.dtype
        )

    def repeated_heads(self) -> tuple[Tensor, Tensor]:
        """Repeat keys and values for every query head, for kernels that cannot group."""
        group = self.q_BHTD.shape[1] // max(self.k_BGSD.shape[1], 1)
        if group == 1:
            return self.k_BGSD, self.v_BGSD
        return (
            self.k_BGSD.repeat_interleave(group, dim=1),
            self.v_BGSD.repeat_interleave(group, dim=1),
        )
