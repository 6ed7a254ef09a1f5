"""Preparation as a person sees it."""

import os
import sys
import time
from pathlib import Path

from ssmax.data.preparation import Prepared, Progress, prepare
from ssmax.data.shards import INDEX
from ssmax.train.recipes import DEFAULT_TEXT

SECONDS_BETWEEN_LINES = 5.0


def prepare_shown(source: str, out: Path, **options) -> Prepared:
    """Prepare with a line that tells how far it is, and what came of it."""
    show = _Line()
    done = prepare(source, out, on_progress=show, **options)
    show.end()
    print(
        f"{out}: {done.num_tokens:,} tokens of {done.num_documents:,} documents to train on, "
        f"{done.validation_tokens:,} of {done.validation_documents:,} for validation"
    )
    for reason, count in done.reasons.items():
        print(f"skipped {count:,}: {reason}")
    if done.skipped:
        print(f"each by name in {out / 'skipped.jsonl'}")
    return done


def default_data(recipe: str) -> Path:
    """The tokens that a recipe takes when it is given none, prepared where they are missing."""
    source, tokenizer = DEFAULT_TEXT[recipe]
    name = source.rsplit("/", 1)[-1].lower()
    folder = Path("data") / f"{name}-{tokenizer}"
    if (folder / "train" / INDEX).is_file():
        return folder
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"{folder} is not prepared yet; before several ranks start, run: "
            f"ssmax data prepare {source} {folder} --tokenizer {tokenizer}"
        )
    print(f"no --data given: preparing {source!r} in {folder}, once")
    prepare_shown(source, folder, tokenizer=tokenizer)
    return folder


class _Line:
    def __init__(self) -> None:
        self._is_live = sys.stdout.isatty()
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if not self._is_live and now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        share = progress.done_bytes / max(progress.total_bytes, 1)
        text = (
            f"{progress.done_tasks:,}/{progress.total_tasks:,} parts ({share:.0%} of the bytes)  "
            f"{progress.num_tokens:,} tokens  {progress.num_documents:,} documents  "
            f"{progress.skipped:,} skipped"
        )
        print(f"\r\x1b[K{text}" if self._is_live else text, end="" if self._is_live else "\n")
        sys.stdout.flush()

    def end(self) -> None:
        if self._is_live:
            print()
