"""Tokens on disk: shards that are whole or absent, and a folder of them as one long sequence.

A shard is its tokens, zeros up to a multiple of 8 bytes, and the starts of its documents as int64,
all little-endian. The index beside the shards says whose tokens they are, how many each has, and
its checksum; it is written last.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np

from ssmax._files import whole_file, write_whole
from ssmax.errors import UsageError

TRAIN, VALIDATION = "train", "validation"
"""The two sides of a prepared folder, each a set of shards."""
SUFFIX, INDEX = ".shard", "index.json"
INDEX_FORMAT = "ssmax-shards-2"
VERIFIED_TOKENS = 1 << 30
"""Text up to this size is read and compared with its checksums before it is used."""

_INT64 = np.dtype("<i8")
# A mapped file holds a descriptor, and 1024 of them are the usual limit of a process.
_MAX_MAPPED = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Whose tokens these are."""

    name: str
    """gpt2, gpt2-digits, bytes, or the name of a tokenizer's file."""
    hash: str
    """SHA-256 of the tokenizer, in hex."""
    size: int
    end_of_document: int
    """The token behind every document."""

    @property
    def dtype(self) -> str:
        """Name the narrowest type that holds every token: uint16 or uint32."""
        return "uint16" if self.size <= 2**16 else "uint32"

    @property
    def _stored(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """What the index says of one shard."""

    name: str
    num_tokens: int
    num_documents: int
    sha256: str
    """Of the whole file, in hex."""

    def check_size(self, folder: Path, vocabulary: Vocabulary) -> None:
        """Refuse a file that is missing or has another size."""
        path = folder / self.name
        expected = self._starts_at(vocabulary) + self.num_documents * _INT64.itemsize
        if not path.is_file():
            raise UsageError(f"{path} is missing; bring it back or prepare the data again")
        if path.stat().st_size != expected:
            raise UsageError(
                f"{path} is damaged: it should have {expected} bytes by the {INDEX} and has "
                f"{path.stat().st_size}; remove it and prepare the data again"
            )

    def map(self, folder: Path, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
        """Map its tokens and the starts of its documents into memory."""
        self.check_size(folder, vocabulary)
        mapped = np.memmap(folder / self.name, np.uint8, "r") if self.num_tokens else _NOTHING
        tokens = mapped[: self.num_tokens * vocabulary._stored.itemsize].view(vocabulary._stored)
        return tokens, np.asarray(mapped[self._starts_at(vocabulary) :]).view(_INT64)

    def _starts_at(self, vocabulary: Vocabulary) -> int:
        size = self.num_tokens * vocabulary._stored.itemsize
        return size + -size % 8


_NOTHING = np.empty(0, np.uint8)


class ShardWriter:
    """A shard that is being written: see write_shard."""

    def __init__(self, path: Path, vocabulary: Vocabulary, file: IO[bytes]) -> None:
        self.vocabulary = vocabulary
        self.num_tokens: int = 0
        self._path, self._file = path, file
        self._starts = array("q")
        self._digest = hashlib.sha256()

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document; its end_of_document is appended here."""
        ids = np.asarray(tokens)
        assert not ids.size or (ids.min() >= 0 and ids.max() < self.vocabulary.size)
        document = np.empty(ids.size + 1, self.vocabulary._stored)
        document[:-1] = ids
        document[-1] = self.vocabulary.end_of_document
        self._write(document.tobytes())
        self._starts.append(self.num_tokens)
        self.num_tokens += document.size

    def info(self) -> ShardInfo:
        """Describe the shard, once it is written."""
        return ShardInfo(
            name=self._path.name,
            num_tokens=self.num_tokens,
            num_documents=len(self._starts),
            sha256=self._digest.hexdigest(),
        )

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)


@contextlib.contextmanager
def write_shard(path: Path, vocabulary: Vocabulary) -> Iterator[ShardWriter]:
    """Open a shard to add documents to; the file appears whole, or not at all."""
    with whole_file(path) as file:
        writer = ShardWriter(path, vocabulary, file)
        yield writer
        writer._write(bytes(-writer.num_tokens * vocabulary._stored.itemsize % 8))
        writer._write(np.asarray(writer._starts, _INT64).tobytes())


def write_index(
    folder: Path, vocabulary: Vocabulary, shards: Sequence[ShardInfo], *, details: dict[str, Any]
) -> None:
    """Declare the shards, in this order, to be the whole of the folder."""
    index = {
        "format": INDEX_FORMAT,
        "vocabulary": dataclasses.asdict(vocabulary),
        "shards": [dataclasses.asdict(shard) for shard in shards],
        "details": details,
    }
    write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")


def read_index(folder: Path) -> tuple[Vocabulary, list[ShardInfo], dict[str, Any]]:
    """Read what write_index wrote: vocabulary, shards, details."""
    path = folder / INDEX
    if not path.is_file():
        if any(folder.glob("*" + SUFFIX)):
            raise UsageError(
                f"{folder} holds shards but no {INDEX}: its preparation is not finished; "
                "run it again to resume"
            )
        raise UsageError(f"{folder} holds no shards; make them with ssmax-lab data prepare")
    try:
        index = json.loads(path.read_bytes())
        if index["format"] != INDEX_FORMAT:
            raise ValueError(f"its format is {index['format']!r}, not {INDEX_FORMAT!r}")
        shards = [ShardInfo(**shard) for shard in index["shards"]]
        return Vocabulary(**index["vocabulary"]), shards, dict(index["details"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is no index of shards: {error}; prepare the data into another folder"
        ) from error


class ShardSet:
    """All shards of a folder as one long sequence of tokens."""

    details: dict[str, Any]
    """What the preparation wrote down."""
    fingerprint: str
    """SHA-256 over the shards' own, in hex: the identity of the data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vocabulary, self._shards, self.details = read_index(folder)
        for shard in self._shards:
            shard.check_size(folder, self.vocabulary)
        self._token_bounds = _bounds(shard.num_tokens for shard in self._shards)
        self._document_bounds = _bounds(shard.num_documents for shard in self._shards)
        self.num_tokens = int(self._token_bounds[-1])
        self.num_documents = int(self._document_bounds[-1])
        hashes = "".join(shard.sha256 for shard in self._shards)
        self.fingerprint = hashlib.sha256(hashes.encode()).hexdigest()
        self._map = functools.lru_cache(_MAX_MAPPED)(
            lambda number: self._shards[number].map(folder, self.vocabulary)
        )

    @classmethod
    def open(cls, folder: str | Path) -> "ShardSet":
        """Open a side of a prepared folder; sizes are compared to the index, nothing is read."""
        return cls(Path(folder))

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Copy the tokens from start to before stop, across the borders of shards."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise UsageError(
                f"{self.folder} holds tokens 0 to {self.num_tokens}, got the slice {start}:{stop}"
            )
        tokens = np.empty(stop - start, self.vocabulary._stored)
        number = int(np.searchsorted(self._token_bounds, start, side="right")) - 1
        filled = 0
        while filled < tokens.size:
            offset = start + filled - int(self._token_bounds[number])
            piece = self._map(number)[0][offset : offset + tokens.size - filled]
            tokens[filled : filled + piece.size] = piece
            filled, number = filled + piece.size, number + 1
        return tokens

    def document(self, index: int) -> np.ndarray:
        """Copy one document's tokens, without its end_of_document."""
        number = int(np.searchsorted(self._document_bounds, index, side="right")) - 1
        tokens, starts = self._map(number)
        local = index - int(self._document_bounds[number])
        end = starts[local + 1] if local + 1 < starts.size else tokens.size
        return np.array(tokens[starts[local] : end - 1])

    def document_starts(self) -> np.ndarray:
        """Give the place where each document starts in the whole sequence, int64."""
        numbers = range(len(self._shards))
        starts = [self._map(number)[1] + self._token_bounds[number] for number in numbers]
        return np.concatenate(starts).astype(np.int64)

    def verify(self) -> None:
        """Read every shard and compare its checksum."""
        for shard in self._shards:
            shard.check_size(self.folder, self.vocabulary)
            path = self.folder / shard.name
            with path.open("rb") as file:
                # Read rather than looked at through the map: a file cut short meanwhile is an
                # error here and would be a dead process there.
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise UsageError(
                    f"{path} is damaged: its checksum differs; remove it and prepare the data again"
                )

    def verify_small(self) -> None:
        """Verify up to VERIFIED_TOKENS; of more text only sizes are compared, when it is opened."""
        if self.num_tokens <= VERIFIED_TOKENS:
            self.verify()


def verify_prepared(folder: Path) -> Iterator[ShardSet]:
    """Open and verify the sides of a prepared folder, or one side by itself."""
    sides = [folder / side for side in (TRAIN, VALIDATION) if (folder / side).is_dir()]
    for side in sides or [folder]:
        shards = ShardSet.open(side)
        shards.verify()
        yield shards


def _bounds(counts: Iterable[int]) -> np.ndarray:
    return np.array(list(accumulate(counts, initial=0)), np.int64)
