"""Prepare text and check tokens, from the command line."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmax._progress import log_progress
from ssmax.errors import UsageError
from ssmax_lab.cli.options import TOKENIZERS
from ssmax_lab.tiny import is_shipped

if TYPE_CHECKING:
    from ssmax_lab.data.preparation import Prepared, Progress

logger = logging.getLogger(__name__)
MEASURED = 0.1
"""The share of the embedded text that models are measured with."""


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="embedded, a file or folder of .txt/.jsonl/.parquet, hf:NAME, or tokens:PATH.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the tokens, for every --data.")
    ],
    tokenizer: Annotated[str, typer.Option(help=f"{TOKENIZERS}.")] = "gpt2",
    workers: Annotated[int | None, typer.Option(help="Processes; by default one a core.")] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the documents that is kept for validation.")
    ] = 0.005,
    text_field: Annotated[str, typer.Option(help="Where .jsonl and .parquet keep it.")] = "text",
) -> None:
    """Turn text into shards of tokens. Stopped, the same command resumes."""
    try:
        done = _prepare(
            source,
            out,
            tokenizer=tokenizer,
            workers=workers,
            validation_fraction=validation_fraction,
            text_field=text_field,
        )
    except KeyboardInterrupt:
        # Said here: typer makes an exit code of it and is silent.
        print(
            f"ssmax-lab: stopped; what is finished stays in {out}, and the same command resumes "
            "from there",
            file=sys.stderr,
        )
        raise
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


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="DATA", help="Folder that ssmax-lab data prepare wrote.")
    ],
) -> None:
    """Compare every shard with its checksum."""
    from ssmax_lab.data.preparation import PREPARATION, sides_of
    from ssmax_lab.data.shards import ShardSet
    from ssmax_lab.data.tasks import TRAIN, VALIDATION

    sides = [side for side in (TRAIN, VALIDATION) if (folder / side).is_dir()]
    if missing := [str(folder / side) for side in sides_of(folder) if side not in sides]:
        raise UsageError(
            f"{' and '.join(missing)} should be there by the {PREPARATION} and the records beside "
            "it; bring it back, or run the same ssmax-lab data prepare again"
        )
    for side in [folder / side for side in sides] or [folder]:
        shards = ShardSet.open(side)
        shards.verify()
        print(f"{side}: {shards.num_tokens:,} tokens, {shards.num_documents:,} documents, whole")


def _prepare(source: str, out: Path, **options: Any) -> "Prepared":
    """Prepare with progress."""
    from ssmax_lab.data.preparation import prepare

    def show(at: "Progress") -> None:
        share = at.done_bytes / max(at.total_bytes, 1)
        details = f"{share:.0%} of the bytes  {at.num_tokens:,} tokens"
        log_progress(logger, "part", at.done_tasks, at.total_tasks, details)

    return prepare(source, out, on_progress=show, **options)


def text_of_shipped(run: Path) -> Path | None:
    """Find the text of a run that comes with the package; others have their own, and get None."""
    from ssmax_lab.train.run_config import read_run_config

    return default_data(read_run_config(run).run.recipe) if is_shipped(run) else None


def default_data(recipe: str) -> Path:
    """Find the tokens that a recipe takes when it is given none; prepare them where missing."""
    from ssmax_lab.data.shards import INDEX
    from ssmax_lab.data.tasks import TRAIN
    from ssmax_lab.train.recipes import DEFAULT_TEXT

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
    logger.info(f"no --data given: preparing {source!r} in {folder}, once")
    _prepare(source, folder, tokenizer=tokenizer)
    return folder


def default_text(tokenizer: str) -> Path:
    """Find the embedded text in the tokens of a tokenizer, to measure with; prepare it once."""
    from ssmax_lab.data.shards import INDEX
    from ssmax_lab.data.tasks import TRAIN
    from ssmax_lab.data.tokenizer import load_tokenizer

    folder = Path("data") / f"embedded-{load_tokenizer(tokenizer).vocabulary.hash[:12]}"
    if not (folder / TRAIN / INDEX).is_file():
        logger.info(f"no --data given: preparing the embedded text in {folder}, once")
        _prepare("embedded", folder, tokenizer=tokenizer, validation_fraction=MEASURED)
    return folder
