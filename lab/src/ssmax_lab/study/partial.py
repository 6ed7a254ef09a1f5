"""Partial results: the records of a study's part, made on one machine, and their merge.

Weights stay behind. What is compared was made within a part; parts are combined afterwards.
"""

import dataclasses
import io
import json
import math
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ssmax._files import check_folder, make_folder, whole_file, write_whole
from ssmax.errors import MachineError, UsageError
from ssmax_lab.analysis.findings import read_study_file, unpacked
from ssmax_lab.data.token_files import TOKENS
from ssmax_lab.records import (
    ARCHIVE,
    DONE,
    METRICS,
    PARTS,
    RECORD_FILES,
    RESULTS,
    RUN_CONFIG,
    RUNS,
    STUDY,
    NeedleScore,
    PositionLoss,
    RetrievalGrid,
    Sharpness,
    config_hash,
    read_jsonl,
    read_metrics,
    to_jsonl,
)
from ssmax_lab.study.presets import is_local
from ssmax_lab.train.config import MAY_CHANGE, flat
from ssmax_lab.train.question_sources import is_path, question_sources

QUESTIONS = "questions"
"""Among the texts of a study, its files of questions."""
_HOW = set(MAY_CHANGE) - {"run.steps"}
"""Settings that change how a run is computed; how far it goes decides its numbers."""
_WHERE = {"source", "seeds", "seconds", "measured_on", "workers_per_core", "trains_alone"}
"""Settings of a study that decide no number."""


def check_archive(path: Path) -> None:
    """Refuse a name that would not be found again as an archive."""
    if not path.name.endswith(ARCHIVE):
        raise UsageError(f"the records go into a file NAME{ARCHIVE}, got {path}")


def check_part(name: str) -> None:
    """Refuse a name that is no file's."""
    if not re.fullmatch(r"[\w-]+", name, re.ASCII):
        raise UsageError(f"a part is named in letters, digits, - and _, got {name!r}")


def pack(folder: Path, archive: Path) -> None:
    """Write all that a report is drawn from as one file, without the paths of the machine.

    Numbers are rounded to what tables and verdicts can tell apart. All or nothing: whoever copies
    the file meanwhile has that of before.
    """
    homes = _homes(folder, archive)
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(archive) as file, tarfile.open(fileobj=file, mode="w:xz") as packed:
            for pattern, read in (
                (STUDY, Path.read_text),
                (f"{DONE}/*.json", Path.read_text),
                (f"{RUNS}/*/{RUN_CONFIG}", Path.read_text),
                (f"{RUNS}/*/{METRICS}", _metrics),
                *((f"{RESULTS}/*/{name}", _records) for name in RECORD_FILES),
            ):
                for path in sorted(folder.glob(pattern)):
                    text = read(path)
                    for home in homes:
                        text = text.replace(home, "")
                    content = text.encode()
                    entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                    entry.size = len(content)
                    packed.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise MachineError(f"the records cannot be written to {archive}: {error}") from error


def _metrics(path: Path) -> str:
    """Keep what a report reads of a run: every loss, and what its rule had learned at the end."""
    lines = read_metrics(path)
    steps = [line for line in lines if line["kind"] == "step"]
    losses = _rounded([line["loss"] for line in steps], 4)
    kept = [
        {"kind": "step", "step": line["step"], "loss": loss}
        for line, loss in zip(steps, losses, strict=True)
    ]
    kept += [line for line in lines if line["kind"] not in ("step", "scale")]
    kept += [line for line in lines if line["kind"] == "scale"][-1:]
    return "".join(json.dumps(line) + "\n" for line in kept)


def _records(path: Path) -> str:
    return to_jsonl(map(_short, read_jsonl(path, RECORD_FILES[path.name].kind)))


def _short(record: Any) -> Any:
    """Round what is long; tables and verdicts of all studies in results/ came out the same.

    Losses of single documents stay behind: no verdict is over documents.
    """
    match record:
        case PositionLoss():
            # Means are over ranges that are the longer the later they begin.
            positions = np.arange(1, len(record.mean) + 1)
            decimals = np.floor(6.4 - np.log10(positions)).astype(int)
            return dataclasses.replace(record, mean=_rounded(record.mean, decimals), binned=[])
        case Sharpness():
            return dataclasses.replace(
                record,
                entropy=[_rounded(heads, 6) for heads in record.entropy],
                largest=[_rounded(heads, 6) for heads in record.largest],
            )
        case RetrievalGrid():
            return dataclasses.replace(record, weights=np.round(record.weights, 4).tolist())
        case NeedleScore():
            # Only heads near the top one are looked at.
            top = max(map(max, record.number_scores))
            decimals = 5 - math.ceil(math.log10(top)) if top > 0 else 5
            scores = np.round(record.number_scores, decimals).tolist()
            return dataclasses.replace(record, number_scores=scores)
    return record


def _rounded(values: ArrayLike, decimals: int | np.ndarray) -> list[Any]:
    """Round along the first axis such that the sum over any range is right to the last digit."""
    array, most = np.asarray(values, float), int(np.max(decimals))
    if not np.isfinite(array).all():
        return np.round(array, most).tolist()
    unit = 10.0 ** np.asarray(decimals)
    sums = np.rint(np.cumsum(array, axis=0) * unit) / unit
    # The differences end in noise of float64; adding 0 makes -0.0 positive.
    return (np.round(np.diff(sums, axis=0, prepend=0 * sums[:1]), most) + 0.0).tolist()


def _homes(folder: Path, archive: Path) -> list[str]:
    """List where the study and its texts lie, as paths begin that are written into records."""
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


def merge(archives: Sequence[Path], folder: Path) -> list[str]:
    """Put the parts of one study into its folder, beside those that are there; all their names.

    Nothing is put there where one of them does not fit.
    """
    check_folder(folder)
    if (folder / RUNS).is_dir():
        raise UsageError(
            f"{folder} holds a study that was made there, which would be hidden behind its parts; "
            "merge into another folder, and bring that study in by its --records"
        )
    values = read_study_file(folder) if (folder / STUDY).exists() else None
    parts = {path.name.removesuffix(ARCHIVE): path for path in (folder / PARTS).glob(f"*{ARCHIVE}")}
    for archive in archives:
        check_archive(archive)
        with unpacked(archive) as part:
            found = read_study_file(part)
            # A study that was made on one machine is its only part.
            name = found.pop("part") or archive.name.removesuffix(ARCHIVE)
            check_part(name)
            identity(found["study"])
        values = found if values is None else _joined(values, found, archive)
        if name in parts:
            _check_goes_on(parts[name], archive, name)
        parts[name] = archive
    if values is None:
        return []
    make_folder(folder / PARTS)
    for name, archive in parts.items():
        there = folder / PARTS / f"{name}{ARCHIVE}"
        if not (there.exists() and there.samefile(archive)):
            with whole_file(there) as copy, archive.open("rb") as original:
                shutil.copyfileobj(original, copy)
    write_whole(folder / STUDY, json.dumps(values, indent=2) + "\n")
    return sorted(parts)


def _check_goes_on(old: Path, new: Path, name: str) -> None:
    """Refuse a part that is to take the place of another of its name, and lacks some of it."""
    try:
        before = _done(old)
    except UsageError:
        # A copy that was cut off: whatever is whole takes its place.
        return
    after = _done(new)
    lost = sorted(job for job, content in before.items() if after.get(job) != content)
    if lost:
        raise UsageError(
            f"{new} and {old} are both called part {name!r}, and {new} lacks or has others of "
            f"{', '.join(lost[:3])}{' and more' * (len(lost) > 3)}; name the parts of several "
            "machines differently (--part)"
        )


def _done(archive: Path) -> dict[str, list[bytes]]:
    """Read what every job that is done left: how long it took, and what it measured."""
    with unpacked(archive) as part:
        found = {path.stem: [path.read_bytes()] for path in (part / DONE).glob("*.json")}
        for name, one in RECORD_FILES.items():
            for path in (part / RESULTS).glob(f"*/{name}"):
                # A job that is not done may have begun its records.
                found.get(f"{one.job}-{path.parent.name}", []).append(path.read_bytes())
        return found


def _joined(there: dict[str, Any], part: dict[str, Any], archive: Path) -> dict[str, Any]:
    if identity(there["study"]) != identity(part["study"]):
        raise UsageError(
            f"{archive} is a part of another study, {part['study']['preset']!r} with other "
            "settings; merge it into another folder"
        )
    for name, text in there["texts"].items():
        if part["texts"].get(name, text) != text:
            raise UsageError(
                f"{archive} was made with other {'questions' if name == QUESTIONS else 'tokens'} "
                f"than the parts that are there, {name}; merge it into another folder"
            )
    jobs = {json.dumps(job): job for job in [*there["jobs"], *part["jobs"]]}
    return {
        **there,
        "jobs": list(jobs.values()),
        "commands": list(dict.fromkeys([*there["commands"], *part["commands"]])),
        "texts": {**part["texts"], **there["texts"]},
    }


def identity(study: Mapping[str, Any]) -> str:
    """Hash what decides numbers; how many seeds there are and how long it takes does not.

    Nor does what a run may change when it goes on, or where its text and questions come from:
    those are known by their fingerprints.
    """
    decides = {
        key: value for key, value in json.loads(json.dumps(study)).items() if key not in _WHERE
    }
    for name in ("pretraining", "finetuning"):
        settings = flat(decides[name]).items()
        decides[name] = {key: value for key, value in settings if key not in _HOW}
    decides["questions"] = [
        "a file" if is_path(source) else source for source in question_sources(decides["questions"])
    ]
    return config_hash(decides)
