"""Measured results as tables in Markdown and a figure, for the README and the docs."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssmax.records import Comparison, NeedleTrial, PositionLoss
from ssmax.report.figures import variants as variants_drawn
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
BASES = ("quick", "small")
"""Presets of which something is varied."""
LARGEST_FIRST = ("paper", "gpu", "small", "quick")


def read_results(folder: Path) -> dict[str, Findings]:
    """Every study of a folder of results, by its folder's name."""
    return {path.parent.name: read_findings(path.parent) for path in folder.glob("*/study.json")}


def tables(results: Mapping[str, Findings]) -> dict[str, str]:
    """All tables by the name that a document calls them by."""
    made = {"headlines": headlines(results)}
    made |= {f"variants of {base}": variants(results, base) for base in BASES}
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


def shown_figures(text: str) -> dict[str, str]:
    """Of every picture of a study that a document shows, its name and the figure in results/."""
    pictures = re.findall(r"\(pictures/(\d{4}-\d\d-\d\d_[\w-]+)-(figure\w+\.svg)\)", text)
    return {f"{study}-{figure}": f"{study}/figures/{figure}" for study, figure in pictures}


def headlines(results: Mapping[str, Findings]) -> str:
    """The first things to know of every study, but for those whose code no commit holds."""
    rows = [
        [_short_name(name), one.text, _effect(one), one.basis, one.verdict, f"`results/{name}`"]
        for name, findings in sorted(results.items(), key=_largest_first)
        if ":" not in findings.study["preset"] and _is_committed(findings)
        for one in findings.comparisons
        if one.text in HEADLINES
    ]
    header = ["study", "the paper says", "effect [95 %]", "over", "verdict", "records"]
    return _table(header, rows)


def _largest_first(result: tuple[str, Findings]) -> tuple[int, str]:
    name, findings = result
    preset, _, _ = findings.study["preset"].partition(":")
    return LARGEST_FIRST.index(preset), name


def _is_committed(findings: Findings) -> bool:
    return not any(here.commit.endswith("+") for _, here in findings.provenances)


def variants(results: Mapping[str, Findings], base: str) -> str:
    """What becomes of (b) against (a) where position code, windows or size are varied."""
    rows = []
    for variant, findings in _varied(results, base).items():
        told = {one.text: one for one in findings.comparisons}
        rows.append([variant, *(_effect(told[text]) if text in told else "-" for text in VARIED)])
    header = ["varied", "loss beyond T, (b) - (a)", "numbers found beyond T, (b) - (a)"]
    return _table(header, rows) if rows else "Not measured yet."


def variants_figure(results: Mapping[str, Findings], base: str) -> Any | None:
    """Every configuration under every variant; None where none was measured."""
    varied = _varied(results, base)
    losses, found = {}, {}
    for variant, one in varied.items():
        losses[variant] = _values(one.position_losses, _loss(one.train_length, is_long=True))
        found[variant] = _values(one.trials, _found(one.train_length, is_long=True))
    titles = ("loss beyond the training length", "numbers found beyond it")
    return variants_drawn(dict(zip(titles, (losses, found), strict=True))) if varied else None


def _varied(results: Mapping[str, Findings], base: str) -> dict[str, Findings]:
    """A study and its variants, by what is varied; nothing where nothing is."""
    found = {}
    for _, findings in sorted(results.items()):
        preset, _, variant = findings.study["preset"].partition(":")
        if preset == base and _is_committed(findings):
            found[variant or "as it is"] = findings
    return found if set(found) - {"as it is"} else {}


def _values(home: ByReplica[Record], value: Callable[[Record], float]) -> dict[str, list[float]]:
    return {name: list(map(value, by_replica.values())) for name, by_replica in home.items()}


def _loss(length: int, *, is_long: bool) -> Callable[[PositionLoss], float]:
    """The mean within the training length, or beyond it."""
    part = slice(length, None) if is_long else slice(length)
    return lambda record: float(np.mean(record.mean[part]))


def _found(length: int, *, is_long: bool) -> Callable[[list[NeedleTrial]], float]:
    """The share of whole numbers within the training length, or beyond it."""

    def share(trials: list[NeedleTrial]) -> float:
        return float(np.mean([one.is_whole for one in trials if (one.length > length) == is_long]))

    return share


def _last_tenth(curve: tuple[list[int], list[float]]) -> float:
    return float(np.mean(curve[1][-max(1, len(curve[1]) // 10) :]))


def numbers(findings: Findings) -> str:
    """Means of every configuration over its runs, from the least to the largest in brackets."""
    length = findings.train_length
    columns = [
        _values(findings.curves, _last_tenth),
        _values(findings.position_losses, _loss(length, is_long=False)),
        _values(findings.position_losses, _loss(length, is_long=True)),
        _values(findings.same_theta_losses, _loss(length, is_long=True)),
        _values(findings.trials, _found(length, is_long=False)),
        _values(findings.trials, _found(length, is_long=True)),
    ]
    rows = []
    for name, look in LOOKS.items():
        cells = [_cell(column.get(name, [])) for column in columns]
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
    """Every comparison that was made, and its verdict; below, why others were not."""
    made = [one for one in found if one.verdict != "not measured"]
    rows = [
        [
            one.claim,
            one.text + (" [ours]" if one.is_ours else ""),
            _effect(one),
            one.basis,
            one.verdict,
        ]
        for one in made
    ]
    table = _table(["claim", "comparison", "effect [95 %]", "over", "verdict"], rows)
    if len(made) == len(found):
        return table
    why = dict.fromkeys(one.basis for one in found if one.verdict == "not measured")
    return f"{table}\n\nNot made: {len(found) - len(made)} comparisons. {'; '.join(why)}."


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
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
