"""What a study left on disk, read back: by configuration, then by seed and part."""

import json
import lzma
import math
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ssmax.errors import UsageError
from ssmax_lab.analysis.formulas import rope_limit_of
from ssmax_lab.configurations import CONFIGURATIONS, PROBE
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
    VERDICTS,
    Comparison,
    NeedleScore,
    NeedleTrial,
    PositionLoss,
    Provenance,
    RetrievalGrid,
    Sharpness,
    read_jsonl,
    read_metrics,
)


class Replica(NamedTuple):
    """One of several runs of a configuration: only what shares seed and part is compared."""

    seed: int
    part: str = ""

    def __str__(self) -> str:
        return f"seed {self.seed}" + (f", part {self.part}" if self.part else "")


Record = TypeVar("Record")
ByReplica = dict[str, dict[Replica, Record]]


@dataclass(slots=True, kw_only=True)
class Findings:
    """Everything that was measured; what was not is missing."""

    study: dict[str, Any]
    """As the study was resolved."""
    curves: ByReplica[tuple[list[int], list[float]]] = field(default_factory=dict)
    """Steps and training losses."""
    scales: ByReplica[dict[str, list[float]]] = field(default_factory=dict)
    """What every rule had learned at the end, by the name of the parameter."""
    tables: dict[Replica, list[float]] = field(default_factory=dict)
    """The probe's p_n."""
    position_losses: ByReplica[PositionLoss] = field(default_factory=dict)
    same_theta_losses: ByReplica[PositionLoss] = field(default_factory=dict)
    """At the training's theta."""
    trials: ByReplica[list[NeedleTrial]] = field(default_factory=dict)
    grids: ByReplica[RetrievalGrid] = field(default_factory=dict)
    scores: ByReplica[list[NeedleScore]] = field(default_factory=dict)
    papers_needle: ByReplica[list[NeedleScore]] = field(default_factory=dict)
    sharpness: ByReplica[Sharpness] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    """What was typed to make it."""
    comparisons: list[Comparison] = field(default_factory=list)
    provenances: list[tuple[str, Provenance]] = field(default_factory=list)

    @property
    def by_configuration(self) -> list[ByReplica[Any]]:
        """What was measured of every configuration, a kind each."""
        homes = (getattr(self, one.findings) for one in RECORD_FILES.values())
        return [self.curves, self.scales, *homes]

    @property
    def runs(self) -> dict[str, int]:
        """How many runs of each configuration there are."""
        found = {
            name: set[Replica]().union(*(kind.get(name, ()) for kind in self.by_configuration))
            for name in CONFIGURATIONS
            if name != PROBE
        }
        return {name: len(replicas) for name, replicas in found.items() if replicas}

    @property
    def train_length(self) -> int:
        """Tokens of a training sequence."""
        return self.study["pretraining"]["model"]["train_length"]

    @property
    def rope_limit(self) -> float | None:
        """The RoPE limit at the test's theta; None where nothing bounds positions."""
        model, factor = self.study["pretraining"]["model"], self.study["theta_factor"]
        head_dim = model["head_dim"] or model["hidden_size"] // model["num_heads"]
        rotary_dim = head_dim if model["rotary_dim"] is None else model["rotary_dim"]
        limit = rope_limit_of(self.train_length, model["theta"], rotary_dim, factor)
        return limit if limit < math.inf else None

    @property
    def is_in_parts(self) -> bool:
        """It was not made on one machine."""
        parts = {replica.part for found in self.curves.values() for replica in found}
        return len(parts) > 1


def read_findings(folder: Path) -> Findings:
    """Read the findings of a study's folder, from the jobs that are done."""
    values = read_study_file(folder)
    findings = Findings(study=values["study"], commands=values["commands"])
    if (folder / PARTS).is_dir():
        archives = sorted((folder / PARTS).glob(f"*{ARCHIVE}"))
        for archive in archives:
            # A single part is the whole, and needs no name.
            name = archive.name.removesuffix(ARCHIVE) if len(archives) > 1 else ""
            with unpacked(archive) as part:
                _read_part(findings, part, name)
    else:
        _read_part(findings, folder, "")
    for kind in findings.by_configuration:
        # In the paper's order, whichever part brought what.
        in_order = sorted(kind.items(), key=lambda one: list(CONFIGURATIONS).index(one[0]))
        kind.clear()
        kind.update(in_order)
    if (folder / VERDICTS).is_file():
        # Damaged ones, or those of another version, are judged anew.
        with suppress(UsageError):
            findings.comparisons = read_jsonl(folder / VERDICTS, Comparison)
    return findings


def read_study_file(folder: Path) -> dict[str, Any]:
    """Read what a study's folder says of itself: the study, its jobs, where it was made."""
    path = folder / STUDY
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; ssmax-lab reproduce makes studies")
    if not path.is_file():
        raise UsageError(
            f"{folder} is no study: it holds no {STUDY}; make one with ssmax-lab reproduce"
        )
    try:
        values: dict[str, Any] = {"commands": [], "texts": {}, **json.loads(path.read_text())}
        _ = values["study"]["preset"], values["study"]["pretraining"]["model"]["train_length"]
        return values
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not the record of a study: {error!r}") from None


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Unpack an archive into a folder, for as long as it is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
            # tarfile tells of every compression that it tried, a line each.
            words = str(error).partition(":\n")[0]
            raise UsageError(f"{archive} is no part of a study: {words}") from None
        try:
            yield Path(folder)
        except UsageError as error:
            # Who reads it has the archive, not the folder.
            raise UsageError(f"{archive}: {str(error).replace(folder, 'it')}") from None


def _read_part(findings: Findings, folder: Path, part: str) -> None:
    done = {file.stem for file in (folder / DONE).glob("*.json")}
    for run, name, seed in _folders(folder / RUNS):
        if f"pretrain-{name}-{seed}" in done:
            _read_run(findings, run, name, Replica(seed, part))
    for results, name, seed in _folders(folder / RESULTS):
        replica = Replica(seed, part)
        for file, one in RECORD_FILES.items():
            path, job = results / file, f"{one.job}-{name}-{seed}"
            # A study of before a measurement existed goes without it.
            if job not in done or not path.is_file():
                continue
            records = read_jsonl(path, one.kind)
            if not records:
                raise UsageError(f"{path} is empty; without {DONE}/{job}.json it is measured again")
            # Those that other settings left do not count.
            last = records[-1].provenance
            records = [each for each in records if each.provenance.config_hash == last.config_hash]
            is_one = one.kind in (PositionLoss, Sharpness, RetrievalGrid)
            found = getattr(findings, one.findings).setdefault(name, {})
            found[replica] = records[-1] if is_one else records
            findings.provenances.append((f"{path.stem.replace('_', ' ')}, {name}, {replica}", last))


def _folders(parent: Path) -> Iterator[tuple[Path, str, int]]:
    """Folders called CONFIGURATION-SEED, in the order of the configurations."""
    found = []
    for folder in parent.iterdir() if parent.is_dir() else ():
        name, _, seed = folder.name.rpartition("-")
        if seed.isdecimal() and name in CONFIGURATIONS:
            found.append((folder, name, int(seed)))
    order = list(CONFIGURATIONS)
    yield from sorted(found, key=lambda one: (order.index(one[1]), one[2]))


def _read_run(findings: Findings, run: Path, name: str, replica: Replica) -> None:
    lines = read_metrics(run / METRICS)
    steps = [line for line in lines if line["kind"] == "step"]
    if not steps:
        raise UsageError(f"{run / METRICS} has no steps, though the run is done: it was cut short")
    losses = [line["loss"] for line in steps]
    scales = [line["values"] for line in lines if line["kind"] == "scale"]
    if name == PROBE:
        findings.tables[replica] = scales[-1]["table.p"]
    else:
        findings.curves.setdefault(name, {})[replica] = ([line["step"] for line in steps], losses)
    if scales:
        findings.scales.setdefault(name, {})[replica] = scales[-1]
    try:
        provenance = Provenance(**json.loads((run / RUN_CONFIG).read_text())["provenance"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run / RUN_CONFIG} is not the record of a run: {error!r}") from None
    findings.provenances.append((f"pretraining, {name}, {replica}", provenance))
