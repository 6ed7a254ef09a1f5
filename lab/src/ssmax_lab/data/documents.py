"""What a source hands over: documents, what was left out, and parts that a worker reads alone."""

import abc
from collections.abc import Iterator
from dataclasses import dataclass

from ssmax.errors import MachineError


class SourceStoppedError(MachineError):
    """A source that broke off and may go on later, as a connection does."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text."""

    name: str
    """Where it came from: "file.txt", "file.jsonl:17"."""
    text: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """What could have been a document, and why it is none."""

    name: str
    reason: str
    """One of few, so that reasons can be counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(abc.ABC):
    """A piece of a source that one worker reads, in whatever process."""

    name: str
    size: int | None
    """Bytes to read; None where unknown."""

    @abc.abstractmethod
    def documents(self) -> Iterator[Document | Skipped]:
        """Everything in it, in an order that is always the same."""


def checked(name: str, value: object) -> Document | Skipped:
    """The document of a value that should be text."""
    if not isinstance(value, str):
        return Skipped(name, "not a string")
    if not value.strip():
        return Skipped(name, "empty")
    try:
        # JSON can spell half of a surrogate pair, which no UTF-8 can.
        value.encode()
    except UnicodeEncodeError:
        return Skipped(name, "not Unicode")
    return Document(name, value)
