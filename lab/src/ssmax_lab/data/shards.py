"""Tokens on disk: shards that are whole or absent, and a folder of them as one long sequence.

A shard is a header block, the tokens, padding to 8 bytes, and the starts of its documents as
int64, all little-endian. The header block is magic, version, its own length, the CRC-32 of the
rest, and a JSON object, padded with spaces to a multiple of 4096 bytes.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np

from ssmax._files import whole_file
from ssmax.errors import UsageError

SUFFIX, INDEX = ".shard", "index.json"
MAGIC, VERSION = b"SSMAXSHD", 1
INDEX_FORMAT = "ssmax-shards-1"
VERIFIED_TOKENS = 1 << 30
"""Text up to this size is read and compared with its checksums before it is used."""

_PREFIX = struct.Struct("<8sIII")
_PAGE = 4096
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
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

    def __post_init__(self) -> None:
        """Refuse what no shard can hold."""
        if not 0 < self.size <= 2**32:
            raise UsageError(f"a vocabulary has 1 to 2**32 tokens, {self.name!r} has {self.size}")
        if not 0 <= self.end_of_document < self.size:
            raise UsageError(
                f"end_of_document must be one of the {self.size} tokens of {self.name!r}, "
                f"got {self.end_of_document}"
            )

    @property
    def dtype(self) -> str:
        """The narrowest type that holds every token: uint16 or uint32."""
        return "uint16" if self.size <= 2**16 else "uint32"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHeader:
    """What a shard says of itself."""

    vocabulary: Vocabulary
    dtype: str
    """uint16 or uint32."""
    num_tokens: int
    num_documents: int
    sha256: str
    """Of all bytes behind the header block, in hex."""
    origin: dict[str, Any]
    """What it was made from."""

    def _to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def _from_json(cls, text: bytes) -> "ShardHeader":
        values = json.loads(text)
        return cls(**{**values, "vocabulary": Vocabulary(**values["vocabulary"])})


class ShardWriter:
    """Writes one shard inside a with statement; the file appears whole, or not at all."""

    def __init__(
        self, path: str | Path, vocabulary: Vocabulary, origin: dict[str, Any] | None = None
    ) -> None:
        self.path: Path = Path(path)
        if self.path.suffix != SUFFIX:
            raise UsageError(f"the name of a shard ends in {SUFFIX}, got {self.path}")
        self.vocabulary = vocabulary
        self.num_tokens: int = 0
        self._starts = array("q")
        self._digest = hashlib.sha256()
        # The block is laid out before its numbers are known, so room is left for the largest.
        self._header = ShardHeader(
            vocabulary=vocabulary,
            dtype=vocabulary.dtype,
            num_tokens=2**63,
            num_documents=2**63,
            sha256=self._digest.hexdigest(),
            # A copy: the caller may go on changing hers.
            origin=json.loads(json.dumps(origin or {})),
        )
        self._block_length = _round_up(_PREFIX.size + len(self._header._to_json()), _PAGE)
        self._file: IO[bytes] | None = None

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._starts)

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document; its end_of_document is appended here."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UsageError(
                f"{self.path}: a document is one row of whole numbers, "
                f"got shape {ids.shape} of {ids.dtype}"
            )
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocabulary.size):
            raise UsageError(
                f"{self.path}: tokens of {self.vocabulary.name!r} lie in "
                f"0..{self.vocabulary.size - 1}, got {ids.min()}..{ids.max()}; "
                "was the text encoded by another tokenizer?"
            )
        document = np.empty(ids.size + 1, _DTYPES[self.vocabulary.dtype])
        document[:-1] = ids
        document[-1] = self.vocabulary.end_of_document
        self._write(document.tobytes())
        self._starts.append(self.num_tokens)
        self.num_tokens += document.size

    def __enter__(self) -> "ShardWriter":
        self._exit = contextlib.ExitStack()
        self._file = self._exit.enter_context(whole_file(self.path))
        self._exit.push(self._finish)
        self._file.seek(self._block_length)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)

    def _finish(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            return
        assert self._file is not None
        itemsize = _DTYPES[self.vocabulary.dtype].itemsize
        self._write(bytes(-self.num_tokens * itemsize % 8))
        self._write(np.asarray(self._starts, _INT64).tobytes())
        header = dataclasses.replace(
            self._header,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            sha256=self._digest.hexdigest(),
        )
        self._file.seek(0)
        self._file.write(_pack_block(header, self._block_length))

    def _write(self, data: bytes) -> None:
        assert self._file is not None, "a ShardWriter is used inside a with statement"
        self._file.write(data)
        self._digest.update(data)


def read_header(path: str | Path) -> ShardHeader:
    """The header of a shard; a file that is foreign, truncated or too long is refused."""
    return _read_block(Path(path))[0]


class Shard:
    """One shard, mapped into memory for reading."""

    header: ShardHeader
    tokens: np.ndarray
    """All tokens, every document followed by end_of_document: a view of the mapped file."""
    starts: np.ndarray
    """int64: where each document starts in tokens."""

    def __init__(self, path: str | Path) -> None:
        self.path: Path = Path(path)
        self.header, self._block_length = _read_block(self.path)
        dtype = _DTYPES[self.header.dtype]
        starts_at, size = _layout(self.header, self._block_length)
        mapped = np.memmap(self.path, np.uint8, "r", shape=(size,))
        tokens_end = self._block_length + self.header.num_tokens * dtype.itemsize
        self.tokens = mapped[self._block_length : tokens_end].view(dtype)
        self.starts = np.asarray(mapped[starts_at:]).view(_INT64)

    def verify(self) -> None:
        """Read it all and compare the checksum."""
        digest = hashlib.sha256()
        # Read rather than looked at through the map: a file cut short meanwhile is an error here
        # and would be a dead process there.
        with _open_file(self.path) as file:
            file.seek(self._block_length)
            while piece := file.read(2**22):
                digest.update(piece)
        if digest.hexdigest() != self.header.sha256:
            raise _damaged(self.path, "its tokens do not match their checksum")


def write_index(folder: str | Path, *, details: dict[str, Any]) -> None:
    """Declare the folder's shards, in the order of their names, to be the whole of it."""
    folder = Path(folder)
    names = _shard_names(folder)
    if not names:
        raise UsageError(f"{folder} holds no shards to index")
    headers = [read_header(folder / name) for name in names]
    vocabulary = headers[0].vocabulary
    for name, header in zip(names, headers, strict=True):
        if header.vocabulary != vocabulary:
            raise UsageError(
                f"{folder / name} holds tokens of {header.vocabulary}, but {names[0]} beside it "
                f"of {vocabulary}; prepare each into a folder of its own"
            )
    index = {
        "format": INDEX_FORMAT,
        "vocabulary": dataclasses.asdict(vocabulary),
        "shards": [
            dataclasses.asdict(_Entry.of(name, header))
            for name, header in zip(names, headers, strict=True)
        ],
        "details": details,
    }
    with whole_file(folder / INDEX) as file:
        file.write((json.dumps(index, indent=2) + "\n").encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """What the index says of one shard."""

    name: str
    num_tokens: int
    num_documents: int
    sha256: str

    @classmethod
    def of(cls, name: str, header: ShardHeader) -> "_Entry":
        return cls(
            name=name,
            num_tokens=header.num_tokens,
            num_documents=header.num_documents,
            sha256=header.sha256,
        )


class ShardSet:
    """All shards of a folder as one long sequence of tokens."""

    vocabulary: Vocabulary
    num_tokens: int
    num_documents: int
    details: dict[str, Any]
    """What the preparation wrote down."""
    fingerprint: str
    """SHA-256 over the shards' own, in hex: the identity of the data."""

    def __init__(
        self,
        folder: Path,
        vocabulary: Vocabulary,
        entries: Sequence[_Entry],
        details: dict[str, Any],
    ) -> None:
        self.folder: Path = folder
        self.vocabulary, self.details = vocabulary, details
        self._entries = entries
        self._token_bounds = _bounds(entry.num_tokens for entry in entries)
        self._document_bounds = _bounds(entry.num_documents for entry in entries)
        self.num_tokens = int(self._token_bounds[-1])
        self.num_documents = int(self._document_bounds[-1])
        hashes = "".join(entry.sha256 for entry in entries)
        self.fingerprint = hashlib.sha256(hashes.encode()).hexdigest()
        self._shard = functools.lru_cache(_MAX_MAPPED)(self._open_shard)

    @classmethod
    def open(cls, folder: str | Path) -> "ShardSet":
        """The set of a prepared folder; headers are compared to the index, tokens are not read."""
        folder = Path(folder)
        names = _shard_names(folder)
        if not (folder / INDEX).is_file():
            if names:
                raise UsageError(
                    f"{folder} holds shards but no {INDEX}: its preparation is not finished; "
                    "run it again to resume"
                )
            raise UsageError(f"{folder} holds no shards")
        vocabulary, entries, details = _read_index(folder / INDEX)
        if unknown := set(names) - {entry.name for entry in entries}:
            raise UsageError(
                f"{folder / min(unknown)} is not in the {INDEX} beside it; "
                "move it away, or prepare the data into a new folder"
            )
        for entry in entries:
            _check_entry(folder / entry.name, entry, read_header(folder / entry.name))
        return cls(folder, vocabulary, entries, details)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """A copy of the tokens from start to before stop, across the borders of shards."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise UsageError(
                f"{self.folder} holds tokens 0 to {self.num_tokens}, got the slice {start}:{stop}"
            )
        tokens = np.empty(stop - start, _DTYPES[self.vocabulary.dtype])
        number = int(np.searchsorted(self._token_bounds, start, side="right")) - 1
        filled = 0
        while filled < tokens.size:
            offset = start + filled - int(self._token_bounds[number])
            piece = self._shard(number).tokens[offset : offset + tokens.size - filled]
            tokens[filled : filled + piece.size] = piece
            filled, number = filled + piece.size, number + 1
        return tokens

    def document(self, index: int) -> np.ndarray:
        """A copy of one document's tokens, without its end_of_document."""
        if not 0 <= index < self.num_documents:
            raise UsageError(
                f"{self.folder} holds documents 0 to {self.num_documents - 1}, got {index}"
            )
        number = int(np.searchsorted(self._document_bounds, index, side="right")) - 1
        shard, local = self._shard(number), index - int(self._document_bounds[number])
        ends = shard.starts[local + 1 : local + 2].tolist() or [shard.header.num_tokens]
        return np.array(shard.tokens[shard.starts[local] : ends[0] - 1])

    def document_starts(self) -> np.ndarray:
        """int64: where each document starts in the whole sequence."""
        starts = [
            self._shard(number).starts + self._token_bounds[number]
            for number in range(len(self._entries))
        ]
        return np.concatenate(starts).astype(np.int64)

    def verify(self) -> None:
        """Read every shard and compare its checksum."""
        for number in range(len(self._entries)):
            self._shard(number).verify()

    def verify_small(self) -> None:
        """Verify up to VERIFIED_TOKENS; of more text only sizes are compared, when it is opened."""
        if self.num_tokens <= VERIFIED_TOKENS:
            self.verify()

    def _open_shard(self, number: int) -> Shard:
        entry = self._entries[number]
        shard = Shard(self.folder / entry.name)
        _check_entry(shard.path, entry, shard.header)
        return shard


def _bounds(counts: Iterable[int]) -> np.ndarray:
    return np.array(list(accumulate(counts, initial=0)), np.int64)


def _check_entry(path: Path, entry: _Entry, header: ShardHeader) -> None:
    if _Entry.of(entry.name, header) != entry:
        raise UsageError(
            f"{path} is not the shard that the {INDEX} beside it lists: it was replaced; "
            "bring the old one back, or prepare the data into a new folder"
        )


def _shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*" + SUFFIX))


def _read_index(path: Path) -> tuple[Vocabulary, list[_Entry], dict[str, Any]]:
    try:
        index = json.loads(path.read_bytes())
        if index["format"] != INDEX_FORMAT:
            raise UsageError(f"its format is {index['format']!r}, not {INDEX_FORMAT!r}")
        entries = [_Entry(**entry) for entry in index["shards"]]
        return Vocabulary(**index["vocabulary"]), entries, dict(index["details"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no index of shards: {error}") from error


def _layout(header: ShardHeader, block_length: int) -> tuple[int, int]:
    """Where the starts begin, and the size of the whole file, in bytes."""
    tokens_end = block_length + header.num_tokens * _DTYPES[header.dtype].itemsize
    starts_at = _round_up(tokens_end, 8)
    return starts_at, starts_at + header.num_documents * _INT64.itemsize


def _round_up(size: int, step: int) -> int:
    return size + -size % step


def _pack_block(header: ShardHeader, length: int) -> bytes:
    text = header._to_json().ljust(length - _PREFIX.size)
    return _PREFIX.pack(MAGIC, VERSION, length, zlib.crc32(text)) + text


def _read_block(path: Path) -> tuple[ShardHeader, int]:
    """The header of a shard and the length of its block, both checked."""
    with _open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
            raise UsageError(f"{path} is not a shard: it does not begin with {MAGIC!r}")
        _, version, block_length, crc = _PREFIX.unpack(prefix)
        if version != VERSION:
            raise UsageError(f"{path} is of format {version}, this code reads format {VERSION}")
        if not _PREFIX.size <= block_length <= size:
            raise _damaged(path, f"a header of {block_length} bytes in a file of {size}")
        text = file.read(block_length - _PREFIX.size)
    if zlib.crc32(text) != crc:
        raise _damaged(path, "its header does not match its checksum")
    try:
        header = ShardHeader._from_json(text)
        expected = _layout(header, block_length)[1]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no shard of this format: {error!r}") from error
    if size != expected:
        fault = "truncated" if size < expected else "too long"
        raise _damaged(path, f"{fault}, its header asks for {expected} bytes and it has {size}")
    return header, block_length


def _open_file(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing; bring it back or prepare the data again") from error


def _damaged(path: Path, fault: str) -> UsageError:
    return UsageError(f"{path} is damaged: {fault}; remove it and prepare the data again")
