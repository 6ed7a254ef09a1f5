"""What a study left on disk, read back: by configuration, then by seed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ssmax.records import (
    Comparison,
    Fading,
    NeedleScore,
    NeedleTrial,
    PositionLoss,
    Provenance,
    read_jsonl,
)
from ssmax.report.style import LOOKS

STUDY, VERDICTS = "study.json", "verdicts.jsonl"
RUNS, RESULTS, DONE = "runs", "results", "done"
"""A study's files and folders, whoever writes them."""
PROBE = "probe"

Record = TypeVar("Record")
BySeed = dict[str, dict[int, Record]]


@dataclass(slots=True, kw_only=True)
class Findings:
    """Everything that was measured; what was not is missing."""

    study: dict[str, Any]
    """As the study was resolved."""
    curves: BySeed[tuple[list[int], list[float]]] = field(default_factory=dict)
    """Steps and training losses."""
    scales: BySeed[dict[str, list[float]]] = field(default_factory=dict)
    """What every rule had learnt at the end, by the name of the parameter."""
    tables: dict[int, list[float]] = field(default_factory=dict)
    """The probe's p_n, by seed."""
    position_losses: BySeed[PositionLoss] = field(default_factory=dict)
    trials: BySeed[list[NeedleTrial]] = field(default_factory=dict)
    scores: BySeed[list[NeedleScore]] = field(default_factory=dict)
    papers_needle: BySeed[list[NeedleScore]] = field(default_factory=dict)
    fading: BySeed[Fading] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    """What was typed to make it."""
    comparisons: list[Comparison] = field(default_factory=list)
    provenances: list[tuple[str, Provenance]] = field(default_factory=list)

    @property
    def train_length(self) -> int:
        """Tokens of a training sequence."""
        return self.study["pretraining"]["model"]["train_length"]

    @property
    def theta(self) -> float:
        """At test time."""
        return self.study["pretraining"]["model"]["theta"] * self.study["theta_factor"]


def read_findings(folder: Path) -> Findings:
    """The findings of a study's folder, from the jobs that are done."""
    path = folder / STUDY
    if not path.is_file():
        raise ValueError(
            f"{folder} is no study: it holds no {STUDY}; make one with ssmax reproduce"
        )
    try:
        values = json.loads(path.read_text())
        findings = Findings(study=values["study"], commands=values.get("commands", []))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the record of a study: {error}") from None
    done = {file.stem for file in (folder / DONE).glob("*.json")}
    for run, name, seed in _folders(folder / RUNS):
        if f"pretrain-{name}-{seed}" in done:
            _read_run(findings, run, name, seed)
    for results, name, seed in _folders(folder / RESULTS):
        for what, job, kind, home in _homes(findings):
            if f"{job}-{name}-{seed}" in done:
                records = read_jsonl(results / f"{what}.jsonl", kind)
                is_one = kind in (PositionLoss, Fading)
                home.setdefault(name, {})[seed] = records[-1] if is_one else records
                words = f"{what.replace('_', ' ')}, {name}, seed {seed}"
                findings.provenances.append((words, records[-1].provenance))
    if (folder / VERDICTS).is_file():
        findings.comparisons = read_jsonl(folder / VERDICTS, Comparison)
    return findings


def _homes(findings: Findings) -> list[tuple[str, str, Any, Any]]:
    """File, the job that writes it, what its lines are, and where they go."""
    return [
        ("position_loss", "loss", PositionLoss, findings.position_losses),
        ("fading", "loss", Fading, findings.fading),
        ("needle", "needle", NeedleTrial, findings.trials),
        ("needle_score", "needle", NeedleScore, findings.scores),
        ("papers_needle", "needle", NeedleScore, findings.papers_needle),
    ]


def _folders(parent: Path) -> Iterator[tuple[Path, str, int]]:
    """Folders called CONFIGURATION-SEED, the configurations in the paper's order."""
    found = []
    for folder in parent.iterdir() if parent.is_dir() else ():
        name, _, seed = folder.name.rpartition("-")
        if seed.isdecimal() and name in (*LOOKS, PROBE):
            found.append((folder, name, int(seed)))
    order = [*LOOKS, PROBE]
    yield from sorted(found, key=lambda one: (order.index(one[1]), one[2]))


def _read_run(findings: Findings, run: Path, name: str, seed: int) -> None:
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    steps = [line for line in journal if line["kind"] == "step"]
    losses = [line["loss"] for line in steps]
    scales = [line["values"] for line in journal if line["kind"] == "scale"]
    if name == PROBE:
        findings.tables[seed] = scales[-1]["table.p"]
    else:
        findings.curves.setdefault(name, {})[seed] = ([line["step"] for line in steps], losses)
    if scales:
        findings.scales.setdefault(name, {})[seed] = scales[-1]
    values = json.loads((run / "config.json").read_text())["provenance"]
    findings.provenances.append((f"pretraining, {name}, seed {seed}", Provenance(**values)))
