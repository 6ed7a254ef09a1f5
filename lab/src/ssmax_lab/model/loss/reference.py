"""The reference implementation: it runs anywhere and defines the kernel."""

import torch
from torch import Tensor

from ssmax.ops.dtypes import at_least_float32


def losses_and_gradient(
    logits_nV: Tensor, targets_n: Tensor, vocabulary: int, ignore_index: int, gradient: bool
) -> tuple[Tensor, Tensor]:
    """The loss of every token, float32 or wider, 0 where ignored; its gradient, or the logits.

    Columns from `vocabulary` on are padding: they have no part in the loss and no gradient.
    """
    wide = at_least_float32(logits_nV.dtype)
    target_n1 = targets_n.unsqueeze(-1)
    counts_n1 = target_n1 != ignore_index
    target_n1 = target_n1.masked_fill(~counts_n1, 0)
    log_weights_nV = logits_nV[:, :vocabulary].to(wide).log_softmax(-1)
    losses_n = torch.where(counts_n1, -log_weights_nV.gather(-1, target_n1), 0.0).squeeze(-1)
    if not gradient:
        return losses_n, logits_nV
    dlogits_nV = log_weights_nV.exp_()
    dlogits_nV.scatter_add_(-1, target_n1, -torch.ones_like(target_n1, dtype=wide))
    dlogits_nV = torch.where(counts_n1, dlogits_nV, 0.0).to(logits_nV.dtype)
    padding = logits_nV.shape[1] - vocabulary
    return losses_n, torch.nn.functional.pad(dlogits_nV, (0, padding)) if padding else dlogits_nV
