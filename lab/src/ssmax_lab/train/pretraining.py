"""Pretrain a model on windows of prepared text."""

from collections.abc import Callable
from pathlib import Path

from ssmax.errors import UsageError
from ssmax_lab.data.shards import TRAIN, VALIDATION, ShardSet, Vocabulary
from ssmax_lab.data.stream import TokenStream
from ssmax_lab.records import RUN_CONFIG, config_hash
from ssmax_lab.train.config import TrainConfig, flat
from ssmax_lab.train.dist import DistContext
from ssmax_lab.train.loop import Outcome, train
from ssmax_lab.train.run import check_text, check_vocabulary, resumed_config
from ssmax_lab.train.task import Batch


class Windows:
    """Windows of text as samples."""

    def __init__(self, shards: ShardSet, *, length: int, seed: int) -> None:
        self.stream: TokenStream = TokenStream(shards, length=length, seed=seed)
        self.fingerprint: str = config_hash(
            {"shards": shards.fingerprint, "length": length, "seed": seed}
        )

    def rows(self, first: int, count: int) -> Batch:
        """Give so many samples from the first on."""
        inputs_BT, targets_BT = self.stream.batch(first, count)
        return Batch(inputs_BT=inputs_BT, targets_BT=targets_BT)


def pretrain(
    config: TrainConfig,
    folder: Path,
    *,
    ranks: DistContext,
    resume: bool = False,
    keep_step: int | None = None,
) -> Outcome:
    """Train a model from its first weights, or from where the folder's run was left.

    The checkpoint of `keep_step` stays, for a run that branches off there.
    """
    if config.data.base or config.data.questions:
        raise UsageError("data.base and data.questions are fine-tuning's; leave them out")
    data = Path(config.data.folder)
    check_text(config)
    samples, validation = text_windows(
        data, config, check=lambda vocabulary: check_vocabulary(vocabulary, config, data)
    )
    tokenizer = samples.stream.shards.vocabulary.name
    # Resolved, so that the run can resume from wherever it is asked to.
    config = config.with_overrides(
        {"data.folder": str(data.resolve()), "data.tokenizer": tokenizer}
    )
    if resume and (folder / RUN_CONFIG).is_file():
        resumed_config(folder, flat(config.to_dict()))
    return train(
        config,
        folder,
        samples,
        ranks=ranks,
        tokenizer_from=data,
        validation=validation,
        resume=resume,
        keep_step=keep_step,
    )


def text_windows(
    data: Path, config: TrainConfig, *, check: Callable[[Vocabulary], None]
) -> tuple[Windows, Windows | None]:
    """Open windows of prepared tokens, to learn from and to validate with.

    `check` refuses the tokens of others.
    """
    length, seed = config.model.train_length, config.data.seed

    def opened(side: str) -> ShardSet:
        shards = ShardSet.open(data / side)
        check(shards.vocabulary)
        shards.verify_small()
        return shards

    samples, validation = Windows(opened(TRAIN), length=length, seed=seed), None
    if config.data.validation_windows and (data / VALIDATION).is_dir():
        held_out = opened(VALIDATION)
        # A small text may have too little to spare.
        if held_out.num_tokens > length:
            validation = Windows(held_out, length=length, seed=seed)
    return samples, validation
