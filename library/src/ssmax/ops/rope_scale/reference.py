"""The reference implementation: it runs anywhere, autograd included, and defines the kernel."""

import torch
from torch import Tensor

from ssmax.ops.dtypes import at_least_float32
from ssmax.ops.rope import rotate


def rope_scale_reference(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate both and scale the query, in float32 or wider; one cast at the end."""
    q = rotate(q_BHTD, cos, sin) * factor_BHT.unsqueeze(-1)
    k = rotate(k_BGTD, cos, sin)
    return q.to(q_BHTD.dtype), k.to(k_BGTD.dtype)


def rope_scale_step(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same, written for torch.compile to make one small kernel of it and of the factor.

    A decoding step costs what its launches and their latencies cost. With as many key heads as
    query heads the compiler makes one kernel of q and k, and the factor is cheapest in the tables,
    with the halves exchanged by a flip. With fewer it makes two, and the plain form is the best
    of five that were tried (LOG.md).
    """
    if q_BHTD.shape[1] != k_BGTD.shape[1]:
        return rope_scale_reference(q_BHTD, k_BGTD, cos, sin, factor)
    tables = [table if table.dim() == 2 else table.unsqueeze(1) for table in (cos, sin)]
    column = factor.unsqueeze(-1)
    turned = 2 * cos.shape[-1]
    q = _turn(q_BHTD[..., :turned], *(table * column for table in tables))
    k = _turn(k_BGTD[..., :turned], *tables)
    if turned < q_BHTD.shape[-1]:
        q = torch.cat((q, q_BHTD[..., turned:] * column), dim=-1)
        k = torch.cat((k, k_BGTD[..., turned:].to(k.dtype)), dim=-1)
    return q.to(q_BHTD.dtype), k.to(k_BGTD.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = x.to(at_least_float32(x.dtype)).unflatten(-1, (2, cos.shape[-1]))
    sign = torch.arange(-1, 2, 2, device=x.device, dtype=sin.dtype).unsqueeze(-1)
    return (halves * cos.unsqueeze(-2) + halves.flip(-2) * (sin.unsqueeze(-2) * sign)).flatten(-2)
