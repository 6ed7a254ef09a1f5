"""What a source gives: documents, what was left out, and parts that a worker reads alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ssmax.errors import MachineError


class SourceStoppedError(MachineError):
    """A source that broke off and may answer again later, as a connection does."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A piece of a source that one worker reads, in whatever process."""

    name: str
    size: int | None
    """Bytes to read; None where unknown."""
    read: Callable[[], Iterator[Document | TokenDocument | Skipped]]
    """Gives everything in it, in an order that is always the same; can be pickled."""


def as_document(name: str, parse: Callable[[], object], field: str) -> Document | Skipped:
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
