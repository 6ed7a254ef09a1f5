"""Text to shards, in parallel; stopped at any moment, the same command resumes.

The parts of a source are grouped into tasks. A task writes at most one shard of training tokens
and one of validation tokens, then its record; a task with a record is finished. preparation.json
says of what they are tasks. The indices come last, so a folder with one is whole.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    write_index,
    write_shard,
)
from ssmax_lab.data.sources import TOKENS, Document, Part, Skipped, TokenDocument, open_source
from ssmax_lab.data.tokenizer import FILE, Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)
RECORDS, DETAILS = "tasks", "preparation.json"
TASK_BYTES = 64_000_000
"""Small files share a task up to this size; a larger one has its own."""
NUM_KEYS = 2**64
"""Keys of documents lie below it, evenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a finished task says of itself."""

    shards: dict[str, ShardInfo]
    """By side; a side without documents is missing."""
    skipped: list[list[str]]
    """Names and reasons."""


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    do not depend on the number of workers, which are threads, by default one for each core that
    may be used, nor on interruptions.
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
    if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
        raise UsageError(
            f"{out} lies inside the source {path}, which would then hold its own shards; "
            "give a folder elsewhere"
        )
    loaded = load_tokenizer(tokenizer)
    parts = open_source(source, text_field=text_field, vocabulary=loaded.vocabulary)
    details = {
        # A path is the same with whatever slashes and dots it is typed.
        "source": f"{prefix}{path}",
        "tokenizer": f"{loaded.vocabulary.name} {loaded.vocabulary.hash}",
        "validation_fraction": validation_fraction,
        "text_field": text_field,
        "parts": _describe(parts),
    }
    tasks = _group(parts)
    try:
        make_folder(out)
        with locked(out):
            _continue(out, details)
            records = _run_all(tasks, out, loaded, workers, int(validation_fraction * NUM_KEYS))
            _finish(out, loaded, records, details)
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


def _run_all(
    tasks: Mapping[str, Sequence[Part]],
    out: Path,
    tokenizer: Tokenizer,
    workers: int,
    held_out_below: int,
) -> list[Record]:
    """Do the tasks that are not finished; return the records of all."""
    records = {
        name: record
        for name in tasks
        if (record := _finished(name, out, tokenizer.vocabulary)) is not None
    }
    pending = [name for name in tasks if name not in records]
    for folder in (TRAIN, VALIDATION, RECORDS) if pending else ():
        (out / folder).mkdir(exist_ok=True)
        (out / folder / INDEX).unlink(missing_ok=True)
    sizes = [math.inf if part.size is None else part.size for one in tasks.values() for part in one]
    is_all = sum(sizes) <= TASK_BYTES
    stop = threading.Event()
    log_progress(logger, "part", len(records), len(tasks))
    # Threads are enough: tokenizers compute without Python's lock.
    with ThreadPoolExecutor(workers) as pool:
        try:
            done = {
                pool.submit(
                    run_task, name, tasks[name], out, tokenizer, held_out_below,
                    is_all=is_all, stop=stop,
                ): name
                for name in pending
            }  # fmt: skip
            for future in as_completed(done):
                records[done[future]] = future.result()
                log_progress(logger, "part", len(records), len(tasks))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [records[name] for name in tasks]


def run_task(
    name: str,
    parts: Sequence[Part],
    out: Path,
    tokenizer: Tokenizer,
    held_out_below: int,
    *,
    is_all: bool,
    stop: threading.Event,
) -> Record:
    """Write the shards of a task, then its record.

    Where it `is_all` there is, which then fits into memory, neither side is left empty.
    """
    skipped: list[list[str]] = []

    def encoded() -> Iterator[tuple[int, np.ndarray]]:
        for document in (item for part in parts for item in part.read()):
            if stop.is_set():
                raise InterruptedError("another task ended the preparation")
            if isinstance(document, Skipped):
                skipped.append([document.name, document.reason])
                continue
            key, tokens = _encode(document, tokenizer)
            if len(tokens):
                yield key, tokens
            else:
                skipped.append([document.name, "no tokens"])

    documents: Iterable[tuple[int, np.ndarray]] = encoded()
    if is_all:
        documents = list(documents)
        held_out_below = _held_out_below(documents, held_out_below)
    writers: dict[str, ShardWriter] = {}
    with contextlib.ExitStack() as stack:
        for key, tokens in documents:
            side = VALIDATION if key < held_out_below else TRAIN
            if side not in writers:
                shard = write_shard(out / side / f"{name}{SUFFIX}", tokenizer.vocabulary)
                writers[side] = stack.enter_context(shard)
            writers[side].add(tokens)
    record = Record(
        shards={side: writer.info() for side, writer in writers.items()}, skipped=skipped
    )
    write_whole(out / RECORDS / f"{name}.json", json.dumps(dataclasses.asdict(record)) + "\n")
    return record


def _held_out_below(documents: Sequence[tuple[int, np.ndarray]], wanted: int) -> int:
    """Find where validation ends among the keys, so that neither side is empty if that can be.

    A text that is more than half of all is no text to hold out: little were left to train on.
    """
    sizes: Counter[int] = Counter()
    for key, tokens in documents:
        # Equal texts have equal keys and are on one side.
        sizes[key] += len(tokens) + 1
    smallest, largest = min(sizes, default=0), max(sizes, default=0)
    is_most = 2 * sizes[smallest] > sizes.total()
    if smallest >= wanted and (not wanted or is_most):
        return wanted
    return min(max(wanted, smallest + 1), largest)


def _encode(document: Document | TokenDocument, tokenizer: Tokenizer) -> tuple[int, np.ndarray]:
    """Give the key that decides a document's side, and its tokens."""
    if isinstance(document, TokenDocument):
        # The side is that of the tokens as they came: gpt2 and gpt2-digits validate on the same.
        content = document.tokens.astype("<u4").tobytes()
        tokens = tokenizer.from_file(document.tokens)
    else:
        content, tokens = document.text.encode(), tokenizer.encode(document.text)
    key = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
    return key, np.asarray(tokens, np.uint32)


def _group(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Put neighbours together up to a size, so that small files share a shard; name the tasks."""
    groups: list[list[Part]] = []
    room = 0
    for part in parts:
        size = TASK_BYTES if part.size is None else part.size
        if not groups or size > room:
            groups.append([])
            room = TASK_BYTES
        groups[-1].append(part)
        room -= size
    return {f"{number:06}": group for number, group in enumerate(groups)}


def _describe(parts: Sequence[Part]) -> str:
    """Name parts so that any change of their names, sizes or order changes it."""
    listed = json.dumps([[part.name, part.size] for part in parts])
    digest = hashlib.sha256(listed.encode()).hexdigest()
    return f"{len(parts)} from {parts[0].name} to {parts[-1].name}, SHA-256 {digest}"


def _finished(task: str, out: Path, vocabulary: Vocabulary) -> Record | None:
    """Read the record of a task whose shards are there as it left them."""
    try:
        values = json.loads((out / RECORDS / f"{task}.json").read_bytes())
        shards = {side: ShardInfo(**shard) for side, shard in values["shards"].items()}
        for side, shard in shards.items():
            shard.check_size(out / side, vocabulary)
        return Record(shards=shards, skipped=values["skipped"])
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _finish(
    out: Path, tokenizer: Tokenizer, records: Sequence[Record], details: dict[str, Any]
) -> None:
    """Write the indices, that of training last: it says that all is there."""
    skipped = Counter(reason for record in records for _, reason in record.skipped)
    if not any(TRAIN in record.shards for record in records):
        reasons = ", ".join(f"{count:,} as {reason!r}" for reason, count in skipped.items())
        raise UsageError(
            f"{details['source']} holds no documents to train on: skipped {reasons or 'none'}; "
            "give more text, or a smaller validation fraction"
        )
    if tokenizer.definition is None:
        (out / FILE).unlink(missing_ok=True)
    else:
        write_whole(out / FILE, tokenizer.definition)
    for side in (VALIDATION, TRAIN):
        shards = [record.shards[side] for record in records if side in record.shards]
        if shards:
            told = {**details, "skipped": dict(sorted(skipped.items()))}
            write_index(out / side, tokenizer.vocabulary, shards, details=told)
        elif (out / side).exists():
            (out / side).rmdir()


def _continue(out: Path, details: dict[str, Any]) -> None:
    """Keep what was begun of this preparation; refuse another finished one, give up any other."""
    path = out / DETAILS
    there = json.loads(path.read_bytes()) if path.is_file() else {}
    if there == details:
        return
    if (out / TRAIN / INDEX).is_file():
        differing = [
            f"{name} was {there.get(name)!r} and is {value!r}"
            for name, value in details.items()
            if there.get(name) != value
        ]
        raise UsageError(
            f"{out} holds another preparation: {'; '.join(differing)}; "
            "give another folder, or remove this one"
        )
    if there:
        for folder in (TRAIN, VALIDATION, RECORDS):
            shutil.rmtree(out / folder, ignore_errors=True)
    write_whole(path, json.dumps(details, indent=2) + "\n")
