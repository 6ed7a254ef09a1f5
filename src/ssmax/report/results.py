"""Measured results as tables in Markdown, for the README and the docs: from records alone."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ssmax.records import Comparison, NeedleTrial, PositionLoss
from ssmax.report.findings import ByReplica, Findings, Record, read_findings
from ssmax.report.style import LOOKS

HEADLINES = (
    "log n fits the learnt p_n better than n does",
    "(b) learns below (a)",
    "beyond the training length (b) loses less than (a)",
    "beyond the training length (b) finds more numbers than (a)",
    "the top needle score of (b) is above that of (a)",
)
"""What a reader wants to know first, one comparison of each claim that needs a measurement."""
VARIED = HEADLINES[2:4]
"""What is looked at when something is varied."""


def read_results(folder: Path) -> dict[str, Findings]:
    """Every study of a folder of results, by its folder's name."""
    return {path.parent.name: read_findings(path.parent) for path in folder.glob("*/study.json")}


def tables(results: Mapping[str, Findings]) -> dict[str, str]:
    """All tables by the name that a document calls them by."""
    made = {"headlines": headlines(results), "variants": variants(results)}
    for name, findings in sorted(results.items()):
        made[f"{name} numbers"] = numbers(findings)
        made[f"{name} comparisons"] = comparisons(findings.comparisons)
    return made


def written(text: str, made: Mapping[str, str]) -> str:
    """A document with every table anew that stands between its two comments.

    They are `<!-- results: NAME -->` and `<!-- end of results -->`.
    """

    def anew(match: re.Match[str]) -> str:
        if match[2] not in made:
            raise ValueError(f"there is no table {match[2]!r}; there are: {', '.join(made)}")
        return f"{match[1]}\n{made[match[2]]}\n{match[3]}"

    marks = r"(<!-- results: (.+?) -->)\n.*?\n?(<!-- end of results -->)"
    return re.sub(marks, anew, text, flags=re.DOTALL)


def headlines(results: Mapping[str, Findings]) -> str:
    """The first things to know of every study."""
    rows = [
        [_short_name(name), one.text, _effect(one), one.basis, one.verdict, f"`results/{name}`"]
        for name, findings in sorted(results.items())
        if ":" not in findings.study["preset"]
        for one in findings.comparisons
        if one.text in HEADLINES
    ]
    header = ["study", "the paper says", "effect [95 %]", "over", "verdict", "records"]
    return _table(header, rows)


def variants(results: Mapping[str, Findings]) -> str:
    """What becomes of (b) against (a) where position code, windows or size are varied."""
    rows = []
    for _, findings in sorted(results.items()):
        preset, colon, variant = findings.study["preset"].partition(":")
        if preset == "small":
            told = {one.text: one for one in findings.comparisons}
            effects = [_effect(told[text]) if text in told else "-" for text in VARIED]
            rows.append([variant if colon else "as it is", *effects])
    header = ["varied", "loss beyond T, (b) - (a)", "numbers found beyond T, (b) - (a)"]
    return _table(header, rows) if rows else "Not measured yet."


def numbers(findings: Findings) -> str:
    """Means of every configuration over its runs, from the least to the largest in brackets."""
    length = findings.train_length

    def loss(is_long: bool) -> Callable[[PositionLoss], float]:
        def mean(record: PositionLoss) -> float:
            part = record.mean[length:] if is_long else record.mean[:length]
            return float(np.mean(part))

        return mean

    def found(is_long: bool) -> Callable[[list[NeedleTrial]], float]:
        def share(trials: list[NeedleTrial]) -> float:
            return float(
                np.mean([one.is_whole for one in trials if (one.length > length) == is_long])
            )

        return share

    def last_tenth(curve: tuple[list[int], list[float]]) -> float:
        return float(np.mean(curve[1][-max(1, len(curve[1]) // 10) :]))

    rows = []
    for name, look in LOOKS.items():
        cells = [
            _cell(findings.curves, name, last_tenth),
            _cell(findings.position_losses, name, loss(False)),
            _cell(findings.position_losses, name, loss(True)),
            _cell(findings.same_theta_losses, name, loss(True)),
            _cell(findings.trials, name, found(False)),
            _cell(findings.trials, name, found(True)),
        ]
        if set(cells) != {"-"}:
            runs = max(len(home.get(name, ())) for home in (findings.curves, findings.trials))
            rows.append([look.label, str(runs), *cells])
    header = [
        "configuration",
        "runs",
        "training loss, last tenth",
        f"loss within {length:,}",
        "beyond",
        "beyond, theta unchanged",
        f"numbers found within {length:,}",
        "beyond",
    ]
    return _table(header, rows)


def comparisons(found: Sequence[Comparison]) -> str:
    """Every comparison that was made, and its verdict."""
    rows = [
        [
            one.claim,
            one.text + (" [ours]" if one.is_ours else ""),
            _effect(one),
            one.basis,
            one.verdict,
        ]
        for one in found
    ]
    return _table(["claim", "comparison", "effect [95 %]", "over", "verdict"], rows)


def _cell(home: ByReplica[Record], name: str, value: Callable[[Record], float]) -> str:
    if name not in home:
        return "-"
    values = [value(record) for record in home[name].values()]
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def _effect(one: Comparison) -> str:
    if one.verdict == "not measured":
        return "-"
    return f"{one.effect:+.3f} [{one.low:+.3f}, {one.high:+.3f}] {one.unit}"


def _short_name(name: str) -> str:
    """Without its date."""
    return name.partition("_")[2] or name


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
