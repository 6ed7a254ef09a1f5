"""A share of a preparation: parts of a source that become at most two shards and a record."""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssmax._files import write_whole
from ssmax.errors import MachineError
from ssmax_lab.data.documents import Document, Part, Skipped, SourceStoppedError
from ssmax_lab.data.shards import SUFFIX, ShardWriter, Vocabulary, read_header
from ssmax_lab.data.token_files import TokenDocument, TokenPart
from ssmax_lab.data.tokenizer import Tokenizer, load_tokenizer

TRAIN, VALIDATION, RECORDS = "train", "validation", "tasks"
NUM_KEYS = 2**64
"""Keys of documents lie below it, evenly."""

# A worker runs many tasks with one tokenizer.
_load_tokenizer = functools.lru_cache(1)(load_tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Parts that share a shard."""

    number: int
    parts: Sequence[Part | TokenPart]
    vocabulary: Vocabulary
    origin: dict[str, Any]
    """Equal only for what makes equal shards."""

    @property
    def size(self) -> int:
        """Bytes of its parts, as far as known."""
        return sum(part.size or 0 for part in self.parts)

    def documents(self) -> Iterator[Document | TokenDocument | Skipped]:
        """Those of its parts, one part after the other."""
        for part in self.parts:
            yield from part.documents()

    def shard(self, out: Path, side: str) -> Path:
        """Where its documents of one side go."""
        return out / side / f"{self.number:06}{SUFFIX}"

    def record(self, out: Path) -> Path:
        """Where it says that it is finished."""
        return out / RECORDS / f"{self.number:06}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a finished task says of itself."""

    task: int
    origin: dict[str, Any]
    held_out_below: int
    """Documents with a smaller key are in validation."""
    smallest_key: int
    largest_key: int
    smallest_tokens: int = 0
    """Of the documents with the smallest key; 0 in records older than this."""
    tokens: dict[str, int]
    """By side; a side without documents is missing."""
    documents: dict[str, int]
    skipped: list[list[str]]
    """Names and reasons."""


def group(
    parts: Sequence[Part | TokenPart],
    vocabulary: Vocabulary,
    settings: dict[str, Any],
    *,
    max_bytes: int,
) -> list[Task]:
    """Neighbours together up to a size, so that small files share a shard."""
    groups: list[list[Part | TokenPart]] = []
    room = 0
    for part in parts:
        size = max_bytes if part.size is None else part.size
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(part)
        room -= size
    return [
        Task(
            number=number,
            parts=neighbours,
            vocabulary=vocabulary,
            origin={**settings, "parts": describe(neighbours), "task": number},
        )
        for number, neighbours in enumerate(groups)
    ]


def describe(parts: Sequence[Part | TokenPart]) -> str:
    """A name for parts that any change of their names, sizes or order changes."""
    listed = json.dumps([[part.name, part.size] for part in parts])
    digest = hashlib.sha256(listed.encode()).hexdigest()
    return f"{len(parts)} from {parts[0].name} to {parts[-1].name}, SHA-256 {digest}"


def run_task(task: Task, *, out: Path, tokenizer: str, held_out_below: int) -> Record:
    """Write the shards of a task, then its record."""
    loaded = _load_tokenizer(tokenizer)
    checkpoint_group: dict[str, ShardWriter] = {}
    skipped: list[list[str]] = []
    smallest_key, largest_key, smallest_tokens = NUM_KEYS, -1, 0
    # What a source cannot read is skipped or refused there, and one that stops says so: whatever
    # else fails here is writing.
    with writing(out):
        task.record(out).unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            for document in task.documents():
                if isinstance(document, Skipped):
                    skipped.append([document.name, document.reason])
                    continue
                key, tokens = _encode(document, loaded)
                if not len(tokens):
                    skipped.append([document.name, "no tokens"])
                    continue
                side = VALIDATION if key < held_out_below else TRAIN
                if side not in checkpoint_group:
                    path = task.shard(out, side)
                    path.parent.mkdir(exist_ok=True)
                    writer = ShardWriter(path, task.vocabulary, origin=task.origin)
                    checkpoint_group[side] = stack.enter_context(writer)
                checkpoint_group[side].add(tokens)
                if key <= smallest_key:
                    # With its end; equal texts have equal keys and would move together.
                    smallest_tokens = (key == smallest_key) * smallest_tokens + len(tokens) + 1
                smallest_key, largest_key = min(smallest_key, key), max(largest_key, key)
        for side in {TRAIN, VALIDATION} - checkpoint_group.keys():
            task.shard(out, side).unlink(missing_ok=True)
        record = Record(
            task=task.number,
            origin=task.origin,
            held_out_below=held_out_below,
            smallest_key=smallest_key,
            largest_key=largest_key,
            smallest_tokens=smallest_tokens,
            tokens={side: writer.num_tokens for side, writer in sorted(checkpoint_group.items())},
            documents={
                side: writer.num_documents for side, writer in sorted(checkpoint_group.items())
            },
            skipped=skipped,
        )
        write_whole(task.record(out), json.dumps(dataclasses.asdict(record)) + "\n")
    return record


def _encode(
    document: Document | TokenDocument, tokenizer: Tokenizer
) -> tuple[int, Sequence[int] | np.ndarray]:
    """The key that decides a document's side, and its tokens."""
    if isinstance(document, TokenDocument):
        # The side is that of the tokens as they came: gpt2 and gpt2-digits validate on the same.
        content = document.tokens.astype("<u4").tobytes()
        tokens = tokenizer.retokenised(document.tokens)
    else:
        content, tokens = document.text.encode(), tokenizer.encode(document.text)
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big"), tokens


def finished_record(task: Task, out: Path) -> Record | None:
    """The record of a task whose shards are there as it left them."""
    try:
        record = Record(**json.loads(task.record(out).read_bytes()))
        headers = {side: read_header(task.shard(out, side)) for side in record.tokens}
    except (OSError, TypeError, ValueError):
        return None
    origins = [record.origin, *(header.origin for header in headers.values())]
    return record if all(origin == task.origin for origin in origins) else None


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Say of a failed write what it means for the folder."""
    try:
        yield
    except SourceStoppedError:
        raise
    except OSError as error:
        raise MachineError(
            f"{out} cannot be written: {error}; what is finished stays, "
            "and the same command goes on from there"
        ) from error
