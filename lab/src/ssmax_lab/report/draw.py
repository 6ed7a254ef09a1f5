"""From findings to files: the figures as .svg and .png, and the page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssmax_lab.records import PositionLoss
from ssmax_lab.report import figures
from ssmax_lab.report.curves import mean_curves, pooled
from ssmax_lab.report.findings import ByReplica, Findings
from ssmax_lab.report.page import write_page
from ssmax_lab.report.payload import payload
from ssmax_lab.report.style import as_svg, labels, save

FIGURES, PAGE = "figures", "report.html"


def draw(findings: Findings, folder: Path) -> Path:
    """Everything that can be drawn; the page."""
    static = {}
    for name, figure in _drawn(findings):
        save(figure, folder / FIGURES, f"figure{name}")
        static[name] = as_svg(figure)
    page = folder / PAGE
    write_page(payload(findings, static=static), page)
    return page


def _drawn(findings: Findings) -> list[tuple[str, Any]]:
    tables = {str(replica): table for replica, table in findings.tables.items()}

    def names(found: ByReplica[Any]) -> dict[str, str]:
        return labels({name: len(by_replica) for name, by_replica in found.items()})

    def figure5(losses: ByReplica[PositionLoss], carries_to: float | None = None) -> Any:
        runs = {name: list(found.values()) for name, found in losses.items()}
        return figures.figure5(
            runs,
            train_length=findings.train_length,
            carries_to=carries_to,
            labels=names(losses),
        )

    def fading() -> Any:
        runs = {name: list(found.values()) for name, found in findings.fading.items()}
        return figures.figure1_in_heads(
            runs, train_length=findings.train_length, labels=names(findings.fading)
        )

    losses, same_theta = findings.position_losses, findings.same_theta_losses
    curves, trials = findings.curves, findings.trials
    papers, scores = findings.papers_needle, findings.scores
    every: list[tuple[str, bool, Callable[[], Any]]] = [
        ("1", True, figures.figure1),
        ("1_in_heads", bool(findings.fading), fading),
        ("2", bool(tables), lambda: figures.figure2(tables)),
        ("3", True, figures.figure3),
        ("4", bool(curves), lambda: figures.figure4(mean_curves(curves), labels=names(curves))),
        ("5", bool(losses), lambda: figure5(losses, findings.carries_to)),
        ("5_same_theta", bool(same_theta), lambda: figure5(same_theta)),
        ("6", bool(trials), lambda: figures.figure6(pooled(trials), labels=names(trials))),
        ("7", bool(papers), lambda: figures.figure7(pooled(papers), labels=names(papers))),
        ("8", bool(scores), lambda: figures.figure8(pooled(scores), labels=names(scores))),
    ]
    return [(name, make()) for name, is_measured, make in every if is_measured]
