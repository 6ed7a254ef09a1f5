"""Tokens that are ready: rows of ids in .bin and .npy, documents ended by end_of_document."""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.data.shards import Vocabulary
from ssmax_lab.data.sources import BROKEN, Part, Skipped, TokenDocument, files_of, open_bytes

TOKENS = "tokens:"

_PIECE = 2**22
_ENOUGH = 64
"""Tokens that tell their width: so many, every other one 0, are no text."""


def open_tokens(source: str, vocabulary: Vocabulary) -> list[Part]:
    """List the files of "tokens:PATH"; offsets beside them are left out."""
    path = Path(source.removeprefix(TOKENS))
    if not path.exists():
        raise UsageError(f"there is no file or folder {path}")
    files = {
        name: found
        for name, found in files_of(path).items()
        if _kind(found) in (".bin", ".npy") and not name.endswith("offsets.npy")
    }
    if not files:
        raise UsageError(f"{path} holds no tokens; what is read: .bin and .npy, also .gz or .xz")
    return [
        Part(
            name=name,
            size=found.stat().st_size,
            read=functools.partial(_read, name, found, vocabulary),
        )
        for name, found in files.items()
    ]


def _read(name: str, path: Path, vocabulary: Vocabulary) -> Iterator[TokenDocument | Skipped]:
    number, begun = 0, np.empty(0, np.uint16)
    for tokens in _pieces(path, vocabulary):
        joined = np.concatenate([begun, tokens])
        ends = np.flatnonzero(joined == vocabulary.end_of_document)
        *documents, begun = np.split(joined, ends + 1)
        for document in documents:
            number += 1
            yield _document(f"{name}:{number}", document[:-1])
    if begun.size:
        yield _document(f"{name}:{number + 1}", begun)


def _document(name: str, tokens: np.ndarray) -> TokenDocument | Skipped:
    return TokenDocument(name, tokens) if tokens.size else Skipped(name, "empty")


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
    return Path(path.stem).suffix if path.suffix in (".gz", ".xz") else path.suffix
