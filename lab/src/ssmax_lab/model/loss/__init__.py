"""Linear layer and cross entropy in one, without the matrix of logits."""

from ssmax_lab.model.loss.api import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
