"""From findings to files: the figures as .svg and .png, and the page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssmax.report import figures
from ssmax.report.findings import Findings
from ssmax.report.page import write_page
from ssmax.report.payload import mean_curves, payload, pooled
from ssmax.report.style import as_svg, save

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
    losses = {name: found[min(found)] for name, found in findings.position_losses.items()}
    papers = {name: found[min(found)][0] for name, found in findings.papers_needle.items()}
    tables = {str(replica): table for replica, table in findings.tables.items()}
    same_theta = {name: found[min(found)] for name, found in findings.same_theta_losses.items()}
    length = findings.train_length
    every: list[tuple[str, bool, Callable[[], Any]]] = [
        ("1", True, figures.figure1),
        ("2", bool(tables), lambda: figures.figure2(tables)),
        ("3", True, figures.figure3),
        ("4", bool(findings.curves), lambda: figures.figure4(mean_curves(findings))),
        ("5", bool(losses), lambda: figures.figure5(losses, train_length=length)),
        (
            "5_same_theta",
            bool(same_theta),
            lambda: figures.figure5(same_theta, train_length=length),
        ),
        ("6", bool(findings.trials), lambda: figures.figure6(pooled(findings.trials))),
        ("7", bool(papers), lambda: figures.figure7(papers)),
        ("8", bool(findings.scores), lambda: figures.figure8(pooled(findings.scores))),
    ]
    return [(name, make()) for name, is_measured, make in every if is_measured]
