"""What the paper measures, on any model that can answer three questions."""

from ssmax.eval.fading import measure_fading
from ssmax.eval.needle_score import measure_needle_scores
from ssmax.eval.position_loss import measure_position_loss
from ssmax.eval.protocols import Subject
from ssmax.eval.retrieval import measure_retrieval

__all__ = [
    "Subject",
    "measure_fading",
    "measure_needle_scores",
    "measure_position_loss",
    "measure_retrieval",
]
