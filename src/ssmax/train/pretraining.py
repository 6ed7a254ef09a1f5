"""Pretraining: windows of prepared text."""

from pathlib import Path

from ssmax.data.shards import ShardSet, Vocabulary
from ssmax.data.stream import TokenStream
from ssmax.data.tasks import TRAIN, VALIDATION
from ssmax.records import config_hash
from ssmax.train.config import TrainConfig
from ssmax.train.loop import Outcome, train
from ssmax.train.run import run_folder
from ssmax.train.samples import Batch
from ssmax.train.watch import flops_per_token
from ssmax.train.world import World

VERIFIED_TOKENS = 1 << 30
"""Data up to this size is read and compared with its checksums before a run; sizes always are."""


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
    world: World,
    resume: bool = False,
    quiet: bool = False,
    keep_step: int | None = None,
) -> Outcome:
    """Train a model from its first weights, or from where the folder's run was left.

    The checkpoint of `keep_step` stays, for a run that branches off there.
    """
    data = Path(config.data.folder)
    shards = _open(data, TRAIN, config)
    length, seed = config.model.train_length, config.data.seed
    samples = Windows(shards, length=length, seed=seed)
    validation = None
    if config.data.validation_windows and (data / VALIDATION).is_dir():
        held_out = _open(data, VALIDATION, config)
        # A small text may have too little to spare.
        if held_out.num_tokens > length:
            validation = Windows(held_out, length=length, seed=seed)
    # Resolved, so that the run can go on from wherever it is asked to.
    named = {"data.folder": str(data.resolve()), "data.tokenizer": shards.vocabulary.name}
    config = config.replaced(named)
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


def _open(folder: Path, side: str, config: TrainConfig) -> ShardSet:
    if not config.data.folder or not folder.is_dir():
        raise ValueError(
            f"there are no prepared tokens in data.folder, {config.data.folder!r}; "
            "make them with ssmax data prepare"
        )
    shards = ShardSet.open(folder / side)
    _check_vocabulary(shards.vocabulary, config, folder)
    if shards.num_tokens <= VERIFIED_TOKENS:
        shards.verify()
    return shards


def _check_vocabulary(vocabulary: Vocabulary, config: TrainConfig, folder: Path) -> None:
    if vocabulary.size > config.model.vocab_size:
        raise ValueError(
            f"{folder} holds tokens of {vocabulary.name!r}, a vocabulary of {vocabulary.size}; "
            f"the model has {config.model.vocab_size}: set model.vocab_size={vocabulary.size}, or "
            "prepare the text with another tokenizer"
        )
