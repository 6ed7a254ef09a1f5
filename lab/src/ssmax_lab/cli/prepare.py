"""Preparation as a person sees it."""

import os
import sys
from pathlib import Path

from ssmax._progress import ProgressLine
from ssmax.errors import UsageError
from ssmax_lab.data.preparation import Prepared, Progress, prepare
from ssmax_lab.data.shards import INDEX
from ssmax_lab.data.tasks import TRAIN
from ssmax_lab.tiny import is_shipped
from ssmax_lab.train import read_run_config
from ssmax_lab.train.recipes import DEFAULT_TEXT

MEASURED = 0.1
"""The share of the embedded text that models are measured with."""


def prepare_shown(
    source: str,
    out: Path,
    *,
    tokenizer: str,
    workers: int | None = None,
    validation_fraction: float = 0.005,
    text_field: str = "text",
) -> Prepared:
    """Prepare with a line that tells how far it is, and what came of it."""
    line = ProgressLine()
    try:
        done = prepare(
            source,
            out,
            tokenizer=tokenizer,
            workers=workers,
            validation_fraction=validation_fraction,
            text_field=text_field,
            on_progress=lambda progress: line.show(_words(progress)),
        )
    except KeyboardInterrupt:
        line.close()
        # Said here: typer makes an exit code of it and is silent.
        print(
            f"ssmax: stopped; what is finished stays in {out}, and the same command goes on "
            "from there",
            file=sys.stderr,
        )
        raise
    line.close()
    print(
        f"{out}: {done.num_tokens:,} tokens of {done.num_documents:,} documents to train on, "
        f"{done.validation_tokens:,} of {done.validation_documents:,} for validation"
    )
    if validation_fraction and not done.validation_documents:
        print("no text was held out: the one that would be is more than half of all")
    for reason, count in done.reasons.items():
        print(f"skipped {count:,}: {reason}")
    if done.skipped:
        print(f"each by name in {out / 'skipped.jsonl'}")
    return done


def text_of_shipped(run: Path, *, is_shown: bool = True) -> Path | None:
    """The text of a run that comes with the package, prepared where missing; others have theirs."""
    if not is_shipped(run):
        return None
    return default_data(read_run_config(run).run.recipe, is_shown=is_shown)


def default_data(recipe: str, *, is_shown: bool = True) -> Path:
    """The tokens that a recipe takes when it is given none, prepared where they are missing."""
    source, tokenizer = DEFAULT_TEXT[recipe]
    name = source.rsplit("/", 1)[-1].lower()
    folder = Path("data") / f"{name}-{tokenizer}"
    if (folder / TRAIN / INDEX).is_file():
        return folder
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"{folder} is not prepared yet; before several ranks start, run: "
            f"ssmax-lab data prepare {source} {folder} --tokenizer {tokenizer}"
        )
    if is_shown:
        print(f"no --data given: preparing {source!r} in {folder}, once")
        prepare_shown(source, folder, tokenizer=tokenizer)
    else:
        prepare(source, folder, tokenizer=tokenizer)
    return folder


def default_text(tokenizer: str, *, is_shown: bool) -> Path:
    """The embedded text in the tokens of a tokenizer, to measure with; prepared where missing."""
    from ssmax_lab.data.tokenizer import load_tokenizer

    folder = Path("data") / f"embedded-{load_tokenizer(tokenizer).vocabulary.hash[:12]}"
    if not (folder / TRAIN / INDEX).is_file():
        if is_shown:
            print(f"no --data given: preparing the embedded text in {folder}, once")
        prepare("embedded", folder, tokenizer=tokenizer, validation_fraction=MEASURED)
    return folder


def _words(progress: Progress) -> str:
    share = progress.done_bytes / max(progress.total_bytes, 1)
    return (
        f"{progress.done_tasks:,}/{progress.total_tasks:,} parts ({share:.0%} of the bytes)  "
        f"{progress.num_tokens:,} tokens  {progress.num_documents:,} documents  "
        f"{progress.skipped:,} skipped"
    )
