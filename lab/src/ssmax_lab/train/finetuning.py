"""Fine-tune on questions: the loss on the answers, examples packed but hidden from each other."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ssmax.errors import UsageError
from ssmax_lab.data.haystack import haystack_text, hidden_examples
from ssmax_lab.data.qa import (
    HIDDEN,
    INVENTED,
    Example,
    QuestionStream,
    encode_questions,
    hidden_digits,
    invented_questions,
    question_sources,
    read_squad,
    with_full_paths,
)
from ssmax_lab.data.shards import TRAIN, ShardSet
from ssmax_lab.records import config_hash
from ssmax_lab.train.config import SwitchConfig, TrainConfig
from ssmax_lab.train.dist import DistContext
from ssmax_lab.train.loop import Outcome, train
from ssmax_lab.train.recipes import finetuning_of
from ssmax_lab.train.run import (
    load_run_model,
    load_run_tokenizer,
    read_run_config,
    resumed_config,
    text_of_run,
)
from ssmax_lab.train.step import Batch

logger = logging.getLogger(__name__)

NUM_INVENTED, NUM_HIDDEN = 2048, 8192
INVENTED_FACTS = 3
"""So few that a context and its question fit the smallest model's 128 bytes."""
HELD_OUT = 50
"""One example of so many is kept for validation."""
VALIDATION_ROWS = 32


class Rows:
    """Packed rows of questions as samples."""

    def __init__(self, examples: list[Example], *, length: int, seed: int) -> None:
        self.stream: QuestionStream = QuestionStream(examples, length=length, seed=seed)
        content = hashlib.sha256()
        for example in examples:
            content.update(example.tokens.tobytes() + bytes([example.answer_start % 256]))
        self.fingerprint: str = config_hash(
            {"questions": content.hexdigest(), "length": length, "seed": seed}
        )

    def batches(self, first: int, count: int) -> list[Batch]:
        """Give so many rows from the first on, end to end, with the bounds of all examples."""
        tokens, targets, cu_seqlens = map(torch.from_numpy, self.stream.batch(first, count))
        return [Batch(inputs_BT=tokens[None], targets_BT=targets[None], cu_seqlens=cu_seqlens)]


def finetune(
    base: Path,
    folder: Path,
    *,
    ranks: DistContext,
    questions: str | None = None,
    rule: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Outcome:
    """Teach a run's model to answer questions; `rule` replaces its attention's before that.

    `questions` is a file in SQuAD's format, "invented", or "hidden" ("hidden:7" for numbers of 7
    digits), the default of a quick run; or several of them, joined by "+".
    `overrides` are laid over table 3.
    """
    overrides = dict(overrides or {})
    base_config = read_run_config(base)
    before = _resumed(folder, base, overrides, rule) if resume else None
    if before is None:
        _check_overrides(overrides)
        given = {key: value for key, value in overrides.items() if key == "data.seed"}
        seed = base_config.with_overrides(given).data.seed
        by_default = HIDDEN if base_config.run.recipe == "quick" else INVENTED
    else:
        seed, rule, by_default = before.data.seed, before.model.rule, before.data.questions
    questions = with_full_paths(questions or by_default)
    length = base_config.model.train_length
    examples, dropped = _examples(questions, base, length=length, seed=seed)
    taught = [example for index, example in enumerate(examples) if index % HELD_OUT]
    samples = Rows(taught, length=length, seed=seed)
    validation = Rows(examples[::HELD_OUT], length=length, seed=seed)
    model = load_run_model(base)
    model = model if rule in (None, model.config.rule) else model.with_rule(rule)
    named = {"data.questions": questions, "data.base": str(base.resolve())}
    if before is None:
        windows = min(VALIDATION_ROWS, validation.stream.rows_in_epoch(0))
        config = finetuning_of(
            dataclasses.replace(base_config, model=model.config, switch=SwitchConfig()),
            rows=samples.stream.rows_in_epoch(0),
            overrides={"data.validation_windows": windows, **overrides, **named},
        )
    else:
        config = before.with_overrides(named)
    logger.info(
        f"{len(taught):,} questions to learn from, "
        f"{samples.stream.rows_in_epoch(0):,} rows of {length} tokens an epoch"
        + (f"; {dropped:,} are longer than a row and left out" if dropped else "")
    )
    return train(
        config,
        folder,
        samples,
        ranks=ranks,
        tokenizer_from=base,
        validation=validation if config.data.validation_windows else None,
        first_weights=model,
        resume=resume,
    )


def _resumed(
    folder: Path, base: Path, overrides: Mapping[str, Any], rule: str | None
) -> TrainConfig:
    """Read a run's configuration; another base or rule than it began with is refused."""
    before = resumed_config(folder, overrides)
    # A base that was moved is found under its new name; its text and questions are compared later.
    if (there := Path(before.data.base)).is_dir() and not there.samefile(base):
        raise UsageError(
            f"{folder} began from {there}, not {base}; resume with that, or give another name"
        )
    if rule not in (None, before.model.rule):
        raise UsageError(
            f"{folder} began under the rule {before.model.rule!r}, not {rule!r}; resume without "
            "--config, or give another name"
        )
    return before


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    for key in overrides:
        if key in ("data.base", "data.questions"):
            raise UsageError(f"{key} is told by RUN and --questions; leave it out of the settings")
        if key.startswith("model.") or key in ("data.folder", "data.tokenizer"):
            raise UsageError(
                f"{key} is the pretrained run's and cannot change in fine-tuning; "
                "--config replaces the rule"
            )


def _examples(questions: str, base: Path, *, length: int, seed: int) -> tuple[list[Example], int]:
    """Encode the questions that fit the rows; count those that do not."""
    tokenizer, examples, dropped = load_run_tokenizer(base), [], 0
    end_of_document = tokenizer.vocabulary.end_of_document
    for source in question_sources(questions):
        if (digits := hidden_digits(source)) is not None:
            examples += hidden_examples(
                haystack_text(ShardSet.open(text_of_run(read_run_config(base)) / TRAIN)),
                count=NUM_HIDDEN,
                length=length,
                digits=digits,
                seed=seed,
                tokenizer=tokenizer,
            )
            continue
        if source == INVENTED:
            found = invented_questions(NUM_INVENTED, seed=seed, max_facts=INVENTED_FACTS)
        else:
            found = read_squad(source)
        fitting, too_long = encode_questions(
            found, tokenizer.encode, end_of_document=end_of_document, length=length
        )
        if len(fitting) < 2:
            raise UsageError(
                f"{len(fitting)} of {len(found)} questions of {source!r} fit {length} tokens "
                f"({too_long} are longer); at least 2 are needed"
            )
        examples, dropped = examples + fitting, dropped + too_long
    return examples, dropped
