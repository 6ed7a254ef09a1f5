"""The shape of every file that crosses a wall. Standard library only.

A record is one line that can defend itself: it carries where it came from.
"""

import csv
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a number comes from."""

    commit: str
    """Commit of the code, "+" behind it where files had changed since; "unknown" outside git."""
    config_hash: str
    """First 12 hex digits of the configuration's SHA-256."""
    versions: dict[str, str]
    """Python and the packages that matter, by name."""
    device: str
    """What it ran on, in words."""
    seed: int
    """The seed of everything random in it."""
    date: str
    """Day in UTC, ISO 8601."""

    @classmethod
    def here(cls, *, config: Mapping[str, Any], device: str, seed: int) -> "Provenance":
        """The provenance of a number made now, by this checkout, on this machine."""
        return cls(
            commit=_commit(),
            config_hash=config_hash(config),
            versions={"python": platform.python_version(), **_versions("torch", "triton")},
            device=device,
            seed=seed,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRow:
    """One timing of one competitor: a line of benchmarks/results.csv."""

    benchmark: str
    competitor: str
    shape: str
    mode: str
    """forward, forward+backward or decode."""
    milliseconds: float
    """Median."""
    ratio: float
    """Times the yardstick of the same run."""
    peak_mib: float
    """Largest memory allocated; 0 where it was not measured."""
    memory_ratio: float
    """Peak memory times the yardstick's; 0 where it was not measured."""
    error: float
    """Largest deviation from the float64 oracle, relative to its largest value; inf where wrong."""
    provenance: Provenance


def config_hash(config: Mapping[str, Any]) -> str:
    """A short name for a configuration that any change of it changes."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def append_csv(path: Path, rows: Iterable[BenchmarkRow]) -> None:
    """Add rows to a table, provenance spread over its columns; the header is written once."""
    flat = [_flat(row) for row in rows]
    if not flat:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            header = next(csv.reader(file), [])
        if header != list(flat[0]):
            raise ValueError(
                f"{path} has other columns than the new rows: {header} and {list(flat[0])}; "
                "move the old table away"
            )
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(flat[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(flat)


def _flat(row: BenchmarkRow) -> dict[str, Any]:
    flat = dataclasses.asdict(row)
    provenance = flat.pop("provenance")
    versions = provenance.pop("versions")
    return {**flat, **provenance, **versions}


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def _commit() -> str:
    """The commit of this checkout; SSMAX_COMMIT says it for a copy without git."""
    if given := os.environ.get("SSMAX_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
