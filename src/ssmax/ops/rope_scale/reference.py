"""The plain twins: they run anywhere, differentiate themselves, and define the kernel."""

import torch
from torch import Tensor

from ssmax.ops.rope import rotate


def rope_scale_reference(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate both, scale the query, in float32 or wider; one cast at the end."""
    q = rotate(q_BHTD, cos, sin) * factor_BHT.unsqueeze(-1)
    k = rotate(k_BGTD, cos, sin)
    return q.to(q_BHTD.dtype), k.to(k_BGTD.dtype)


def rope_scale_inlined(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """The same with the factor in the tables, for torch.compile to fuse.

    It then makes of rotation and factor, and whatever the factor is computed from, the kernel that
    it makes of the rotation alone. A decoding step is a matter of launches: there this beats a
    kernel of our own, which needs the factor computed before it.
    """
    factor = factor_BHT.unsqueeze(-1)
    turned = 2 * cos.shape[-1]
    tables = (table if table.dim() == 2 else table.unsqueeze(1) for table in (cos, sin))
    q = rotate(q_BHTD[..., :turned], *(table * factor for table in tables))
    if turned < q_BHTD.shape[-1]:
        q = torch.cat((q, q_BHTD[..., turned:] * factor), dim=-1)
    return q.to(q_BHTD.dtype), rotate(k_BGTD, cos, sin).to(k_BGTD.dtype)
