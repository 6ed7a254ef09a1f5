"""Parts of a study: the records of what one machine made of it, packed, and their merge.

Weights stay behind. What is compared was made within a part; parts are combined afterwards.
"""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssmax._files import check_folder, make_folder, whole_file, write_whole
from ssmax.errors import MachineError, UsageError
from ssmax_lab.analysis.findings import read_study_file, unpacked
from ssmax_lab.data.qa import question_sources
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
)
from ssmax_lab.train.config import MAY_CHANGE, TrainConfig, flat

PACKED = (
    STUDY,
    f"{DONE}/*.json",
    f"{RUNS}/*/{RUN_CONFIG}",
    f"{RUNS}/*/{METRICS}",
    *(f"{RESULTS}/*/{name}" for name in RECORD_FILES),
)
"""All that a report is drawn from."""
_FOLDERS = re.compile(r"""(?<=[\s"'=:+])/(?:[^\s"+]*/)?""")
"""The folders that a full path leads through, in a text of JSON."""
_HOW = set(MAY_CHANGE) - {"run.steps"}
"""Settings that change how a run is computed; how far it goes decides its numbers."""
_WHERE = {"source", "seeds", "seconds", "measured_on", "workers_per_core", "trains_alone"}
"""Settings of a study that decide no number; the last stands in older records alone."""


def check_archive(path: Path) -> None:
    """Refuse a name that would not be found again as an archive."""
    if not path.name.endswith(ARCHIVE):
        raise UsageError(f"the records go into a file NAME{ARCHIVE}, got {path}")


def pack(folder: Path, archive: Path) -> None:
    """Write all that a report is drawn from as one file, without the paths of the machine.

    All or nothing: whoever copies the file meanwhile has that of before.
    """
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(archive) as file, tarfile.open(fileobj=file, mode="w:xz") as packed:
            for path in (path for pattern in PACKED for path in sorted(folder.glob(pattern))):
                text = path.read_text()
                is_of_numbers = path.suffix == ".jsonl"
                content = (_short(text) if is_of_numbers else _FOLDERS.sub("", text)).encode()
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size = len(content)
                packed.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise MachineError(f"the records cannot be written to {archive}: {error}") from error


def _short(text: str) -> str:
    """Round numbers to four digits: means are right to what tables and verdicts show of them."""
    whole = text[: text.rfind("\n") + 1].splitlines()
    lines = [json.loads(line, parse_float=lambda digits: float(f"{float(digits):.4g}"))
             for line in whole]  # fmt: skip
    # Of what rules learn, a report reads the end alone.
    learned = [line for line in lines if line.get("kind") == "scale"]
    kept = [line for line in lines if line.get("kind") != "scale"] + learned[-1:]
    return "".join(json.dumps(line) + "\n" for line in kept)


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
    parts = {path.name: path for path in (folder / PARTS).glob(f"*{ARCHIVE}")}
    for archive in archives:
        check_archive(archive)
        with unpacked(archive) as part:
            found = read_study_file(part)
        if values is not None:
            check_same_study(values, found, archive, advice="merge it into another folder")
            found["commands"] = list(dict.fromkeys([*values["commands"], *found["commands"]]))
            found["texts"] |= values["texts"]
        values = found
        if lost := _done(parts.get(archive.name)) - _done(archive):
            raise UsageError(
                f"{archive} lacks {', '.join(sorted(lost)[:3])}, which the part of its name has; "
                "parts of several machines need different names"
            )
        parts[archive.name] = archive
    if values is None:
        return []
    make_folder(folder / PARTS)
    for name, archive in parts.items():
        there = folder / PARTS / name
        if not (there.exists() and there.samefile(archive)):
            with whole_file(there) as copy, archive.open("rb") as original:
                shutil.copyfileobj(original, copy)
    write_whole(folder / STUDY, json.dumps(values, indent=2) + "\n")
    return [name.removesuffix(ARCHIVE) for name in sorted(parts)]


def _done(archive: Path | None) -> set[str]:
    """Name the jobs that a part has done; none where it was cut off."""
    found = set()
    with suppress(UsageError):
        if archive is not None:
            with unpacked(archive) as part:
                found = {path.stem for path in (part / DONE).glob("*.json")}
    return found


def check_same_study(
    there: Mapping[str, Any], found: Mapping[str, Any], where: Path, *, advice: str
) -> None:
    """Refuse to mix two studies, whose numbers cannot be compared; `where` is the other one."""
    if _decisive(there["study"]) != _decisive(found["study"]):
        raise UsageError(
            f"{where} holds another study, {there['study']['preset']!r} with other settings; "
            f"{advice}"
        )
    for name in there["texts"].keys() & found["texts"].keys():
        if there["texts"][name] != found["texts"][name]:
            raise UsageError(f"{where} was made with other tokens (--{name}); {advice}")


def _decisive(study: Mapping[str, Any]) -> dict[str, Any]:
    """Select what decides numbers: not how many seeds there are, nor how they are computed.

    Nor where texts and questions lie: texts are known by their fingerprints, questions by name.
    """
    plain = json.loads(json.dumps(study))
    known = {key: value for key, value in plain.items() if key not in _WHERE}
    # A setting that there no longer is was never changed by what there is.
    deciding = flat(TrainConfig().to_dict()).keys() - _HOW
    settings = flat(known["pretraining"]).items()
    known["pretraining"] = {key: value for key, value in settings if key in deciding}
    known["questions"] = [Path(source).name for source in question_sources(known["questions"])]
    return known
