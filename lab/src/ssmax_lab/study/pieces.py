"""A study made in pieces: each on one machine that is lent for a while, its records brought back.

Weights stay behind. What is compared was made within a piece; pieces are combined afterwards.
"""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssmax._files import check_folder, make_folder, whole_file, write_whole
from ssmax.errors import MachineError, UsageError
from ssmax_lab.analysis.findings import no_study, read_study_file, unpacked
from ssmax_lab.data.token_files import TOKENS
from ssmax_lab.records import (
    ARCHIVE,
    DONE,
    MADE_BY,
    METRICS,
    PIECES,
    RESULTS,
    RUN_CONFIG,
    RUNS,
    STUDY,
    config_hash,
)
from ssmax_lab.study.text import is_local
from ssmax_lab.train.config import MAY_CHANGE, flat
from ssmax_lab.train.questions import is_path, question_sources

QUESTIONS = "questions"
"""Among the texts of a study, its files of questions."""
_HOW = set(MAY_CHANGE) - {"run.steps"}
"""Settings that change how a run is computed; how far it goes decides its numbers."""
RECORDS = (
    STUDY,
    f"{DONE}/*.json",
    f"{RUNS}/*/{RUN_CONFIG}",
    f"{RUNS}/*/{METRICS}",
    f"{RESULTS}/*/*.jsonl",
)
"""What of a study's folder is worth bringing back: all that a report is drawn from."""


def check_archive(path: Path) -> None:
    """Refuse a name that would not be found again as an archive."""
    if not path.name.endswith(ARCHIVE):
        raise UsageError(f"the records go into a file NAME{ARCHIVE}, got {path}")


def check_piece(name: str) -> None:
    """Refuse a name that is no file's."""
    if not re.fullmatch(r"[\w-]+", name, re.ASCII):
        raise UsageError(f"a piece is named in letters, digits, - and _, got {name!r}")


def pack(folder: Path, archive: Path) -> None:
    """The records of a study's folder as one file, without the paths of the machine.

    All or nothing: whoever copies the file meanwhile has that of before.
    """
    homes = _homes(folder, archive)
    hidden = archive.with_name(f".{archive.name}.writing")
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(hidden, "w:xz") as packed:
            for path in _records(folder):
                content = path.read_text()
                for home in homes:
                    content = content.replace(home, "")
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size = len(content.encode())
                packed.addfile(entry, io.BytesIO(content.encode()))
        hidden.replace(archive)
    except OSError as error:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
        raise MachineError(f"the records cannot be written to {archive}: {error}") from error


def gather(archives: Sequence[Path], folder: Path) -> list[str]:
    """Put the pieces of one study into its folder, beside those that are there; all their names.

    Nothing is put there where one of them does not fit.
    """
    check_folder(folder)
    if (folder / RUNS).is_dir():
        raise UsageError(
            f"{folder} holds a study that was made there, which would be hidden behind its pieces; "
            "gather into another folder, and bring that study in by its --records"
        )
    values = _read(folder) if (folder / STUDY).exists() else None
    pieces = {
        path.name.removesuffix(ARCHIVE): path for path in (folder / PIECES).glob(f"*{ARCHIVE}")
    }
    for archive in archives:
        check_archive(archive)
        with unpacked(archive) as piece:
            if not (piece / STUDY).is_file():
                raise UsageError(f"{archive} is no piece of a study: it holds no {STUDY}")
            found = _read(piece)
        # A study that was made on one machine is its only piece.
        name = found["piece"] or archive.name.removesuffix(ARCHIVE)
        try:
            check_piece(name)
        except UsageError as error:
            raise UsageError(f"{archive}: {error}") from None
        values = found if values is None else _joined(values, found, archive)
        if name in pieces:
            _check_goes_on(pieces[name], archive, name)
        pieces[name] = archive
    if values is None:
        return []
    make_folder(folder / PIECES)
    for name, archive in pieces.items():
        there = folder / PIECES / f"{name}{ARCHIVE}"
        if not (there.exists() and there.samefile(archive)):
            with whole_file(there) as copy, archive.open("rb") as original:
                shutil.copyfileobj(original, copy)
    values.pop("piece", None)
    write_whole(folder / STUDY, json.dumps(values, indent=2) + "\n")
    return sorted(pieces)


def _check_goes_on(old: Path, new: Path, name: str) -> None:
    """A piece takes the place of another of its name only where it has all that is in that one."""
    try:
        before = _done(old)
    except UsageError:
        # A copy that was cut off: whatever is whole takes its place.
        return
    after = _done(new)
    for what, jobs in (
        ("lacks", before.keys() - after.keys()),
        (
            "has others of",
            {job for job in before.keys() & after.keys() if before[job] != after[job]},
        ),
    ):
        if jobs:
            raise UsageError(
                f"{new} and {old} are both called piece {name!r}, and {new} {what} "
                f"{', '.join(sorted(jobs)[:3])}{' and more' if len(jobs) > 3 else ''}; name pieces "
                "of several machines differently (--piece)"
            )


def _done(archive: Path) -> dict[str, list[bytes]]:
    """The jobs that are done, and what each left: how long it took, and what it measured."""
    with unpacked(archive) as piece:
        done = (path for path in sorted((piece / DONE).glob("*.json")) if path.is_file())
        found = {path.stem: [path.read_bytes()] for path in done}
        for path in sorted((piece / RESULTS).glob("*/*.jsonl")):
            job = f"{MADE_BY.get(path.name)}-{path.parent.name}"
            if job in found:
                found[job].append(path.read_bytes())
        return found


def identity(study: Mapping[str, Any]) -> str:
    """What decides numbers; how many seeds there are and how long it takes does not.

    Nor does what a run may change when it goes on, or where its text and questions come from:
    those are known by their fingerprints.
    """
    decides = {
        key: value
        for key, value in json.loads(json.dumps(study)).items()
        if key
        not in ("source", "seeds", "seconds", "measured_on", "workers_per_core", "trains_alone")
    }
    for name in ("pretraining", "finetuning"):
        settings = flat(decides[name]).items()
        decides[name] = {key: value for key, value in settings if key not in _HOW}
    decides["questions"] = [
        "a file" if is_path(source) else source for source in question_sources(decides["questions"])
    ]
    return config_hash(decides)


def _records(folder: Path) -> Iterator[Path]:
    for pattern in RECORDS:
        yield from sorted(folder.glob(pattern))


def _homes(folder: Path, archive: Path) -> list[str]:
    """Where the study and its texts lie, as paths begin that are written into records."""
    values = read_study_file(folder)
    here = folder.resolve()
    parents = {Path(values[name]).parent for name in ("data", "test") if name in values}
    if (source := values["study"].get("source", "")) and is_local(source):
        parents.add(Path(source.removeprefix(TOKENS)).resolve().parent)
    # The commands name the folder and the archive.
    parents |= {here.parent, archive.resolve().parent}
    paths = [f"{home}/" for home in (here, *sorted(parents - {Path("/")}, key=str, reverse=True))]
    # In JSON a letter beyond ASCII is spelled by its number.
    return [spelled for path in paths for spelled in (path, json.dumps(path)[1:-1])]


def _read(folder: Path) -> dict[str, Any]:
    """With what a study that is no piece, or was made before there were any, does not say."""
    values = {"piece": "", "commands": [], "jobs": [], **read_study_file(folder)}
    try:
        # Both are done with it later, when other pieces are in place already.
        identity(values["study"])
        json.dumps(values, indent=2)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise no_study(folder / STUDY, error) from None
    return values


def _joined(there: dict[str, Any], piece: dict[str, Any], archive: Path) -> dict[str, Any]:
    if identity(there["study"]) != identity(piece["study"]):
        raise UsageError(
            f"{archive} is a piece of another study, {piece['study']['preset']!r} with other "
            "settings; gather it into another folder"
        )
    for name, text in there.get("texts", {}).items():
        if piece.get("texts", {}).get(name, text) != text:
            raise UsageError(
                f"{archive} was made with other {'questions' if name == QUESTIONS else 'tokens'} "
                f"than the pieces that are there, {name}; gather it into another folder"
            )
    jobs = {json.dumps(job): job for job in [*there["jobs"], *piece["jobs"]]}
    commands = dict.fromkeys([*there["commands"], *piece["commands"]])
    texts = {**piece.get("texts", {}), **there.get("texts", {})}
    return {
        **there,
        "piece": "",
        "jobs": list(jobs.values()),
        "commands": list(commands),
        "texts": texts,
    }
