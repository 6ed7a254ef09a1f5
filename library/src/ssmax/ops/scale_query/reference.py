"""The reference implementation: it runs anywhere, autograd included, and defines the kernel."""

import torch
from torch import Tensor

from ssmax.ops.scale import Number, unchecked_ssmax_factor
from ssmax.ops.visible import Ramp, is_transformed


def scale_query(q_BHTD: Tensor, factor_BHT: Tensor) -> Tensor:
    """Multiply q by its factor in float32 or wider, cast once."""
    if torch.compiler.is_compiling() and q_BHTD.is_cuda:
        # One factor a row: its gradient is then a sum over D, which the compiler joins to dq, and
        # a small sum over the batch; as one sum over both it takes ten times as long.
        factor_BHT = factor_BHT.expand(q_BHTD.shape[:3])
    factor = factor_BHT.unsqueeze(-1)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return (q_BHTD * factor).to(q_BHTD.dtype)
    return torch.mul(q_BHTD, factor, out=torch.empty_like(q_BHTD))


def scale_by_ssmax_reference(
    q_BHTD: Tensor, s: Number, bias: Number | None, n: Tensor | Ramp
) -> Tensor:
    """Multiply q by s log n + b, n being (T,), (B | 1, T) or two numbers."""
    if isinstance(n, Ramp):
        n = n.counts(q_BHTD.shape[2], q_BHTD.device)
    return scale_query(q_BHTD, unchecked_ssmax_factor(n, s, bias))
