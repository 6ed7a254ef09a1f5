"""Tokens that are ready: rows of ids in .bin and .npy, documents ended by end_of_document."""

import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.data.documents import Skipped
from ssmax_lab.data.shards import Vocabulary
from ssmax_lab.data.sources import open_bytes, sorted_files

TOKENS = "tokens:"

_PACKED = (".gz", ".xz")
_PIECE = 2**22
_ENOUGH = 64
"""Tokens that tell their width: so many, every other one 0, are no text."""


@dataclass(frozen=True, slots=True)
class TokenDocument:
    """One document that is encoded already."""

    name: str
    tokens: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPart:
    """A file of tokens."""

    name: str
    size: int
    path: Path
    vocabulary: Vocabulary

    def documents(self) -> Iterator[TokenDocument | Skipped]:
        """Its documents, in order; a file that is not what it should be is refused."""
        number, begun = 0, []
        for tokens in self._pieces():
            start = 0
            for end in np.flatnonzero(tokens == self.vocabulary.end_of_document).tolist():
                number += 1
                yield self._document(number, [*begun, tokens[start:end]])
                start, begun = end + 1, []
            begun.append(tokens[start:])
        if any(piece.size for piece in begun):
            yield self._document(number + 1, begun)

    def _document(self, number: int, pieces: list[np.ndarray]) -> TokenDocument | Skipped:
        tokens, name = np.concatenate(pieces), f"{self.name}:{number}"
        return TokenDocument(name, tokens) if tokens.size else Skipped(name, "empty")

    def _pieces(self) -> Iterator[np.ndarray]:
        try:
            with open_bytes(self.path) as file:
                dtype, expected = self._layout(file)
                found = 0
                while content := file.read(_PIECE):
                    if len(content) % dtype.itemsize:
                        raise EOFError(f"it ends inside a token of {dtype.itemsize} bytes")
                    tokens = np.frombuffer(content, dtype)
                    if not found and _kind(self.path) == ".bin":
                        self._check_width(tokens)
                    found += tokens.size
                    yield self._checked(tokens)
                if expected not in (None, found):
                    raise EOFError(f"it promises {expected} tokens and holds {found}")
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise UsageError(f"{self.path} cannot be read: {error}") from error

    def _layout(self, file: IO[bytes]) -> tuple[np.dtype, int | None]:
        """The type of a token and, where the file says it, how many there are."""
        if _kind(self.path) == ".bin":
            return np.dtype(self.vocabulary.dtype).newbyteorder("<"), None
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(file)
        except (KeyError, ValueError) as error:
            raise UsageError(f"{self.path} is no array of NumPy: {error}") from error
        if len(shape) != 1 or dtype not in (np.dtype("<u2"), np.dtype("<u4")):
            raise UsageError(
                f"{self.path} must hold one row of little-endian uint16 or uint32, "
                f"got shape {shape} of {dtype}"
            )
        return dtype, shape[0]

    def _check_width(self, first: np.ndarray) -> None:
        """Refuse a .bin of 32 bits that is read as 16: the upper half of each token is 0 there."""
        if first.itemsize == 2 and first.size >= _ENOUGH and not first[1::2].any():
            raise UsageError(
                f"{self.path} looks like tokens of 32 bits, and those of "
                f"{self.vocabulary.name!r} are read as 16 in a .bin; save it as .npy, which says "
                "its width"
            )

    def _checked(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.max() >= self.vocabulary.size:
            raise UsageError(
                f"{self.path} holds the token {tokens.max()}, but {self.vocabulary.name!r} has "
                f"only {self.vocabulary.size}; is it another tokenizer's?"
            )
        return tokens


def open_tokens(source: str, vocabulary: Vocabulary) -> list[TokenPart]:
    """The files of "tokens:PATH"; offsets beside them are left out."""
    path = Path(source.removeprefix(TOKENS))
    if not path.exists():
        raise UsageError(f"there is no file or folder {path}")
    root, found = (path, sorted_files(path)) if path.is_dir() else (path.parent, [path])
    paths = [path for path in found if _kind(path) in (".bin", ".npy") and not _is_offsets(path)]
    if not paths:
        raise UsageError(f"{path} holds no tokens; what is read: .bin and .npy, also .gz or .xz")
    empty = next((path for path in paths if not path.stat().st_size), None)
    if empty is not None:
        raise UsageError(
            f"{empty} has 0 bytes, as a file has that is still being written or was cut off; "
            "write it again, or take it away"
        )
    return [
        TokenPart(
            name=path.relative_to(root).as_posix(),
            size=path.stat().st_size,
            path=path,
            vocabulary=vocabulary,
        )
        for path in paths
    ]


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in _PACKED else path.suffix


def _is_offsets(path: Path) -> bool:
    return path.name.endswith("offsets.npy")
