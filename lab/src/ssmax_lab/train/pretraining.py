"""Pretrain a model on windows of prepared text."""

from pathlib import Path

import torch

from ssmax.errors import UsageError
from ssmax_lab.data.shards import TRAIN, VALIDATION, ShardSet
from ssmax_lab.data.stream import TokenStream
from ssmax_lab.data.tokenizer import FILE as TOKENIZER
from ssmax_lab.data.tokenizer import Tokenizer, load_tokenizer
from ssmax_lab.records import RUN_CONFIG, config_hash
from ssmax_lab.train.config import DataConfig, TrainConfig, flat
from ssmax_lab.train.dist import DistContext
from ssmax_lab.train.loop import Outcome, train
from ssmax_lab.train.run import check_text, resumed_config
from ssmax_lab.train.step import Batch


class Windows:
    """Windows of text as samples."""

    def __init__(self, shards: ShardSet, *, length: int, seed: int) -> None:
        self.stream: TokenStream = TokenStream(shards, length=length, seed=seed)
        self.fingerprint: str = config_hash(
            {"shards": shards.fingerprint, "length": length, "seed": seed}
        )

    def batches(self, first: int, count: int) -> list[Batch]:
        """Give so many samples from the first on."""
        inputs_BT, targets_BT = map(torch.from_numpy, self.stream.batch(first, count))
        return [Batch(inputs_BT=inputs_BT, targets_BT=targets_BT)]


class WithNeedles:
    """Windows of text as samples, each with a few documents that hide a number."""

    def __init__(self, text: Windows, config: DataConfig, tokenizer: Tokenizer) -> None:
        # Here: few runs need them.
        from ssmax_lab.data.haystack import NeedleDocuments, haystack_text

        self.stream: TokenStream = text.stream
        self._text, self._per_row = text, config.needles_per_row
        self._needles = NeedleDocuments(
            haystack_text(text.stream.shards),
            length=config.needle_length,
            digits=config.needle_digits,
            seed=config.seed,
            tokenizer=tokenizer,
        )
        first = [self._needles.document(number).tokens for number in range(self._per_row)]
        self.fingerprint: str = config_hash({"text": text.fingerprint, "needles": first})

    def batches(self, first: int, count: int) -> list[Batch]:
        """Give so many windows from the first on, and their documents."""
        found = self._needles.batch(first * self._per_row, count * self._per_row)
        inputs_BT, targets_BT, places_BT = map(torch.from_numpy, found)
        needles = Batch(
            inputs_BT=inputs_BT,
            targets_BT=targets_BT,
            places_BT=places_BT,
            # All numbers of a step together weigh as much as its text.
            weight=self.stream.length / (self._per_row * self._needles.answer_length),
        )
        return [*self._text.batches(first, count), needles]


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
    samples: Windows | WithNeedles
    samples, validation = _windows(data, config)
    tokenizer = samples.stream.shards.vocabulary.name
    if config.data.needle_length:
        own = data / TOKENIZER
        loaded = load_tokenizer(str(own) if own.is_file() else tokenizer)
        samples = WithNeedles(samples, config.data, loaded)
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


def _windows(data: Path, config: TrainConfig) -> tuple[Windows, Windows | None]:
    """Open windows of prepared tokens, to learn from and to validate with."""
    length, seed = config.model.train_length, config.data.seed

    def opened(side: str) -> ShardSet:
        shards = ShardSet.open(data / side)
        shards.verify_small()
        return shards

    samples, validation = Windows(opened(TRAIN), length=length, seed=seed), None
    if config.data.validation_windows and (data / VALIDATION).is_dir():
        held_out = opened(VALIDATION)
        # A small text may have too little to spare.
        if held_out.num_tokens > length:
            validation = Windows(held_out, length=length, seed=seed)
    return samples, validation
