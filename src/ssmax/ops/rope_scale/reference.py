"""The plain twin: it runs anywhere, differentiates itself, and defines the kernel."""

from torch import Tensor

from ssmax.ops.rope import rotate


def rope_scale_reference(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate both, scale the query, in float32 or wider; one cast at the end."""
    q = rotate(q_BHTD, cos, sin) * factor_BHT.unsqueeze(-1)
    k = rotate(k_BGTD, cos, sin)
    return q.to(q_BHTD.dtype), k.to(k_BGTD.dtype)
