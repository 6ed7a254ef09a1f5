"""Where text comes from: the embedded corpus, files and folders, Hugging Face, ready tokens.

A source is listed as parts, each of which is read alone: documents, and what was left out.
"""

import functools
import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ssmax._extras import require
from ssmax.errors import MachineError, UsageError
from ssmax_lab.data.shards import Vocabulary

EMBEDDED, HUB, TOKENS = "embedded", "hf:", "tokens:"
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises."""

_LEFT_OUT = re.compile(
    r"__pycache__|site-packages|dist-packages|tests?|idle_test"
    # What describes the machine rather than the language.
    r"|config-.*|_sysconfigdata.*|sitecustomize\.py|usercustomize\.py"
)
_INDENTATION = re.compile(r"^(?: {4})+", re.MULTILINE)
_PIECE = 2**22
"""Bytes of ready tokens that are read at a time."""
_ENOUGH = 64
"""Tokens that tell their width: so many, every other one 0, are no text."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text."""

    name: str
    """Where it came from: "file.txt", "file.jsonl:17"."""
    text: str


@dataclass(frozen=True, slots=True)
class TokenDocument:
    """One document that is encoded already."""

    name: str
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class Skipped:
    """What could have been a document, and why it is none."""

    name: str
    reason: str
    """One of few, so that reasons can be counted."""


Documents = Iterator[Document | TokenDocument | Skipped]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A piece of a source that is read by itself."""

    name: str
    size: int | None
    """Bytes to read; None where unknown."""
    read: Callable[[], Documents]
    """Gives everything in it, in an order that is always the same."""


def open_source(
    source: str, *, text_field: str = "text", vocabulary: Vocabulary | None = None
) -> list[Part]:
    """List the parts of "embedded", a file, a folder, "hf:NAME:CONFIG:SPLIT" or "tokens:PATH".

    Ready tokens are those of the vocabulary.
    """
    if source == EMBEDDED:
        return [embedded_part()]
    if source.startswith(HUB):
        return _hub_parts(source, text_field)
    path = Path(source.removeprefix(TOKENS))
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {str(path)!r}; a source is {EMBEDDED!r}, a path, "
            f"'{HUB}NAME' for a dataset of Hugging Face, or '{TOKENS}PATH' for ready tokens"
        )
    readers: dict[str, Reader] = {".bin": _read_tokens, ".npy": _read_tokens}
    option: Any = vocabulary
    if not source.startswith(TOKENS):
        readers, option = _READERS, text_field
    files = {name: (found, readers.get(_kind(found))) for name, found in files_of(path).items()}
    if not any(reader for _, reader in files.values()):
        raise UsageError(
            f"{source} holds nothing to read; what is read: {', '.join(readers)}, also as "
            ".gz, .xz or .zst"
        )
    return [
        Part(
            name=name,
            size=found.stat().st_size if reader else 0,
            read=functools.partial(_read_file, reader, name, found, option),
        )
        for name, (found, reader) in files.items()
    ]


def _document(name: str, parse: Callable[[], object], field: str) -> Document | Skipped:
    """Make a document of what `parse` gives, or say why it is none."""
    try:
        text = parse()
        if not isinstance(text, str):
            return Skipped(name, "not a string")
        # JSON can spell half of a surrogate pair, which no UTF-8 can.
        text.encode()
    except UnicodeError:
        return Skipped(name, "not UTF-8")
    except (KeyError, TypeError):
        return Skipped(name, f"no field {field!r}")
    except (ValueError, RecursionError):
        return Skipped(name, "not JSON")
    return Document(name, text) if text.strip() else Skipped(name, "empty")


def files_of(path: Path) -> dict[str, Path]:
    """List the files of a folder by relative path, or one file; hidden ones are left out."""
    if not path.is_dir():
        return {path.name: path}
    found, seen = [], set()
    for here, folders, files in os.walk(path, followlinks=True):
        # A link to a folder above would lead around forever.
        if (place := os.path.realpath(here)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(here, name).relative_to(path) for name in files if name[0] != "."]
    return {name.as_posix(): path / name for name in sorted(found, key=lambda name: name.parts)}


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed where its name ends in .gz, .xz or .zst."""
    if path.suffix.lower() == ".zst":
        import pyarrow  # here, since few sources need it

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower(), open)
    return opener(path, "rb")


def _read_text(name: str, path: Path, field: str) -> Documents:
    with open_bytes(path) as file:
        content = file.read()
    # Windows puts a byte order mark before UTF-8.
    yield _document(name, lambda: content.decode("utf-8-sig"), field)


def _read_lines(name: str, path: Path, field: str) -> Documents:
    def parse(line: bytes) -> object:
        return json.loads(line.decode("utf-8-sig"))[field]

    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _document(f"{name}:{number}", functools.partial(parse, line), field)


def _read_parquet(name: str, path: Path, field: str) -> Documents:
    import pyarrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                yield Skipped(name, f"no field {field!r}")
                return
            for batch in file.iter_batches(1024, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield _document(f"{name}:{number}", value.as_py, field)
    except pyarrow.ArrowException as error:
        raise EOFError(str(error)) from error


def _read_tokens(name: str, path: Path, vocabulary: Vocabulary | None) -> Documents:
    assert vocabulary is not None, "ready tokens are those of a vocabulary"
    number, begun = 0, np.empty(0, np.uint16)
    for tokens in _pieces(path, vocabulary):
        joined = np.concatenate([begun, tokens])
        ends = np.flatnonzero(joined == vocabulary.end_of_document)
        *documents, begun = np.split(joined, ends + 1)
        for document in documents:
            number += 1
            here = f"{name}:{number}"
            yield (
                TokenDocument(here, document[:-1]) if document.size > 1 else Skipped(here, "empty")
            )
    if begun.size:
        yield TokenDocument(f"{name}:{number + 1}", begun)


def _pieces(path: Path, vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    """Give the tokens of a file, checked; one that is not what it should be is refused."""
    found, expected = 0, None
    dtype = np.dtype(vocabulary.dtype).newbyteorder("<")
    try:
        with open_bytes(path) as file:
            if _kind(path) == ".npy":
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                if len(shape) != 1 or dtype not in (np.dtype("<u2"), np.dtype("<u4")):
                    raise ValueError(
                        "it must hold one row of little-endian uint16 or uint32, "
                        f"got shape {shape} of {dtype}"
                    )
                expected = shape[0]
            while content := file.read(_PIECE):
                tokens = np.frombuffer(content, dtype)
                if expected is None and not found:
                    _check_width(tokens)
                if tokens.max() >= vocabulary.size:
                    raise ValueError(
                        f"it holds the token {tokens.max()}, but {vocabulary.name!r} has only "
                        f"{vocabulary.size}; is it another tokenizer's?"
                    )
                found += tokens.size
                yield tokens
            if not found or expected not in (None, found):
                raise EOFError(f"it ends after {found} tokens; is it still being written?")
    except (*BROKEN, ValueError) as error:
        raise UsageError(f"{path} cannot be read as tokens: {error}") from error


def _check_width(first: np.ndarray) -> None:
    """Refuse a .bin of 32 bits that is read as 16: the upper half of each token is 0 there."""
    if first.itemsize == 2 and first.size >= _ENOUGH and not first[1::2].any():
        raise ValueError(
            "it looks like tokens of 32 bits, and those of this vocabulary are read as 16 in a "
            ".bin; save it as .npy, which says its width"
        )


def _kind(path: Path) -> str:
    """Tell what a file holds by its name; nothing that is read where it is no file."""
    if not path.is_file() or path.name.endswith("offsets.npy"):
        return ""
    stem = path.stem if path.suffix.lower() in (".gz", ".xz", ".zst") else path.name
    return Path(stem).suffix.lower()


Reader = Callable[[str, Path, Any], Documents]
_READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".jsonl": _read_lines,
    ".parquet": _read_parquet,
}


def _read_file(reader: Reader | None, name: str, path: Path, option: Any) -> Documents:
    if reader is None:
        yield Skipped(name, "not a kind of file that is read")
        return
    try:
        yield from reader(name, path, option)
    except OSError as error:
        # The errors of an archive have no number; those of the system do.
        yield Skipped(name, f"cannot be read: {error.strerror}" if error.errno else "broken file")
    except BROKEN:
        yield Skipped(name, "broken file")


def _hub_parts(source: str, field: str) -> list[Part]:
    name, config, split, *more = [*source.removeprefix(HUB).split(":"), "", ""]
    if not name or any(more):
        raise UsageError(f"a dataset is written {HUB}NAME, {HUB}NAME:CONFIG:SPLIT, got {source!r}")
    load = functools.partial(_load_dataset, name, config or None, split or "train")
    try:
        count = load().num_shards
    except (OSError, ValueError) as error:
        raise UsageError(f"{source} cannot be opened: {error}") from error
    return [
        Part(
            name=f"{source}#{index}",
            size=None,
            read=functools.partial(_read_hub, load, source, count, index, field),
        )
        for index in range(count)
    ]


def _load_dataset(name: str, config: str | None, split: str) -> Any:
    datasets = require("datasets", install="ssmax-lab[hub]", purpose=f"the dataset {name!r}")
    return datasets.load_dataset(name, config, split=split, streaming=True)


def _read_hub(
    load: Callable[[], Any], source: str, num_shards: int, index: int, field: str
) -> Documents:
    name = f"{source}#{index}"
    try:
        for number, row in enumerate(load().shard(num_shards=num_shards, index=index), start=1):
            yield _document(f"{name}:{number}", functools.partial(row.__getitem__, field), field)
    except OSError as error:
        raise MachineError(
            f"{name} stopped: {error}; run the same command again to resume"
        ) from error


def embedded_part() -> Part:
    """Make a part of the whole corpus, named by its version."""
    size = sum(len(document.text.encode()) for document in embedded_documents())
    return Part(name=f"embedded {embedded_version()}", size=size, read=embedded_documents)


def embedded_documents() -> Iterator[Document]:
    """Read the standard library's modules by relative path, four spaces of indentation as a tab."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _LEFT_OUT.fullmatch(name)]
        found += [
            Path(folder, name).relative_to(root).as_posix()
            for name in files
            if name.endswith(".py") and not _LEFT_OUT.fullmatch(name)
        ]
    if not found:
        raise UsageError(
            f"this Python comes without the sources of its standard library: {root} holds none; "
            "give a text of your own"
        )
    for name in sorted(found):
        text = (root / name).read_text(encoding="utf-8")
        # Tabs make of every level of indentation one token of GPT-2 instead of four.
        folded = _INDENTATION.sub(lambda spaces: "\t" * (len(spaces[0]) // 4), text)
        if folded.strip():
            yield Document(name, folded)


def embedded_version() -> str:
    """Name the version of Python and a hash of the corpus: "3.11.7-0123456789ab"."""
    digest = hashlib.sha256()
    for document in embedded_documents():
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return f"{platform.python_version()}-{digest.hexdigest()[:12]}"
