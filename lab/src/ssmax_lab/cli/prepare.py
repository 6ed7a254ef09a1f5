"""ssmax-lab data prepare, and the text that a command takes where it is given none."""

import os
import sys
from pathlib import Path

from ssmax._progress import ProgressLine
from ssmax.errors import UsageError
from ssmax_lab.data.preparation import RECORDS, prepare
from ssmax_lab.data.shards import INDEX, TRAIN, VALIDATION
from ssmax_lab.tiny import is_shipped
from ssmax_lab.train import read_run_config
from ssmax_lab.train.recipes import DEFAULT_TEXT

MEASURED = 0.1
"""The share of the embedded text that models are measured with."""


def prepare_command(
    source: str,
    out: Path,
    *,
    tokenizer: str,
    workers: int | None = None,
    validation_fraction: float = 0.005,
    text_field: str = "text",
) -> None:
    """Prepare, show how far it is, and print what came of it."""
    line = ProgressLine()
    try:
        sides = prepare(
            source,
            out,
            tokenizer=tokenizer,
            workers=workers,
            validation_fraction=validation_fraction,
            text_field=text_field,
            on_progress=lambda done, total: line.show(f"part {done:,}/{total:,}"),
        )
    except KeyboardInterrupt:
        line.close()
        # Said here: typer makes an exit code of it and is silent.
        print(
            f"ssmax-lab: stopped; what is finished stays in {out}, and the same command resumes",
            file=sys.stderr,
        )
        raise
    line.close()
    for side, shards in sides.items():
        print(f"{out / side}: {shards.num_tokens:,} tokens, {shards.num_documents:,} documents")
    if validation_fraction and VALIDATION not in sides:
        print("no text was held out: the one that would be is more than half of all")
    skipped = sides[TRAIN].details["skipped"]
    for reason, count in skipped.items():
        print(f"skipped {count:,}: {reason}")
    if skipped:
        print(f"each by name in {out / RECORDS}")


def text_of_shipped(run: Path, *, is_shown: bool = True) -> Path | None:
    """Prepare the text of a run that comes with the package; other runs have their own."""
    if not is_shipped(run):
        return None
    return default_data(read_run_config(run).run.recipe, is_shown=is_shown)


def default_data(recipe: str, *, is_shown: bool = True) -> Path:
    """Prepare the tokens that a recipe takes when it is given none, where they are missing."""
    source, tokenizer = DEFAULT_TEXT[recipe]
    folder = Path("data") / f"{source.rsplit('/', 1)[-1].lower()}-{tokenizer}"
    if (folder / TRAIN / INDEX).is_file():
        return folder
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"{folder} is not prepared yet; before several ranks start, run: "
            f"ssmax-lab data prepare {source} {folder} --tokenizer {tokenizer}"
        )
    if is_shown:
        print(f"no --data given: preparing {source!r} in {folder}, once")
        prepare_command(source, folder, tokenizer=tokenizer)
    else:
        prepare(source, folder, tokenizer=tokenizer)
    return folder


def default_text(tokenizer: str, *, is_shown: bool) -> Path:
    """Prepare the embedded text in the tokens of a tokenizer, to measure with, where missing."""
    from ssmax_lab.data.tokenizer import load_tokenizer

    folder = Path("data") / f"embedded-{load_tokenizer(tokenizer).vocabulary.hash[:12]}"
    if not (folder / TRAIN / INDEX).is_file():
        if is_shown:
            print(f"no --data given: preparing the embedded text in {folder}, once")
        prepare("embedded", folder, tokenizer=tokenizer, validation_fraction=MEASURED)
    return folder
