"""The shape of every file, and its place in a study's folder. Standard library only.

A record can defend itself: it carries where it came from. In a .jsonl file a line with a provenance
holds for the records behind it, up to the next.
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
from typing import Any, NamedTuple, TypeVar

from ssmax.errors import UsageError

Record = TypeVar("Record")

PART_VARIABLE = "SSMAX_PART"
"""Names the part of a study to the processes that make its records."""
RUN_CONFIG, METRICS = "config.json", "metrics.jsonl"
"""What a run writes of itself: its settings with their provenance, and a line for every step."""


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
    part: str = ""
    """What was made side by side on one machine, of a study made on several."""
    model: str = ""
    """A hash of what was measured, where its name may come to be another's."""

    @classmethod
    def here(
        cls, *, config: Mapping[str, Any], device: str, seed: int, model: str = ""
    ) -> "Provenance":
        """The provenance of a number made now, by this checkout, on this machine."""
        return cls(
            commit=_commit(),
            config_hash=config_hash(config),
            versions={"python": platform.python_version(), **_versions("torch", "triton")},
            device=device,
            seed=seed,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            part=os.environ.get(PART_VARIABLE, ""),
            model=model,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRow:
    """One timing of one competitor: a line of benchmarks/results.csv."""

    benchmark: str
    competitor: str
    shape: str
    mode: str
    """What was timed: forward, forward+backward, decode, a step, or a whole measurement."""
    milliseconds: float
    """Median."""
    ratio: float
    """Times the yardstick of the same run; 1 where there is none."""
    peak_mib: float
    """Largest memory allocated; 0 where it was not measured."""
    memory_ratio: float
    """Peak memory times the yardstick's; 0 where it was not measured."""
    error: float
    """Largest relative deviation from what the benchmark checks against; 0 where it must be equal
    or nothing is checked."""
    provenance: Provenance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PositionLoss:
    """Loss at every position of long documents: figure 5."""

    run: str
    mean: list[float]
    """Position i is the token that follows i + 1 others."""
    count: int
    """Documents."""
    edges: list[int]
    """Of ranges of positions that double: 0, 64, 128, ... to the end."""
    binned: list[list[float]]
    """Every document's mean in every range."""
    provenance: Provenance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NeedleTrial:
    """One question about a number hidden in a text: figure 6."""

    run: str
    length: int
    """Tokens of the prompt."""
    depth: float
    """Where the number was, from 0, the start, to 1."""
    trial: int
    city: str
    number: str
    said: str
    is_whole: bool
    first_digit: bool
    digits_right: int
    provenance: Provenance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalGrid:
    """Needle retrieval accuracy by RoPE base and length, of a model taught it in short documents.

    Lists are by base, then by length.
    """

    run: str
    taught_length: int
    """Tokens of those documents; the first of `lengths`."""
    base_factors: list[float]
    """Times the training's RoPE base; the first is 1."""
    lengths: list[int]
    """Tokens of the prompt."""
    count: int
    """Prompts of a cell."""
    accuracy: list[list[float]]
    """Needle retrieval accuracy (exact match)."""
    weights: list[list[list[list[float]]]]
    """Attention from the end of the prompt to the number, by layer and head, too: the mean over a
    few prompts."""
    provenance: Provenance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NeedleScore:
    """Attention from the end of a prompt to the number hidden in it: figures 7 and 8."""

    run: str
    length: int
    depth: float
    trial: int
    number: str
    said: str
    is_whole: bool
    first_digit: bool
    number_scores: list[list[float]]
    """By layer and head."""
    provenance: Provenance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sharpness:
    """How sharp attention is where queries see n keys, by layer and head."""

    run: str
    num_keys: list[int]
    entropy: list[list[list[float]]]
    """Layer, head, n; in nats."""
    largest: list[list[list[float]]]
    """The largest weight, likewise."""
    count: int
    """Documents."""
    provenance: Provenance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One comparison of a claim: what was expected, what came out, and what that means."""

    claim: str
    """C1 to C8; the figure has the same number."""
    text: str
    """What the paper says, for one pair."""
    effect: float | None
    """The first minus the second, or what the text names; None where it was not measured."""
    unit: str
    low: float | None
    high: float | None
    """The 95 % interval of the effect over seeds; None of fewer than three."""
    basis: str
    """What was compared, in words; or why there is nothing."""
    p_holm: float | None
    """Of a primary comparison over seeds, adjusted for the study's others; None elsewhere."""
    verdict: str
    """A claim's primary comparison: supported, contradicted, no difference larger than X,
    inconclusive, too few seeds, model too small, or not measured. All others: secondary."""
    is_ours: bool
    """The paper does not have it."""
    provenance: Provenance

    def interval(self, decimals: int) -> str:
        """The effect and where it may lie, if that is known; "-" where it was not measured."""
        if self.effect is None:
            return "-"
        told = f"{self.effect:+.{decimals}f}"
        if self.low is None:
            return told
        return f"{told} [{self.low:+.{decimals}f}, {self.high:+.{decimals}f}]"

    @property
    def over(self) -> str:
        """What was compared, in words, and how surely."""
        return self.basis if self.p_holm is None else f"{self.basis}, p = {self.p_holm:.2g}"


def to_jsonl(records: Iterable[Any]) -> str:
    """Write records as the lines of a .jsonl file; numbers keep every digit."""
    lines, written = [], None
    for record in records:
        names = (field.name for field in dataclasses.fields(record))
        values = {name: getattr(record, name) for name in names}
        provenance = values.pop("provenance")
        if provenance != written:
            lines.append({"provenance": dataclasses.asdict(provenance)})
            written = provenance
        lines.append(values)
    return "".join(json.dumps(line) + "\n" for line in lines)


def read_jsonl(path: Path, kind: type[Record]) -> list[Record]:
    """Read the records of a file; a last line that was cut short is left out."""
    records: list[Record] = []
    provenance = None
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            values = json.loads(line)
            if values.keys() == {"provenance"}:
                provenance = Provenance(**values["provenance"])
            elif provenance is None:
                raise ValueError("no provenance stands before it")
            else:
                records.append(kind(**{**values, "provenance": provenance}))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is no {kind.__name__}: {error}") from None
    return records


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Read the lines of metrics, of one kind or all; a last line cut short is left out.

    A "step" (or "nonfinite") has its loss, lr and grad_norm, a "validation" its loss, a "scale" the
    values of every rule's parameters by name; each says after which step.
    """
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            values = json.loads(line)
            if kind in (None, values["kind"]):
                lines.append(values)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is no line of metrics: {error}") from None
    return lines


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
            raise UsageError(
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
    # Timings are compared within one run of a benchmark, which is a part by itself; of no model.
    del provenance["part"], provenance["model"]
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
    here = Path(__file__)
    try:
        # An environment may lie within the repository of someone else, whose commit says nothing.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        commit = _git(here.parent, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(here.parent, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# Where the files of a study and of a folder of results lie, whoever writes them.
STUDY, VERDICTS = "study.json", "verdicts.jsonl"
RUNS, RESULTS, DONE, LOGS, TEXT = "runs", "results", "done", "logs", "data"
"""Folders of a study: its runs, what was measured of each, the jobs that are done, their logs, and
the tokens that it prepared."""
PARTS, ARCHIVE = "parts", ".tar.xz"
"""Where a study that was made in parts has their records, packed."""
FIGURES, PAGE, SIDE_BY_SIDE = "figures", "report.html", "side-by-side.html"
POSITION_LOSS, SAME_THETA_LOSS = "position_loss.jsonl", "position_loss_same_theta.jsonl"
SHARPNESS, NEEDLE = "sharpness.jsonl", "needle.jsonl"
RETRIEVAL_GRID = "retrieval_grid.jsonl"
NEEDLE_SCORE, PAPERS_NEEDLE_SCORE = "needle_score.jsonl", "papers_needle.jsonl"


class RecordFile(NamedTuple):
    """What a file of records holds, in whatever folder of results."""

    kind: type[PositionLoss | Sharpness | NeedleTrial | RetrievalGrid | NeedleScore]
    job: str
    """The kind of job that writes it."""
    findings: str
    """The field of a study's findings that it is read into."""


RECORD_FILES: dict[str, RecordFile] = {
    POSITION_LOSS: RecordFile(PositionLoss, "loss", "position_losses"),
    SAME_THETA_LOSS: RecordFile(PositionLoss, "loss", "same_theta_losses"),
    SHARPNESS: RecordFile(Sharpness, "loss", "sharpness"),
    NEEDLE: RecordFile(NeedleTrial, "needle", "trials"),
    RETRIEVAL_GRID: RecordFile(RetrievalGrid, "needle", "grids"),
    NEEDLE_SCORE: RecordFile(NeedleScore, "needle", "scores"),
    PAPERS_NEEDLE_SCORE: RecordFile(NeedleScore, "needle", "papers_needle"),
}
