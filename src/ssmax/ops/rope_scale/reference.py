"""The plain twins: they run anywhere, differentiate themselves, and define the kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmax.ops.rope import rotate


def rope_scale_reference(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate both, scale the query, in float32 or wider; one cast at the end."""
    q = rotate(q_BHTD, cos, sin) * factor_BHT.unsqueeze(-1)
    k = rotate(k_BGTD, cos, sin)
    return q.to(q_BHTD.dtype), k.to(k_BGTD.dtype)


def rope_scale_joined(
    q_BHTD: Tensor, k_BGTD: Tensor, cos: Tensor, sin: Tensor, factor_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as one elementwise expression over all heads of q and k.

    torch.compile makes a single kernel of it, with the factor and whatever it is computed from
    inside. A decoding step is a matter of launches, so there this beats any kernel of our own.
    """
    query_heads, key_heads = q_BHTD.shape[1], k_BGTD.shape[1]
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    # Padding with zeros and adding joins the heads without the buffer that a concatenation makes.
    x = F.pad(q_BHTD, (0, 0, 0, 0, 0, key_heads)) + F.pad(k_BGTD, (0, 0, 0, 0, query_heads, 0))
    factor = F.pad(factor_BHT, (0, 0, 0, key_heads), value=1.0).unsqueeze(-1)
    half = cos.shape[-1]
    channel = torch.arange(x.shape[-1], device=x.device)
    is_low, is_turned = channel < half, channel < 2 * half
    partner = torch.where(is_low, channel + half, torch.where(is_turned, channel - half, channel))
    cos = torch.where(is_turned, cos[..., channel % half], 1.0)
    sin = torch.where(is_turned, sin[..., channel % half], 0.0)
    sin = torch.where(is_low, -sin, sin)
    x = x.to(wide)
    y = ((x * cos + x[..., partner] * sin) * factor).to(q_BHTD.dtype)
    return y[:, :query_heads], y[:, query_heads:]
