"""Prepare text and check tokens, from the command line."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmax.errors import UsageError
from ssmax_lab.cli.options import TOKENIZERS
from ssmax_lab.tiny import is_shipped

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
        Path,
        typer.Argument(
            metavar="OUT", help="Folder for the tokens, which other commands take as --data."
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help=f"{TOKENIZERS}.")] = "gpt2",
    workers: Annotated[int | None, typer.Option(help="Threads; by default one per core.")] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of documents kept for validation.")
    ] = 0.005,
    text_field: Annotated[
        str, typer.Option(help="Field of .jsonl and .parquet that holds the text.")
    ] = "text",
) -> None:
    """Turn text into shards of tokens. If interrupted, the same command resumes."""
    from ssmax_lab.data import preparation
    from ssmax_lab.data.shards import TRAIN, VALIDATION

    try:
        sides = preparation.prepare(
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
            f"ssmax-lab: stopped; what is finished stays in {out}, and the same command resumes",
            file=sys.stderr,
        )
        raise
    for shards in sides.values():
        print(f"{shards.folder}: {shards.num_tokens:,} tokens, {shards.num_documents:,} documents")
    if validation_fraction and VALIDATION not in sides:
        print("no text was held out; more texts or a larger --validation-fraction change that")
    skipped = sides[TRAIN].details["skipped"]
    for reason, count in skipped.items():
        print(f"skipped {count:,}: {reason}")
    if skipped:
        print(f"each by name in {out / preparation.RECORDS}")


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="DATA", help="Folder that ssmax-lab data prepare wrote.")
    ],
) -> None:
    """Compare every shard with its checksum."""
    from ssmax_lab.data.shards import verify_prepared

    for shards in verify_prepared(folder):
        print(
            f"{shards.folder}: {shards.num_tokens:,} tokens, {shards.num_documents:,} documents, "
            "checksums match"
        )


def text_of_shipped(run: Path) -> Path | None:
    """Find the text of a run that comes with the package; others have their own, and get None."""
    from ssmax_lab.train.run import read_run_config

    return default_data(read_run_config(run).run.recipe) if is_shipped(run) else None


def default_data(recipe: str) -> Path:
    """Find the tokens that a recipe takes when it is given none; prepare them where missing."""
    from ssmax_lab.data.shards import INDEX, TRAIN
    from ssmax_lab.train.recipes import DEFAULT_TEXT

    source, tokenizer = DEFAULT_TEXT[recipe]
    folder = Path("data") / f"{source.rsplit('/', 1)[-1].lower()}-{tokenizer}"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not (folder / TRAIN / INDEX).is_file():
        raise UsageError(
            f"{folder} is not prepared yet; before several ranks start, run: "
            f"ssmax-lab data prepare {source} {folder} --tokenizer {tokenizer}"
        )
    return _prepared(source, folder, tokenizer=tokenizer)


def text_in_tokens(source: str | None, tokenizer: str) -> Path:
    """Find a text, by default the addresses, in the tokens of a tokenizer; prepare it once."""
    import hashlib

    from ssmax_lab.data.haystack import ADDRESSES
    from ssmax_lab.data.tokenizer import load_tokenizer

    path = ADDRESSES if source is None else Path(source)
    if not path.exists():
        raise UsageError(f"there is no text {source!r}; give a file or a folder of texts")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    # What has changed is prepared again.
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    known = hashlib.sha256(repr(stamps).encode()).hexdigest()[:8]
    vocabulary = load_tokenizer(tokenizer).vocabulary.hash[:12]
    folder = Path("data") / f"{path.name.partition('.')[0]}-{known}-{vocabulary}"
    return _prepared(str(path), folder, tokenizer=tokenizer, validation_fraction=0.0)


def default_text(tokenizer: str) -> Path:
    """Find the embedded text in the tokens of a tokenizer, to measure with; prepare it once."""
    from ssmax_lab.data.tokenizer import load_tokenizer

    folder = Path("data") / f"embedded-{load_tokenizer(tokenizer).vocabulary.hash[:12]}"
    return _prepared("embedded", folder, tokenizer=tokenizer, validation_fraction=MEASURED)


def _prepared(source: str, folder: Path, **options: Any) -> Path:
    from ssmax_lab.data.preparation import prepare
    from ssmax_lab.data.shards import INDEX, TRAIN

    if not (folder / TRAIN / INDEX).is_file():
        logger.info(f"preparing {source!r} in {folder}, once")
        prepare(source, folder, **options)
    return folder
