"""Question answering for fine-tuning: SQuAD in rows of examples that do not see each other."""

import bisect
import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.data.sources import BROKEN, open_bytes
from ssmax_lab.data.stream import IGNORE

INVENTED, HIDDEN = "invented", "hidden"
"""Questions that need no file: about a few facts, or about a number hidden in the base's text.

`hidden:7` hides numbers of 7 digits.
"""
HIDDEN_DIGITS = 4
UNANSWERABLE = "unanswerable"
"""What is answered where the context holds no answer."""

# On SQuAD, rows of 1024 tokens are 90 % full with one open row, 97 % with 8 and 98 % with 64.
_OPEN_ROWS = 64

NAMES = (
    "Ada", "Ben", "Cleo", "Dora", "Emil", "Faye", "Gus", "Hana", "Ivo", "June", "Karl", "Lena",
    "Milo", "Nora", "Otto", "Pia", "Rosa", "Sven", "Tara", "Udo",
)  # fmt: skip
THINGS = (
    "boat", "book", "coat", "cup", "door", "fork", "gate", "hat", "kite", "lamp", "map", "pen",
    "ring", "rug", "shoe", "tent",
)  # fmt: skip
COLOURS = (
    "amber", "black", "blue", "brown", "gold", "green", "grey", "pink", "red", "teal", "violet",
    "white",
)  # fmt: skip
UNANSWERABLE_SHARE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about a context."""

    context: str
    question: str
    answer: str
    """Empty where the context holds none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Example:
    """A question and its answer in tokens, end_of_document behind them."""

    tokens: np.ndarray
    answer_start: int
    """The loss is that of tokens[answer_start:]."""


class Packed(NamedTuple):
    """Rows end to end, each of examples that are segments of their own; so is the padding."""

    tokens: np.ndarray
    """int64; the padding is end_of_document."""
    targets: np.ndarray
    """int64: the next token where it answers, IGNORE elsewhere."""
    cu_seqlens: np.ndarray
    """(segments + 1,), int32: their bounds, from 0 to the end."""


def read_squad(path: str | Path) -> list[Question]:
    """Read the questions of a file in the format of SQuAD 1.1 or 2.0, plain, .gz, .xz or .zst."""
    path = Path(path)
    try:
        with open_bytes(path) as file:
            content = json.loads(file.read())
    except (*BROKEN, ValueError) as error:
        raise UsageError(f"{path} cannot be read as SQuAD: {error}") from error
    try:
        questions = [
            _question(paragraph["context"], entry)
            for article in content["data"]
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not SQuAD: {type(error).__name__}: {error}") from error
    if not questions:
        raise UsageError(f"{path} holds no questions")
    return questions


def format_question(question: Question) -> tuple[str, str]:
    """Give the prompt and the answer that is to follow it."""
    prompt = question.context + _question_part(question)
    return prompt, f" {question.answer or UNANSWERABLE}"


def encode_questions(
    questions: Sequence[Question],
    encode: Callable[[str], list[int]],
    *,
    end_of_document: int,
    length: int,
) -> tuple[list[Example], int]:
    """Make examples of at most length tokens, and count the questions too long to make one.

    Contexts lose their beginning where they do not fit: question and answer stay whole.
    """
    examples, num_dropped = [], 0
    for question in questions:
        prompt, answer = (encode(text) for text in format_question(question))
        tokens = [*prompt, *answer, end_of_document]
        excess = max(0, len(tokens) - length)
        if excess and len(prompt) - excess < len(encode(_question_part(question))):
            num_dropped += 1
            continue
        example = Example(
            tokens=np.array(tokens[excess:], np.int32), answer_start=len(prompt) - excess
        )
        examples.append(example)
    return examples, num_dropped


class QuestionStream:
    """Packed rows in an endless order that depends on the seed and the sample's number alone.

    A sample is a row. Every epoch holds every example once, shuffled and packed anew, so epochs
    may differ by a few rows; epoch e starts at the sample behind the last row of epoch e - 1.
    """

    def __init__(self, examples: Sequence[Example], *, length: int, seed: int) -> None:
        self.examples, self.length, self.seed = examples, length, seed
        self._plan_of = functools.lru_cache(2)(self._plan_epoch)
        # Where the epochs start, as far as they were asked for.
        self._starts = [0, self.rows_in_epoch(0)]

    def rows_in_epoch(self, epoch: int) -> int:
        """Count the samples of an epoch."""
        return len(self._plan_of(epoch))

    def batch(self, first_sample: int, count: int) -> Packed:
        """Pack so many rows from the first on, across the borders of epochs."""
        rows = [self._row(sample) for sample in range(first_sample, first_sample + count)]
        return _lay(rows, self.length)

    def _row(self, sample: int) -> list[Example]:
        while self._starts[-1] <= sample:
            self._starts.append(self._starts[-1] + self.rows_in_epoch(len(self._starts) - 1))
        epoch = bisect.bisect_right(self._starts, sample) - 1
        row = self._plan_of(epoch)[sample - self._starts[epoch]]
        return [self.examples[index] for index in row]

    def _plan_epoch(self, epoch: int) -> list[list[int]]:
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
        return _plan([example.tokens.size for example in self.examples], self.length, order)


def _plan(sizes: Sequence[int], length: int, order: np.ndarray) -> list[list[int]]:
    """Put each example into the first of a few open rows with room for it."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []
    for index in order.tolist():
        size = sizes[index]
        for place, (room, row) in enumerate(open_rows):
            if size <= room:
                row.append(index)
                open_rows[place] = (room - size, row)
                break
        else:
            if len(open_rows) == _OPEN_ROWS:
                rows.append(open_rows.pop(0)[1])
            open_rows.append((length - size, [index]))
    return rows + [row for _, row in open_rows]


def _lay(rows: Sequence[Sequence[Example]], length: int) -> Packed:
    tokens = np.full(length * len(rows), rows[0][0].tokens[-1], np.int64)
    targets = np.full(length * len(rows), IGNORE, np.int64)
    bounds = [0]
    for number, row in enumerate(rows, start=1):
        for example in row:
            start, stop = bounds[-1], bounds[-1] + example.tokens.size
            tokens[start:stop] = example.tokens
            answer = example.tokens[example.answer_start :]
            targets[stop - 1 - answer.size : stop - 1] = answer
            bounds.append(stop)
        if bounds[-1] < number * length:
            bounds.append(number * length)
    return Packed(tokens, targets, np.array(bounds, np.int32))


def _question_part(question: Question) -> str:
    return f"\n\nQuestion: {question.question}\nAnswer:"


def _question(context: str, entry: Any) -> Question:
    is_answered = entry["answers"] and not entry.get("is_impossible")
    answer = entry["answers"][0]["text"] if is_answered else ""
    if not all(isinstance(text, str) for text in (context, entry["question"], answer)):
        raise TypeError(f"question {entry.get('id')!r} or its context or answer is no text")
    return Question(context=context, question=entry["question"], answer=answer)


def invented_questions(count: int, *, seed: int, max_facts: int) -> list[Question]:
    """Invent questions over contexts of 2 to `max_facts` facts; a tenth has no answer there."""
    chance = random.Random(f"invented questions {seed}")
    return [_invented(chance, max_facts) for _ in range(count)]


def _invented(chance: random.Random, max_facts: int) -> Question:
    # One more than is told: the last owner is asked for where there is to be no answer.
    num_facts = chance.randint(2, max_facts)
    owners = chance.sample([(name, thing) for name in NAMES for thing in THINGS], num_facts + 1)
    told = [(name, thing, chance.choice(COLOURS)) for name, thing in owners[:-1]]
    name, thing, answer = chance.choice(told)
    if chance.random() < UNANSWERABLE_SHARE:
        (name, thing), answer = owners[-1], ""
    return Question(
        context=" ".join(f"{name}'s {thing} is {colour}." for name, thing, colour in told),
        question=f"What colour is {name}'s {thing}?",
        answer=answer,
    )


def question_sources(questions: str) -> list[str]:
    """Split what is joined by + into files, "invented" and "hidden"."""
    return [questions] if Path(questions).is_file() else questions.split("+")


def with_full_paths(questions: str) -> str:
    """Name the same questions from wherever they are asked for."""
    return "+".join(
        str(Path(source).resolve()) if is_path(source) else source
        for source in question_sources(questions)
    )


def check_files(questions: str) -> None:
    """Refuse a file that is not there."""
    for source in question_sources(questions):
        if is_path(source) and not Path(source).is_file():
            raise UsageError(f"there is no file {source}")


def is_path(source: str) -> bool:
    """Tell a path from the words for questions that are made."""
    return source != INVENTED and hidden_digits(source) is None


def digits_taught(questions: str) -> int | None:
    """Count the digits of the numbers that are hidden in any of the questions."""
    found = (hidden_digits(source) for source in question_sources(questions))
    return next((digits for digits in found if digits is not None), None)


def hidden_digits(questions: str) -> int | None:
    """Count the digits of the numbers that are hidden; None where questions are others."""
    name, _, digits = questions.partition(":")
    if name != HIDDEN or not (digits or "1").isdecimal():
        return None
    if int(digits or HIDDEN_DIGITS) < 1:
        raise UsageError(f"a hidden number has at least 1 digit, got {questions!r}")
    return int(digits or HIDDEN_DIGITS)
