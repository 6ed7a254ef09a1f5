"""Where text comes from: the embedded corpus, files and folders, Hugging Face."""

import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax_lab.data.documents import Document, Part, Skipped, SourceStoppedError, checked
from ssmax_lab.data.embedded import embedded_part

EMBEDDED, HUB = "embedded", "hf:"
READ = ".txt, .jsonl (both also with .gz, .xz or .zst behind) and .parquet"

_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)


def open_source(source: str, *, text_field: str = "text") -> list[Part]:
    """The parts of "embedded", of a file, of a folder, or of "hf:NAME:CONFIG:SPLIT"."""
    if source == EMBEDDED:
        return [embedded_part()]
    if source.startswith(HUB):
        return _hub_parts(source, text_field)
    path = Path(source)
    if path.is_dir():
        parts: list[Part] = [_file_part(found, path, text_field) for found in sorted_files(path)]
    elif path.exists():
        parts = [_file_part(path, path.parent, text_field)]
    else:
        raise UsageError(
            f"there is no file or folder {source!r}; a source is {EMBEDDED!r}, a path, or "
            f"'{HUB}NAME' for a dataset of Hugging Face"
        )
    if all(isinstance(part, _UnreadPart) for part in parts):
        raise UsageError(f"{source} holds nothing to read; what is read: {READ}")
    return parts


def sorted_files(folder: Path) -> list[Path]:
    """All files below a folder by relative path, hidden ones left out, links followed."""
    return sorted(_files(folder, frozenset()), key=lambda path: path.relative_to(folder).parts)


def open_bytes(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if its name says so."""
    return _OPENERS.get(path.suffix.lower(), Path.open)(path, "rb")


@dataclass(frozen=True, kw_only=True, slots=True)
class _FilePart(Part):
    path: Path
    text_field: str


class _TextPart(_FilePart):
    """A file that is one document."""

    __slots__ = ()

    def documents(self) -> Iterator[Document | Skipped]:
        try:
            with open_bytes(self.path) as file:
                content = file.read()
        except _BROKEN as error:
            yield Skipped(self.name, _fault(error))
        else:
            yield _decoded(self.name, content, checked)


class _JsonLinesPart(_FilePart):
    """A file with one JSON object per line."""

    __slots__ = ()

    def documents(self) -> Iterator[Document | Skipped]:
        try:
            with open_bytes(self.path) as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _decoded(f"{self.name}:{number}", line, self._parsed)
        except _BROKEN as error:
            yield Skipped(self.name, _fault(error))

    def _parsed(self, name: str, line: str) -> Document | Skipped:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return Skipped(name, "not JSON")
        return _field(name, row, self.text_field)


class _ParquetPart(_FilePart):
    """A file with a column of text, read by row groups."""

    __slots__ = ()

    def documents(self) -> Iterator[Document | Skipped]:
        arrow = require("pyarrow", install="ssmax-lab", purpose=f"reading {self.path}")
        parquet = require("pyarrow.parquet", install="ssmax-lab", purpose=f"reading {self.path}")
        number = 0
        try:
            with parquet.ParquetFile(self.path) as file:
                if self.text_field not in file.schema_arrow.names:
                    yield Skipped(self.name, f"no field {self.text_field!r}")
                    return
                for group in range(file.num_row_groups):
                    for value in file.read_row_group(group, columns=[self.text_field]).column(0):
                        number += 1
                        yield _scalar(f"{self.name}:{number}", value)
        except (OSError, arrow.ArrowException) as error:
            yield Skipped(self.name, _fault(error))


class _UnreadPart(_FilePart):
    """A file that is none of those."""

    __slots__ = ()

    def documents(self) -> Iterator[Document | Skipped]:
        yield Skipped(self.name, "not a kind of file that is read")


@dataclass(frozen=True, kw_only=True, slots=True)
class _HubPart(Part):
    """One shard of a dataset of Hugging Face, streamed."""

    dataset: tuple[str, str | None, str]
    num_shards: int
    index: int
    text_field: str

    def documents(self) -> Iterator[Document | Skipped]:
        try:
            dataset = _load_dataset(*self.dataset)
            rows = dataset.shard(num_shards=self.num_shards, index=self.index)
            for number, row in enumerate(rows, start=1):
                yield _field(f"{self.name}:{number}", row, self.text_field)
        except OSError as error:
            raise SourceStoppedError(
                f"{self.name} stopped: {error}; run the same command again to go on"
            ) from error


def _hub_parts(source: str, text_field: str) -> list[Part]:
    name, config, split, *more = [*source.removeprefix(HUB).split(":"), "", ""]
    if not name or any(more):
        raise UsageError(f"a dataset is written {HUB}NAME, {HUB}NAME:CONFIG:SPLIT, got {source!r}")
    dataset = (name, config or None, split or "train")
    try:
        num_shards = _load_dataset(*dataset).num_shards
    except (OSError, ValueError) as error:
        raise UsageError(f"{source} cannot be opened: {error}") from error
    return [
        _HubPart(
            name=f"{source}#{index}",
            size=None,
            dataset=dataset,
            num_shards=num_shards,
            index=index,
            text_field=text_field,
        )
        for index in range(num_shards)
    ]


def _load_dataset(name: str, config: str | None, split: str) -> Any:
    datasets = require("datasets", install="ssmax-lab[hub]", purpose=f"the dataset {name!r}")
    return datasets.load_dataset(name, config, split=split, streaming=True)


def _file_part(path: Path, root: Path, text_field: str) -> _FilePart:
    kind = _kind(path)
    return kind(
        name=path.relative_to(root).as_posix(),
        size=0 if kind is _UnreadPart else path.stat().st_size,
        path=path,
        text_field=text_field,
    )


def _kind(path: Path) -> type[_FilePart]:
    if not path.is_file():
        return _UnreadPart
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    # Asked for here, so that a missing package stops the work before it begins.
    if suffixes[-1:] == [".parquet"]:
        require("pyarrow.parquet", install="ssmax-lab", purpose=f"reading {path}")
        return _ParquetPart
    if suffixes[-1:] == [".zst"]:
        require("zstandard", install="ssmax-lab[hub]", purpose=f"reading {path}")
    if suffixes[-1:] and suffixes[-1] in _OPENERS:
        suffixes.pop()
    return {".txt": _TextPart, ".jsonl": _JsonLinesPart}.get("".join(suffixes[-1:]), _UnreadPart)


def _files(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    # A link to a folder above would lead around forever.
    if here in above:
        return
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(Path(entry), above | {here})
        else:
            yield Path(entry)


def _field(name: str, row: object, field: str) -> Document | Skipped:
    if not isinstance(row, dict) or field not in row:
        return Skipped(name, f"no field {field!r}")
    return checked(name, row[field])


def _decoded(
    name: str, content: bytes, then: Callable[[str, str], Document | Skipped]
) -> Document | Skipped:
    try:
        # Windows puts a byte order mark before UTF-8.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")
    return then(name, text)


def _scalar(name: str, value: Any) -> Document | Skipped:
    try:
        return checked(name, value.as_py())
    except UnicodeDecodeError:
        return Skipped(name, "not UTF-8")


def _fault(error: Exception) -> str:
    # An archive's errors have no number; those of the system do.
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read: {error.strerror}"
    return "broken file"


class _Unpacked(io.RawIOBase):
    """A file of the bytes that an iterator gives."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


def _open_zstandard(path: Path, _: str) -> IO[bytes]:
    return io.BufferedReader(_Unpacked(_zstandard_pieces(path)))


def _zstandard_pieces(path: Path) -> Iterator[bytes]:
    # The package's own reader takes a truncated file for a whole one.
    zstandard = require("zstandard", install="ssmax-lab[hub]", purpose=f"reading {path}")
    decompressor = zstandard.ZstdDecompressor()
    frame = None
    with path.open("rb") as file:
        while data := file.read(2**17):
            while data:
                frame = frame or decompressor.decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the last frame has no end")


_OPENERS: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
