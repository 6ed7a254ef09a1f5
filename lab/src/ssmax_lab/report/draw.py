"""From findings to files: the figures as .svg and .png, and the page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssmax_lab.analysis.findings import ByReplica, Findings
from ssmax_lab.analysis.measures import mean_curves, pooled
from ssmax_lab.configurations import labels
from ssmax_lab.records import FIGURES, PAGE
from ssmax_lab.report import figures
from ssmax_lab.report.page import write_page
from ssmax_lab.report.payload import payload
from ssmax_lab.report.style import as_svg, save


def draw(findings: Findings, folder: Path) -> Path:
    """Draw everything that can be drawn, and return the page."""
    static = {}
    for name, figure in _drawn(findings):
        save(figure, folder / FIGURES, f"figure{name}")
        static[name] = as_svg(figure)
    write_page(payload(findings, static=static), folder / PAGE)
    return folder / PAGE


def _drawn(findings: Findings) -> list[tuple[str, Any]]:
    tables = {str(replica): table for replica, table in findings.tables.items()}
    length, same_theta = findings.train_length, findings.same_theta_losses

    def runs(found: ByReplica[Any]) -> dict[str, list[Any]]:
        return {name: list(by_replica.values()) for name, by_replica in found.items()}

    every: list[tuple[str, Any, Callable[..., Any], Callable[[Any], Any], dict[str, Any]]] = [
        ("1_in_heads", findings.sharpness, figures.figure1_in_heads, runs,
         {"train_length": length}),
        ("4", findings.curves, figures.figure4, mean_curves, {}),
        ("5", findings.position_losses, figures.figure5, runs,
         {"train_length": length, "rope_limit": findings.rope_limit}),
        ("5_same_theta", same_theta, figures.figure5, runs, {"train_length": length}),
        ("6", findings.trials, figures.figure6, pooled, {}),
        ("7", findings.papers_needle, figures.figure7, pooled, {}),
        ("8", findings.scores, figures.figure8, pooled, {}),
    ]  # fmt: skip
    made = [("1", figures.figure1()), ("3", figures.figure3())]
    if tables:
        made.append(("2", figures.figure2(tables)))
    for name, found, figure, merge, options in every:
        if found:
            called = labels({name: len(by_replica) for name, by_replica in found.items()})
            made.append((name, figure(merge(found), labels=called, **options)))
    return made
