"""Text to shards, in parallel; stopped at any moment, the same command resumes.

The parts of a source are grouped into tasks. A task writes at most one shard of training tokens
and one of validation tokens, then its record; a task with a record is finished. The indices come
last, so a folder with one is whole.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssmax._files import locked, make_folder, write_whole
from ssmax._progress import log_progress
from ssmax.errors import MachineError, UsageError
from ssmax_lab.data.shards import (
    INDEX,
    SUFFIX,
    TRAIN,
    VALIDATION,
    ShardInfo,
    ShardSet,
    ShardWriter,
    Vocabulary,
    read_index,
    write_index,
    write_shard,
)
from ssmax_lab.data.sources import Document, Part, Skipped, TokenDocument, open_source
from ssmax_lab.data.token_files import TOKENS, open_tokens
from ssmax_lab.data.tokenizer import FILE, Tokenizer, load_tokenizer
from ssmax_lab.data.workers import cores, run_all

logger = logging.getLogger(__name__)
RECORDS = "tasks"
TASK_BYTES = 64_000_000
"""Small files share a task up to this size; a larger one has its own."""
NUM_KEYS = 2**64
"""Keys of documents lie below it, evenly."""

# A worker runs many tasks with one tokenizer.
_load_tokenizer = functools.lru_cache(1)(load_tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Parts that share a shard."""

    name: str
    """Of its shards and of its record."""
    parts: Sequence[Part]
    origin: str
    """Equal only for what makes equal shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a finished task says of itself."""

    task: str
    origin: str
    held_out_below: int
    """Documents with a smaller key are in validation."""
    smallest_key: int
    largest_key: int
    smallest_tokens: int
    """Tokens of the documents with the smallest key."""
    shards: dict[str, ShardInfo]
    """By side; a side without documents is missing."""
    skipped: list[list[str]]
    """Names and reasons."""


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    workers: int | None = None,
    validation_fraction: float = 0.005,
    text_field: str = "text",
) -> dict[str, ShardSet]:
    """Write the tokens of a source to out/train and out/validation; return those two by name.

    A text's hash decides its side; "validation" is missing where nothing is held out. The shards
    do not depend on the number of workers (by default one for each core that may be used), nor on
    interruptions. A script that calls it with several workers does so under
    `if __name__ == "__main__":`.
    """
    source, out = str(source), Path(out)
    prefix = TOKENS if source.startswith(TOKENS) else ""
    path = Path(source.removeprefix(prefix))
    workers = cores() if workers is None else workers
    if workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers}")
    if not 0 <= validation_fraction < 1:
        raise UsageError(
            f"validation_fraction must be from 0 to below 1, got {validation_fraction}"
        )
    _check_apart(path, out)
    loaded = load_tokenizer(tokenizer)
    if prefix:
        parts = open_tokens(source, loaded.vocabulary)
    else:
        parts = open_source(source, text_field=text_field)
    settings = {
        # A path is the same with whatever slashes and dots it is typed.
        "source": f"{prefix}{path}",
        "tokenizer": f"{loaded.vocabulary.name} {loaded.vocabulary.hash}",
        "validation_fraction": validation_fraction,
        "text_field": text_field,
    }
    details = {**settings, "parts": _describe(parts)}
    tasks = _group(parts, settings)
    wanted = int(validation_fraction * NUM_KEYS)
    try:
        make_folder(out)
        with locked(out):
            _check_same(out, details)
            (out / RECORDS).mkdir(exist_ok=True)
            found = (_finished_record(task, out, loaded.vocabulary) for task in tasks)
            records = {record.task: record for record in found if record is not None}

            def keep(record: Record) -> None:
                records[record.task] = record
                log_progress(logger, "part", len(records), len(tasks))

            def run(pending: list[Task], held_out_below: int) -> None:
                for side in (TRAIN, VALIDATION) if pending else ():
                    (out / side / INDEX).unlink(missing_ok=True)
                job = functools.partial(
                    run_task, out=out, tokenizer=tokenizer, held_out_below=held_out_below
                )
                run_all(job, pending, workers=workers, on_result=keep)

            log_progress(logger, "part", len(records), len(tasks))
            run([task for task in tasks if task.name not in records], wanted)
            below = _held_out_below(source, records.values(), wanted)
            # Where a side would be empty, once more for the one document that changes sides.
            run([task for task in tasks if _is_misplaced(records[task.name], below)], below)
            _finish(out, loaded, [records[task.name] for task in tasks], details)
    except MachineError:
        raise
    except OSError as error:
        # What a source cannot read is skipped or refused there: whatever fails here is writing.
        raise MachineError(
            f"{out} cannot be written: {error}; what is finished stays, "
            "and the same command resumes"
        ) from error
    sides = [side for side in (TRAIN, VALIDATION) if (out / side).exists()]
    return {side: ShardSet.open(out / side) for side in sides}


def text_to_measure(folder: Path, *, is_for_tests: bool) -> Path:
    """Find the shards of a prepared folder that no run has seen: its validation side, or itself.

    Of text that was prepared for tests, without a validation side, all is measured on.
    """
    sides = [folder / VALIDATION, folder] + [folder / TRAIN] * is_for_tests
    for side in sides:
        if (side / INDEX).is_file() or any(side.glob(f"*{SUFFIX}")):
            return side
    if (folder / TRAIN).is_dir():
        raise UsageError(
            f"{folder} has no validation side to measure on; prepare it with a "
            "--validation-fraction above 0, or give another text to measure on"
        )
    raise UsageError(
        f"there are no prepared tokens in {folder}; make them with ssmax-lab data prepare"
    )


def run_task(task: Task, *, out: Path, tokenizer: str, held_out_below: int) -> Record:
    """Write the shards of a task, then its record."""
    loaded = _load_tokenizer(tokenizer)
    writers: dict[str, ShardWriter] = {}
    skipped: list[list[str]] = []
    smallest_key, largest_key, smallest_tokens = NUM_KEYS, -1, 0
    path = _record_path(out, task.name)
    path.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        for document in (item for part in task.parts for item in part.read()):
            if isinstance(document, Skipped):
                skipped.append([document.name, document.reason])
                continue
            key, tokens = _encode(document, loaded)
            if not len(tokens):
                skipped.append([document.name, "no tokens"])
                continue
            side = VALIDATION if key < held_out_below else TRAIN
            if side not in writers:
                (out / side).mkdir(exist_ok=True)
                shard = write_shard(out / side / f"{task.name}{SUFFIX}", loaded.vocabulary)
                writers[side] = stack.enter_context(shard)
            writers[side].add(tokens)
            if key <= smallest_key:
                # With its end; equal texts have equal keys and would move together.
                smallest_tokens = (key == smallest_key) * smallest_tokens + len(tokens) + 1
            smallest_key, largest_key = min(smallest_key, key), max(largest_key, key)
    record = Record(
        task=task.name,
        origin=task.origin,
        held_out_below=held_out_below,
        smallest_key=smallest_key,
        largest_key=largest_key,
        smallest_tokens=smallest_tokens,
        shards={side: writer.info() for side, writer in writers.items()},
        skipped=skipped,
    )
    write_whole(path, json.dumps(dataclasses.asdict(record)) + "\n")
    return record


def _encode(
    document: Document | TokenDocument, tokenizer: Tokenizer
) -> tuple[int, Sequence[int] | np.ndarray]:
    """Give the key that decides a document's side, and its tokens."""
    if isinstance(document, TokenDocument):
        # The side is that of the tokens as they came: gpt2 and gpt2-digits validate on the same.
        content = document.tokens.astype("<u4").tobytes()
        tokens = tokenizer.from_file(document.tokens)
    else:
        content, tokens = document.text.encode(), tokenizer.encode(document.text)
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big"), tokens


def _group(parts: Sequence[Part], settings: dict[str, Any]) -> list[Task]:
    """Put neighbours together up to a size, so that small files share a shard."""
    groups: list[list[Part]] = []
    room = 0
    for part in parts:
        size = TASK_BYTES if part.size is None else part.size
        if not groups or size > room:
            groups.append([])
            room = TASK_BYTES
        groups[-1].append(part)
        room -= size
    return [
        Task(
            name=f"{number:06}",
            parts=neighbours,
            origin=f"{_describe(neighbours)}, {json.dumps(settings)}",
        )
        for number, neighbours in enumerate(groups)
    ]


def _describe(parts: Sequence[Part]) -> str:
    """Name parts so that any change of their names, sizes or order changes it."""
    listed = json.dumps([[part.name, part.size] for part in parts])
    digest = hashlib.sha256(listed.encode()).hexdigest()
    return f"{len(parts)} from {parts[0].name} to {parts[-1].name}, SHA-256 {digest}"


def _record_path(out: Path, task: str) -> Path:
    return out / RECORDS / f"{task}.json"


def _finished_record(task: Task, out: Path, vocabulary: Vocabulary) -> Record | None:
    """Read the record of a task whose shards are there as it left them."""
    try:
        values = json.loads(_record_path(out, task.name).read_bytes())
        shards = {side: ShardInfo(**shard) for side, shard in values.pop("shards").items()}
        record = Record(**values, shards=shards)
        for side, shard in shards.items():
            shard.check_size(out / side, vocabulary)
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return record if (record.task, record.origin) == (task.name, task.origin) else None


def _held_out_below(source: str, records: Collection[Record], wanted: int) -> int:
    """Find where validation ends among the keys, so that neither side is empty if that can be.

    A text that is more than half of all is no text to hold out: little were left to train on.
    """
    num_tokens = sum(shard.num_tokens for one in records for shard in one.shards.values())
    if not num_tokens:
        reasons = ", ".join(f"{count:,} as {reason!r}" for reason, count in _reasons(records))
        raise UsageError(f"{source} holds no documents: all were skipped, {reasons}")
    smallest_key = min(record.smallest_key for record in records)
    largest_key = max(record.largest_key for record in records)
    if smallest_key >= wanted:
        same = [record for record in records if record.smallest_key == smallest_key]
        if not wanted or 2 * sum(record.smallest_tokens for record in same) > num_tokens:
            return wanted
    return min(max(wanted, smallest_key + 1), largest_key)


def _is_misplaced(record: Record, held_out_below: int) -> bool:
    low, high = sorted((record.held_out_below, held_out_below))
    return low <= record.smallest_key < high or low <= record.largest_key < high


def _finish(
    out: Path, tokenizer: Tokenizer, records: Sequence[Record], details: dict[str, Any]
) -> None:
    """Write the indices, that of training last: it says that all is there."""
    if tokenizer.definition is None:
        (out / FILE).unlink(missing_ok=True)
    else:
        write_whole(out / FILE, tokenizer.definition)
    sides = sorted({side for record in records for side in record.shards})
    details = {**details, "sides": sides, "skipped": dict(_reasons(records))}
    kept = {_record_path(out, record.task) for record in records}
    kept |= {out / side / shard.name for one in records for side, shard in one.shards.items()}
    for folder, suffix in ((TRAIN, SUFFIX), (VALIDATION, SUFFIX), (RECORDS, ".json")):
        # What is left of another division, or of a preparation that was given up.
        for path in {*(out / folder).glob("[0-9]" * 6 + suffix)} - kept:
            path.unlink()
    for side in (VALIDATION, TRAIN):
        shards = [record.shards[side] for record in records if side in record.shards]
        if shards:
            write_index(out / side, tokenizer.vocabulary, shards, details=details)
        elif (out / side).exists():
            (out / side).rmdir()


def _reasons(records: Collection[Record]) -> list[tuple[str, int]]:
    return sorted(Counter(reason for one in records for _, reason in one.skipped).items())


def _check_apart(folder: Path, out: Path) -> None:
    if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{out} lies inside the source {folder}, which would then hold its own shards; "
            "give a folder elsewhere"
        )


def _check_same(out: Path, wanted: dict[str, Any]) -> None:
    """Refuse a folder where another preparation was finished; one that was not is overwritten."""
    if not (out / TRAIN / INDEX).is_file():
        return
    _, _, there = read_index(out / TRAIN)
    differing = [
        f"{name} was {there.get(name)!r} and is {value!r}"
        for name, value in wanted.items()
        if there.get(name) != value
    ]
    if differing:
        raise UsageError(
            f"{out} holds another preparation: {'; '.join(differing)}; "
            "give another folder, or remove this one"
        )
