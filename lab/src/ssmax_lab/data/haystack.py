"""A needle in a haystack: a sentence with a number, hidden in a text and asked for behind it."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.data.qa import Example, Question, format_question
from ssmax_lab.data.shards import ShardSet
from ssmax_lab.data.tokenizer import Tokenizer

CITIES = (
    "Athens", "Berlin", "Cairo", "Delhi", "Geneva", "Havana", "Kyoto", "Lagos", "Lima", "London",
    "Madrid", "Naples", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Vienna",
)  # fmt: skip
DIGITS = 7
TEXT_TOKENS = 4_000_000
"""Of the text that needles are hidden in, at most."""
ADDRESSES = Path(__file__).with_name("addresses.jsonl.xz")
"""Four addresses to the Congress (1910, 1946, 1980, 1981), works of the United States Government
and so in the public domain: 30,000 words and more each."""
PAPERS_NEEDLE = ("Tokyo", "8106422")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Needle:
    """What is hidden, and asked for."""

    city: str
    number: str

    @property
    def statement(self) -> str:
        """Write the sentence up to its number."""
        return f" The special magic {self.city} number is:"

    @property
    def question(self) -> str:
        """Write what is asked at the end."""
        return f"What is the special magic {self.city} number?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Haystack:
    """A prompt that ends where the number should follow."""

    tokens: list[int]
    needle: Needle
    sentence: tuple[int, int]
    """Where the needle's sentence is among the tokens: from, to."""
    number: tuple[int, int]
    """Where its number is."""
    answer: list[int]
    """The number's tokens, as they should follow."""


def random_needle(chance: random.Random, *, digits: int = DIGITS) -> Needle:
    """Draw a city and a number that does not begin with 0."""
    if digits < 1:
        raise UsageError(f"digits must be at least 1, got {digits}")
    first = chance.choice("123456789")
    rest = "".join(chance.choice("0123456789") for _ in range(digits - 1))
    return Needle(city=chance.choice(CITIES), number=first + rest)


def hide(
    needle: Needle,
    text: Sequence[int] | np.ndarray,
    *,
    length: int,
    depth: float,
    encode: Encode,
    breaks: frozenset[int] = frozenset(),
    begun: bool = False,
) -> Haystack:
    """Make a prompt of `length` tokens with the needle at a depth from 0, the start, to 1, the end.

    `text` is cut to what is left of the length. The needle goes behind the last of the tokens
    `breaks`, those that end a sentence, before its place; to the place itself where there is none.
    `begun` begins the answer with the sentence up to its number, for models that were not taught
    to answer by the number alone.
    """
    if not 0.0 <= depth <= 1.0:
        raise UsageError(f"depth must be from 0 to 1, got {depth}")
    statement, number, end, question = _parts(needle, encode, begun=begun)
    room = length - len(statement) - len(number) - len(end) - len(question)
    if room < 0:
        raise UsageError(
            f"a context of {length} tokens is too short: the needle and its question alone take "
            f"{length - room}"
        )
    if len(text) < room:
        raise UsageError(
            f"the haystack has {len(text)} tokens, a context of {length} needs {room}; "
            "give a longer text"
        )
    hay = np.asarray(text[:room]).tolist()
    place = _place(hay, round(depth * room), breaks)
    sentence = (place, place + len(statement) + len(number) + len(end))
    start = place + len(statement)
    return Haystack(
        tokens=[*hay[:place], *statement, *number, *end, *hay[place:], *question],
        needle=needle,
        sentence=sentence,
        number=(start, start + len(number)),
        answer=number,
    )


def hidden_examples(
    text: Sequence[int] | np.ndarray,
    *,
    count: int,
    length: int,
    digits: int,
    seed: int,
    tokenizer: Tokenizer,
) -> list[Example]:
    """Hide needles in stretches of a text, each with its question and answer, for fine-tuning.

    An example takes at most `length` tokens; its context, its depth, its city and its number are
    drawn.
    """
    chance, encode = random.Random(f"hidden numbers {seed}"), tokenizer.encode
    least = max(_bare_length(city, digits, encode) for city in CITIES)
    room = length - len(encode(f" {'9' * digits}")) - 1
    if room < least:
        raise UsageError(
            f"a hidden number of {digits} digits and its question take {least} tokens and the "
            f"answer {length - room}, more than a row of {length}; take questions that are "
            "'invented' or from a file, or a longer row"
        )
    if len(text) <= length:
        raise UsageError(f"the text has {len(text)} tokens, too few to hide numbers in {length}")
    examples = []
    for _ in range(count):
        start = chance.randrange(len(text) - length)
        stack = hide(
            random_needle(chance, digits=digits),
            text[start : start + length],
            length=chance.randint(least, room),
            depth=chance.random(),
            encode=encode,
            breaks=tokenizer.sentence_ends,
        )
        tokens = [*stack.tokens, *stack.answer, tokenizer.vocabulary.end_of_document]
        examples.append(Example(tokens=np.array(tokens, np.int32), answer_start=len(stack.tokens)))
    return examples


class NeedleDocuments:
    """Hide a number in a stretch of a text, ask for it and answer, in at most `length` tokens.

    Document i depends on the seed and i alone, and no two are alike. The answer ends with the end
    of the document: a number that goes on is not found.
    """

    def __init__(
        self, text: np.ndarray, *, length: int, digits: int, seed: int, tokenizer: Tokenizer
    ) -> None:
        # Sentences, questions and numbers come again.
        self._encode: Encode = functools.lru_cache(1 << 16)(tokenizer.encode)
        self.answer_length: int = len(tokenizer.encode(f" {'9' * digits}")) + 1
        self._least = max(_bare_length(city, digits, self._encode) for city in CITIES)
        if length < self._least:
            raise UsageError(
                f"a needle and its question take {self._least} tokens, more than "
                f"data.needle_length={length}; raise it"
            )
        if len(text) <= length:
            raise UsageError(f"the text has {len(text)} tokens, too few to hide a number in")
        self._text, self._length, self._digits = text, length, digits
        self._seed, self._breaks = seed, tokenizer.sentence_ends
        self._end = tokenizer.vocabulary.end_of_document

    def document(self, number: int) -> Haystack:
        """Make the document of a number; its answer is not among its tokens."""
        chance = random.Random(f"needle document {self._seed} {number}")
        length = chance.randint(self._least, self._length)
        start = chance.randrange(len(self._text) - length)
        return hide(
            random_needle(chance, digits=self._digits),
            self._text[start : start + length],
            length=length,
            depth=chance.random(),
            encode=self._encode,
            breaks=self._breaks,
        )

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give documents as rows, padded behind; the answers, and where each token is predicted.

        (count, tokens), and twice (count, answer).
        """
        made = [self.document(number) for number in range(first, first + count)]
        # In eights, which products like; the end of the document is predicted, not read.
        width = 8 * math.ceil((self._length + self.answer_length - 1) / 8)
        tokens = np.full((count, width), self._end, np.int64)
        for row, one in zip(tokens, made, strict=True):
            row[: len(one.tokens) + len(one.answer)] = [*one.tokens, *one.answer]
        answers = np.array([[*one.answer, self._end] for one in made], np.int64)
        last = np.array([len(one.tokens) - 1 for one in made], np.int64)
        return tokens, answers, last[:, None] + np.arange(self.answer_length)


def _bare_length(city: str, digits: int, encode: Encode) -> int:
    """Count the tokens of a prompt that has no text but its needle."""
    needle = Needle(city=city, number="9" * digits)
    return sum(map(len, _parts(needle, encode)))


def _parts(needle: Needle, encode: Encode, *, begun: bool = False) -> tuple[list[int], ...]:
    """Encode the sentence up to its number, the number, the stop and the question."""
    asked, _ = format_question(Question(context="", question=needle.question, answer=needle.number))
    asked += needle.statement if begun else ""
    return encode(needle.statement), encode(f" {needle.number}"), encode("."), encode(asked)


def _place(hay: list[int], wanted: int, breaks: frozenset[int]) -> int:
    for place in range(wanted, 0, -1):
        if hay[place - 1] in breaks:
            return place
    return wanted


def haystack_text(shards: ShardSet) -> np.ndarray:
    """Read the tokens to hide needles in: as the text runs on, without ends of documents."""
    tokens = shards.slice(0, min(shards.num_tokens, TEXT_TOKENS))
    return tokens[tokens != shards.vocabulary.end_of_document]


def long_rows(shards: ShardSet, *, length: int, count: int) -> np.ndarray:
    """Read rows of end_of_document and `length` tokens: the first documents that are so long.

    Where too few are, the text is taken as it runs on from document to document.
    """
    if length < 1 or count < 1:
        raise UsageError(f"length and count must be at least 1, got {length} and {count}")
    bounds = [*shards.document_starts().tolist(), shards.num_tokens]
    starts = [a for a, b in itertools.pairwise(bounds) if b - a > length][:count]
    if len(starts) < count:
        starts = list(range(0, shards.num_tokens - length + 1, length))[:count]
    if not starts:
        raise UsageError(
            f"{shards.folder} holds {shards.num_tokens} tokens, too few for a row of {length}; "
            "prepare more text or measure shorter contexts"
        )
    end = shards.vocabulary.end_of_document
    return np.stack([np.append(end, shards.slice(start, start + length)) for start in starts])


def count_matching_digits(continuation: str, number: str) -> int:
    """Count the digits of the number that a continuation begins with, in their places."""
    said = continuation.strip()
    return sum(a == b for a, b in zip(said, number, strict=False))


def has_first_digit(continuation: str, number: str) -> bool:
    """Tell whether a continuation begins with the number's first digit."""
    return continuation.strip().startswith(number[0])


def is_exact_match(continuation: str, number: str) -> bool:
    """Tell whether a continuation is an exact match: the whole number and no further digit."""
    said = continuation.strip()
    return said.startswith(number) and not said[len(number) : len(number) + 1].isdigit()
