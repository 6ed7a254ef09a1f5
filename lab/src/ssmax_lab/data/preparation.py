"""Text to shards, in parallel; killed at any moment, the same command goes on where it was.

The parts of a source are grouped into tasks. A task writes at most one shard of training tokens
and one of validation tokens, then its record; a task with a record is finished. The indices come
last, so a folder with one is whole.
"""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmax._files import locked, make_folder, write_whole
from ssmax.errors import UsageError
from ssmax_lab.data.documents import Part
from ssmax_lab.data.shards import INDEX, SUFFIX, write_index
from ssmax_lab.data.sources import EMBEDDED, HUB, open_source
from ssmax_lab.data.tasks import (
    NUM_KEYS,
    RECORDS,
    TRAIN,
    VALIDATION,
    Record,
    Task,
    describe,
    finished_record,
    group,
    run_task,
    writing,
)
from ssmax_lab.data.token_files import TOKENS, TokenPart, open_tokens
from ssmax_lab.data.tokenizer import FILE, load_tokenizer
from ssmax_lab.data.workers import check_guarded, cores, run_all

PREPARATION, SKIPPED = "preparation.json", "skipped.jsonl"
TASK_BYTES = 64_000_000
"""Small files share a task up to this size; a larger one has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a preparation made."""

    folder: Path
    num_tokens: int
    """Training tokens, one end_of_document per document among them."""
    num_documents: int
    """Training documents."""
    validation_tokens: int
    validation_documents: int
    skipped: int
    """How much is in skipped.jsonl."""
    reasons: dict[str, int]
    """How often each reason is in skipped.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a preparation is."""

    done_tasks: int = 0
    total_tasks: int
    done_bytes: int = 0
    """Of the source, as far as sizes are known."""
    total_bytes: int
    num_tokens: int = 0
    num_documents: int = 0
    skipped: int = 0


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    workers: int | None = None,
    validation_fraction: float = 0.005,
    text_field: str = "text",
    on_progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Write the tokens of a source to out/train and out/validation.

    A text's hash decides its side. The files do not depend on the number of workers (by default
    one for each core that may be used), nor on interruptions. A script that calls it with several
    workers does so under `if __name__ == "__main__":`.
    """
    source, out = str(source), Path(out)
    workers = cores() if workers is None else workers
    if workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers}")
    if workers > 1:
        check_guarded()
    if not 0 <= validation_fraction < 1:
        raise UsageError(
            f"validation_fraction must be from 0 to below 1, got {validation_fraction}"
        )
    _check_apart(source, out)
    loaded = load_tokenizer(tokenizer)
    vocabulary = loaded.vocabulary
    if source.startswith(TOKENS):
        parts: Sequence[Part | TokenPart] = open_tokens(source, vocabulary)
    else:
        parts = open_source(source, text_field=text_field)
    settings = {
        "source": source,
        "parts": describe(parts),
        "tokenizer": f"{vocabulary.name} {vocabulary.hash}",
        "validation_fraction": validation_fraction,
        "text_field": text_field,
        "task_bytes": TASK_BYTES,
    }
    wanted = int(validation_fraction * NUM_KEYS)
    with _locked(out), _unclaimed_by_bad_input(out):
        settings = _claim(out, settings)
        tasks = group(parts, vocabulary, settings, max_bytes=TASK_BYTES)
        if loaded.definition is not None:
            write_whole(out / FILE, loaded.definition)
        records = {task.number: record for task in tasks if (record := finished_record(task, out))}
        progress = Progress(total_tasks=len(tasks), total_bytes=sum(task.size for task in tasks))
        for number, record in records.items():
            progress = _further(progress, tasks[number], record)

        def report() -> None:
            if on_progress is not None:
                on_progress(progress)

        def keep(record: Record) -> None:
            nonlocal progress
            # A task is done again where a document changes sides.
            if record.task not in records:
                progress = _further(progress, tasks[record.task], record)
            records[record.task] = record
            report()

        def run(pending: Sequence[Task], held_out_below: int) -> None:
            if pending:
                _unfinish(out)
            job = functools.partial(
                run_task, out=out, tokenizer=tokenizer, held_out_below=held_out_below
            )
            run_all(job, pending, workers=workers, on_result=keep)

        report()
        run([task for task in tasks if task.number not in records], wanted)
        _write_skipped(out, source, records)
        held_out_below = _held_out_below(records.values(), wanted)
        run(_misplaced(tasks, records, held_out_below, wanted), held_out_below)
        return _finish(out, records, settings)


def text_to_measure(folder: Path, *, is_for_tests: bool) -> Path:
    """The shards of a prepared folder that no run has seen: its validation side, or it is a side.

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


def sides_of(folder: Path) -> list[str]:
    """The sides that a prepared folder must have, as far as its records tell; none for others."""
    if not (folder / PREPARATION).is_file():
        return []
    sides = {TRAIN}
    for path in (folder / RECORDS).glob("*.json"):
        try:
            sides.update(json.loads(path.read_bytes())["documents"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path} cannot be read: {error}; remove it and prepare the data again"
            ) from error
    return [side for side in (TRAIN, VALIDATION) if side in sides]


def _held_out_below(records: Collection[Record], wanted: int) -> int:
    """Where validation ends among the keys, so that neither side is empty if that can be.

    A text that is more than half of all is no text to hold out: little were left to train on.
    """
    if not wanted:
        return 0
    smallest_key = min(record.smallest_key for record in records)
    largest_key = max(record.largest_key for record in records)
    if smallest_key >= wanted:
        same = [record for record in records if record.smallest_key == smallest_key]
        total = sum(sum(record.tokens.values()) for record in records)
        if 2 * sum(record.smallest_tokens for record in same) > total:
            return wanted
    return min(max(wanted, smallest_key + 1), largest_key)


def _misplaced(
    tasks: Sequence[Task], records: dict[int, Record], held_out_below: int, wanted: int
) -> list[Task]:
    """Tasks with the one document that changes sides where a side would be empty."""

    def moves(record: Record) -> bool:
        if held_out_below > wanted:
            return record.smallest_key < held_out_below
        return held_out_below <= record.largest_key < wanted

    return [
        task
        for task in tasks
        if moves(records[task.number]) and records[task.number].held_out_below != held_out_below
    ]


def _unfinish(out: Path) -> None:
    with writing(out):
        for side in (TRAIN, VALIDATION):
            (out / side / INDEX).unlink(missing_ok=True)


def _write_skipped(out: Path, source: str, records: dict[int, Record]) -> None:
    lines = [
        json.dumps({"name": name, "reason": reason}) + "\n"
        for number in sorted(records)
        for name, reason in records[number].skipped
    ]
    with writing(out):
        write_whole(out / SKIPPED, "".join(lines))
    if not any(record.documents for record in records.values()):
        raise UsageError(
            f"{source} holds no documents: all {len(lines)} were skipped; {out / SKIPPED} says why"
        )


def _finish(out: Path, records: dict[int, Record], settings: dict[str, Any]) -> Prepared:
    """Write the indices, that of training last: it says that all is there."""
    reasons = Counter(reason for record in records.values() for _, reason in record.skipped)
    details = {**settings, "skipped": dict(sorted(reasons.items()))}
    documents, tokens = Counter(), Counter()
    for record in records.values():
        documents.update(record.documents)
        tokens.update(record.tokens)
    with writing(out):
        for side in (VALIDATION, TRAIN):
            if documents[side]:
                write_index(out / side, details=details)
            elif (out / side).exists():
                (out / side).rmdir()
    return Prepared(
        folder=out,
        num_tokens=tokens[TRAIN],
        num_documents=documents[TRAIN],
        validation_tokens=tokens[VALIDATION],
        validation_documents=documents[VALIDATION],
        skipped=reasons.total(),
        reasons=dict(sorted(reasons.items())),
    )


def _further(progress: Progress, task: Task, record: Record) -> Progress:
    """One task on: summed anew at each, tens of thousands of tasks would take an hour."""
    return dataclasses.replace(
        progress,
        done_tasks=progress.done_tasks + 1,
        done_bytes=progress.done_bytes + task.size,
        num_tokens=progress.num_tokens + sum(record.tokens.values()),
        num_documents=progress.num_documents + sum(record.documents.values()),
        skipped=progress.skipped + len(record.skipped),
    )


def _check_apart(source: str, out: Path) -> None:
    folder = Path(source.removeprefix(TOKENS))
    if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{out} lies inside the source {folder}, which would then hold its own shards; "
            "give a folder elsewhere"
        )


def _claim(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write down what is prepared here, or compare it to what was.

    The settings with the source as it was spelled first: finished tasks know it so.
    """
    path = out / PREPARATION
    with writing(out):
        if not path.exists():
            if any((out / name).exists() for name in (TRAIN, VALIDATION, RECORDS)):
                raise UsageError(
                    f"{out} holds shards but no {PREPARATION}: it is not known what they are; "
                    "give another folder"
                )
            write_whole(path, json.dumps(settings, indent=2) + "\n")
        (out / RECORDS).mkdir(exist_ok=True)
        text = path.read_text()
    try:
        there = dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; give another folder") from error
    spelled = str(there.get("source"))
    if _place(spelled) == _place(settings["source"]):
        settings = {**settings, "source": spelled}
    differing = [
        f"{name} was {there.get(name)!r} and is {value!r}"
        for name, value in settings.items()
        if there.get(name) != value
    ]
    if differing:
        raise UsageError(
            f"{out} holds another preparation: {'; '.join(differing)}; "
            "give another folder, or remove this one"
        )
    return settings


def _place(source: str) -> tuple[str, str | Path]:
    """What a source names, with however many slashes and dots its path is spelled."""
    if source == EMBEDDED or source.startswith(HUB):
        return "", source
    prefix = TOKENS if source.startswith(TOKENS) else ""
    return prefix, Path(source.removeprefix(prefix))


@contextlib.contextmanager
def _unclaimed_by_bad_input(out: Path) -> Iterator[None]:
    """Remove a preparation that was begun within and refused, so that a corrected one may begin.

    One that was there before stays, with what is finished of it.
    """
    names = (PREPARATION, FILE, RECORDS, TRAIN, VALIDATION)
    is_new = not any((out / name).exists() for name in names)
    try:
        yield
    except UsageError:
        if is_new:
            for path in (out / name for name in names):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep other processes out of the folder, which is made."""
    with contextlib.ExitStack() as stack:
        with writing(out):
            make_folder(out)
            stack.enter_context(locked(out))
        yield
