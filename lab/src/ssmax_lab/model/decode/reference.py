"""The reference implementation: it runs anywhere and defines the kernel."""

import torch
from torch import Tensor

from ssmax.ops.dtypes import at_least_float32


def decode_attention_reference(
    q_BH1D: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, start_B: Tensor, stop_B: Tensor, scale: float
) -> Tensor:
    """Look at every key and hide those outside the bounds."""
    wide = at_least_float32(q_BH1D.dtype)
    group = q_BH1D.shape[1] // k_BGSD.shape[1]
    k, v = (x.to(wide).repeat_interleave(group, dim=1) for x in (k_BGSD, v_BGSD))
    index_S = torch.arange(k.shape[2], device=k.device)
    seen_BS = (index_S >= start_B.unsqueeze(-1)) & (index_S < stop_B.unsqueeze(-1))
    seen = seen_BS[:, None, None]
    logits = (q_BH1D.to(wide) @ k.mT * scale).masked_fill(~seen, -torch.inf)
    weights = logits.softmax(-1).masked_fill(~seen, 0.0)
    # What was never written may hold anything; nothing times it has to be nothing.
    v = v.masked_fill(~seen.mT, 0.0)
    return (weights @ v).to(q_BH1D.dtype)
