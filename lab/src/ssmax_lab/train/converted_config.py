"""What fine-tuning a converted model takes, checked without torch."""

import dataclasses
import math
from pathlib import Path

from ssmax.errors import UsageError
from ssmax.hf.sources import is_adapter
from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.questions import INVENTED, hidden_digits, question_sources

LENGTH = 1024
"""Tokens of a row, unless told otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedConfig:
    """Somebody's model, converted."""

    folder: str = ""
    """Where `ssmax convert` left it: a whole model, or an adapter."""
    base: str = ""
    """Of an adapter: the folder or the name of the model that it is for."""
    rule: str = "ssmax_bias"
    """Filled in from the model."""
    anneals: bool = False
    """Filled in from the model: s and b are led to the paper's start along the steps."""
    train_length: int = LENGTH
    """Tokens of a row."""
    only_ssmax: bool = False
    """s and b learn, everything else stays."""
    ssmax_lr: float = 1e-3
    """Peak of the learning rate of s and b; that of all else is optim.lr."""
    gradient_checkpointing: bool = False
    """Compute a layer again instead of keeping what its gradient needs."""

    def __post_init__(self) -> None:
        if self.train_length < 2:
            raise UsageError(f"model.train_length must be at least 2, got {self.train_length}")
        if not self.ssmax_lr > 0 or not math.isfinite(self.ssmax_lr):
            raise UsageError(f"model.ssmax_lr must be positive, got {self.ssmax_lr}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedTrainConfig(TrainConfig):
    """A run over a converted model; the loop asks of it what it asks of any other."""

    model: ConvertedConfig = dataclasses.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=ConvertedConfig
    )

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        if self.switch.rule:
            raise UsageError("switch.rule is for the paper's model; convert with another rule")
        if self.run.record:
            raise UsageError("run.record is for the paper's model; leave it out")

    @property
    def is_bound_to_steps(self) -> bool:
        """Likewise where the model is annealed."""
        return self.model.anneals or self.schedule.kind != "constant"


def check_folder_and_base(source: Path, base: str) -> None:
    """Refuse what is no folder, an adapter without its base, and a whole model with one."""
    if not source.is_dir():
        raise UsageError(f"there is no folder {source}; ssmax convert writes one")
    if is_adapter(source) and not base:
        raise UsageError(f"{source} holds an adapter; name the model it is for with --base")
    if base and not is_adapter(source):
        raise UsageError(f"{source} holds a whole model; --base is for adapters")


def check_samples(data: Path | None, questions: str | None) -> None:
    """Refuse text and questions together, and questions that only a run's text can answer."""
    if data is not None and questions is not None:
        raise UsageError("text and questions are two runs; give --data or --questions")
    if any(hidden_digits(source) is not None for source in question_sources(questions or INVENTED)):
        raise UsageError(
            "hidden questions are about the text of a run, which a converted model does not have; "
            "give --questions invented or a file in SQuAD's format, or text with --data"
        )
