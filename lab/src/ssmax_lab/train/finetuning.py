"""Fine-tune on questions: the loss on the answers, examples packed but hidden from each other."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ssmax.errors import UsageError
from ssmax_lab.data.haystack import haystack_text, hidden_examples, sentence_ends
from ssmax_lab.data.invented import invented_questions
from ssmax_lab.data.qa import (
    Example,
    Packed,
    Question,
    QuestionStream,
    encode_questions,
    read_squad,
)
from ssmax_lab.data.shards import TRAIN, ShardSet
from ssmax_lab.data.tokenizer import Tokenizer
from ssmax_lab.model import LM
from ssmax_lab.records import METRICS, RUN_CONFIG, config_hash
from ssmax_lab.train.config import SwitchConfig, TrainConfig
from ssmax_lab.train.dist import DistContext
from ssmax_lab.train.loop import Outcome, train
from ssmax_lab.train.questions import (
    HIDDEN,
    INVENTED,
    are_same_questions,
    hidden_digits,
    question_sources,
    with_full_paths,
)
from ssmax_lab.train.recipes import finetuning_of
from ssmax_lab.train.run import (
    load_run_model,
    load_run_tokenizer,
    read_run_config,
    resumed_config,
    text_of_run,
)
from ssmax_lab.train.task import Batch, LMTask

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
        rows = self.stream.batch(first, count)
        return [
            Batch(
                inputs_BT=torch.cat([row.tokens for row in rows]).unsqueeze(0),
                targets_BT=torch.cat([row.targets for row in rows]).unsqueeze(0),
                cu_seqlens=_joined_bounds(rows),
            )
        ]


def _joined_bounds(rows: list[Packed]) -> torch.Tensor:
    bounds = [torch.zeros(1, dtype=torch.int32)]
    for row in rows:
        bounds.append(row.cu_seqlens[1:] + bounds[-1][-1])
    return torch.cat(bounds)


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
    if resume:
        before = resumed_config(folder, {})
        # One that was moved is taken for the same, and so is a copy.
        if (there := Path(before.data.base)).is_dir() and not _is_same_run(base, there):
            raise UsageError(
                f"{folder} began from {before.data.base}, not {base}; resume with that, or give "
                "another name"
            )
        began = before.data.questions
        if questions and not are_same_questions(questions, began):
            raise UsageError(
                f"{folder} began with the questions {began!r}, not {with_full_paths(questions)!r}; "
                "resume without --questions, or give another name"
            )
        questions = questions or began
        seed = before.data.seed
    else:
        _check_overrides(overrides)
        given = {key: value for key, value in overrides.items() if key == "data.seed"}
        seed = base_config.with_overrides(given).data.seed
    questions = questions or (HIDDEN if base_config.run.recipe == "quick" else INVENTED)
    questions = with_full_paths(questions)
    length = base_config.model.train_length
    examples, dropped = _examples(questions, base, length=length, seed=seed)
    samples, validation = question_rows(examples, length=length, seed=seed)
    if resume:
        # Also where no checkpoint is whole yet: then it starts again from the base's weights.
        config = resumed_config(folder, overrides).with_overrides({"data.questions": questions})
        if rule not in (None, config.model.rule):
            raise UsageError(
                f"{folder} began under the rule {config.model.rule!r}, not {rule!r}; resume "
                "without --config, or give another name"
            )
        model = _with_rule(load_run_model(base), config.model.rule)
    else:
        model = load_run_model(base)
        model = model if rule is None else _with_rule(model, rule)
        overrides |= {"data.questions": questions, "data.base": str(base.resolve())}
        config = _config(base_config, model, samples, validation, overrides)
    logger.info(
        f"{len(samples.stream.examples):,} questions to learn from, "
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
        task=LMTask(model),
        resume=resume,
    )


def question_rows(examples: list[Example], *, length: int, seed: int) -> tuple[Rows, Rows]:
    """Split examples into rows to learn from and rows to validate with."""
    taught = [example for index, example in enumerate(examples) if index % HELD_OUT]
    return (
        Rows(taught, length=length, seed=seed),
        Rows(examples[::HELD_OUT], length=length, seed=seed),
    )


def _with_rule(model: LM, rule: str) -> LM:
    return model if model.config.rule == rule else model.with_rule(rule)


def _is_same_run(one: Path, other: Path) -> bool:
    """Compare two runs: the same folder, or a copy, where every step had the same loss."""

    def told(run: Path) -> list[bytes]:
        return [
            path.read_bytes() for name in (RUN_CONFIG, METRICS) if (path := run / name).exists()
        ]

    return one.samefile(other) or (len(told(one)) == 2 and told(one) == told(other))


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    for key in overrides:
        if key in ("data.base", "data.questions"):
            raise UsageError(f"{key} is told by RUN and --questions; leave it out of the settings")
        if key.startswith("model.") or key in ("data.folder", "data.tokenizer"):
            raise UsageError(
                f"{key} is the pretrained run's and cannot change in fine-tuning; "
                "--config replaces the rule"
            )


def _config(
    base: TrainConfig, model: LM, samples: Rows, validation: Rows, overrides: Mapping[str, Any]
) -> TrainConfig:
    pretrained = dataclasses.replace(base, model=model.config, switch=SwitchConfig())
    windows = min(VALIDATION_ROWS, validation.stream.rows_in_epoch(0))
    return finetuning_of(
        pretrained,
        steps_per_epoch=samples.stream.steps_per_epoch,
        overrides={"data.validation_windows": windows, **overrides},
    )


def _examples(questions: str, base: Path, *, length: int, seed: int) -> tuple[list[Example], int]:
    """Encode the questions that fit the rows; count those that do not."""
    every = [
        _examples_of(source, base, length=length, seed=seed)
        for source in question_sources(questions)
    ]
    fitting = [example for examples, _ in every for example in examples]
    return fitting, sum(dropped for _, dropped in every)


def _examples_of(source: str, base: Path, *, length: int, seed: int) -> tuple[list[Example], int]:
    tokenizer = load_run_tokenizer(base)
    if (digits := hidden_digits(source)) is not None:
        hidden = hidden_examples(
            haystack_text(ShardSet.open(text_of_run(read_run_config(base)) / TRAIN)),
            count=NUM_HIDDEN,
            length=length,
            digits=digits,
            seed=seed,
            encode=tokenizer.encode,
            breaks=sentence_ends(tokenizer.decode, tokenizer.vocabulary.size),
            end_of_document=tokenizer.vocabulary.end_of_document,
        )
        return hidden, 0
    return encoded_questions(source, tokenizer, length=length, seed=seed)


def encoded_questions(
    source: str, tokenizer: Tokenizer, *, length: int, seed: int
) -> tuple[list[Example], int]:
    """Encode the questions of a file, or invented ones, that fit the rows; count the others."""
    questions = read_questions(source, seed=seed)
    end_of_document = tokenizer.vocabulary.end_of_document
    examples, dropped = encode_questions(
        questions, tokenizer.encode, end_of_document=end_of_document, length=length
    )
    if len(examples) < 2:
        raise UsageError(
            f"{len(examples)} of {len(questions)} questions of {source!r} fit {length} tokens "
            f"({dropped} are longer); at least 2 are needed"
        )
    return examples, dropped


def read_questions(source: str, *, seed: int) -> list[Question]:
    """Read the questions of a file, or invent some."""
    if source == INVENTED:
        return invented_questions(NUM_INVENTED, seed=seed, max_facts=INVENTED_FACTS)
    return read_squad(source)
