"""Pretraining: windows of prepared text."""

from collections.abc import Callable
from pathlib import Path

from ssmax.errors import UsageError
from ssmax_lab.data.shards import TRAIN, VALIDATION, ShardSet, Vocabulary
from ssmax_lab.data.stream import TokenStream
from ssmax_lab.records import RUN_CONFIG, config_hash
from ssmax_lab.train.config import TrainConfig, flat
from ssmax_lab.train.loop import Outcome, train
from ssmax_lab.train.run import run_folder
from ssmax_lab.train.run_config import resumed_config
from ssmax_lab.train.samples import Batch
from ssmax_lab.train.text import check_text, check_vocabulary
from ssmax_lab.train.watch import flops_per_token
from ssmax_lab.train.world import DistContext


class Windows:
    """Windows of text as samples."""

    def __init__(self, shards: ShardSet, *, length: int, seed: int) -> None:
        self.stream: TokenStream = TokenStream(shards, length=length, seed=seed)
        self.fingerprint: str = config_hash(
            {"shards": shards.fingerprint, "length": length, "seed": seed}
        )

    def rows(self, first: int, count: int) -> Batch:
        """So many samples from the first on."""
        inputs_BT, targets_BT = self.stream.batch(first, count)
        return Batch(inputs_BT=inputs_BT, targets_BT=targets_BT)


def pretrain(
    config: TrainConfig,
    folder: Path,
    *,
    world: DistContext,
    resume: bool = False,
    quiet: bool = False,
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
    # Resolved, so that the run can go on from wherever it is asked to.
    config = config.replaced({"data.folder": str(data.resolve()), "data.tokenizer": tokenizer})
    if resume and (folder / RUN_CONFIG).is_file():
        resumed_config(folder, flat(config.to_dict()))
    with run_folder(
        folder,
        config,
        tokenizer_from=data,
        world=world,
        resume=resume,
        quiet=quiet,
        flops_per_token=flops_per_token(config.model),
    ) as opened:
        return train(
            config,
            folder,
            samples,
            world=world,
            opened=opened,
            validation=validation,
            resume=resume,
            keep_step=keep_step,
        )


def text_windows(
    data: Path, config: TrainConfig, *, check: Callable[[Vocabulary], None]
) -> tuple[Windows, Windows | None]:
    """Windows of prepared tokens, to learn from and to validate with.

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
