"""Linear layer and cross entropy in one, without the matrix of logits."""

from ssmax.ops.loss.api import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
