"""What the paper measures, on any model that can answer three questions.

Names are loaded on first use.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax_lab.eval.needle_score import measure_needle_scores as measure_needle_scores
    from ssmax_lab.eval.position_loss import measure_position_loss as measure_position_loss
    from ssmax_lab.eval.protocols import EvalModel as EvalModel
    from ssmax_lab.eval.retrieval import measure_retrieval as measure_retrieval
    from ssmax_lab.eval.retrieval_grid import (
        measure_retrieval_by_length as measure_retrieval_by_length,
    )
    from ssmax_lab.eval.sharpness import measure_sharpness as measure_sharpness

_HOME_OF = {
    "EvalModel": "protocols",
    "measure_sharpness": "sharpness",
    "measure_needle_scores": "needle_score",
    "measure_position_loss": "position_loss",
    "measure_retrieval": "retrieval",
    "measure_retrieval_by_length": "retrieval_grid",
}

__all__ = [
    "EvalModel",
    "measure_needle_scores",
    "measure_position_loss",
    "measure_retrieval",
    "measure_retrieval_by_length",
    "measure_sharpness",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = door(__name__, _HOME_OF)
