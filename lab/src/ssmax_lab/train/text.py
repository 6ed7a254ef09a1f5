"""The prepared tokens that a run learns from, looked at without torch."""

from pathlib import Path

from ssmax.errors import UsageError
from ssmax_lab.data.shards import TRAIN, ShardSet, Vocabulary
from ssmax_lab.train.config import TrainConfig


def check_text(config: TrainConfig) -> None:
    """Refuse a data.folder without prepared tokens, or with those of another vocabulary."""
    folder = Path(config.data.folder)
    if not config.data.folder or not folder.is_dir():
        raise UsageError(
            f"there are no prepared tokens in data.folder, {config.data.folder!r}; "
            "make them with ssmax-lab data prepare"
        )
    check_vocabulary(ShardSet.open(folder / TRAIN).vocabulary, config, folder)


def check_vocabulary(vocabulary: Vocabulary, config: TrainConfig, folder: Path) -> None:
    """Refuse tokens that the model has no embedding for."""
    if vocabulary.size > config.model.vocab_size:
        raise UsageError(
            f"{folder} holds tokens of {vocabulary.name!r}, a vocabulary of {vocabulary.size}; "
            f"the model has {config.model.vocab_size}: set model.vocab_size={vocabulary.size}, or "
            "prepare the text with another tokenizer"
        )
