"""One study's records as tables in Markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from ssmax_lab.analysis.findings import Findings
from ssmax_lab.analysis.formulas import SHAPES, fit_table
from ssmax_lab.analysis.measures import (
    last_tenth,
    learned,
    lost_sharpness,
    mean_differences,
    mean_loss,
    retrieval_accuracy,
    values_of,
)
from ssmax_lab.analysis.statistics import EXACT
from ssmax_lab.configurations import MEASURED, look
from ssmax_lab.records import Comparison, NeedleTrial, Sharpness
from ssmax_lab.report.tables import COMPARED, compared, markdown


def numbers(findings: Findings) -> str:
    """Tabulate means of every configuration over its runs, from the least to the largest."""
    length, losses = findings.train_length, findings.position_losses
    near, far = (mean_loss(length, is_long=is_long) for is_long in (False, True))
    right, right_far = (retrieval_accuracy(length, is_long=is_long) for is_long in (False, True))
    return _by_configuration(
        {
            "training loss, last tenth": values_of(findings.curves, last_tenth),
            f"loss within {length:,}": values_of(losses, near),
            "beyond": values_of(losses, far),
            "beyond, theta unchanged": values_of(findings.same_theta_losses, far),
            f"needle retrieval accuracy within {length:,}": values_of(findings.trials, right),
            "needle retrieval accuracy beyond": values_of(findings.trials, right_far),
        }
    )


def stretches(findings: Findings) -> str:
    """Tabulate the loss less (a)'s of the same seed and part: within, to the RoPE limit, past it.

    The limit is arithmetic, and so not chosen by what is seen.
    """
    length, limit = findings.train_length, findings.rope_limit
    if limit is None:
        return "There is no RoPE limit."
    half, end = length // 2, round(limit)
    columns = {
        f"{half:,} to {length:,}, theta unchanged": (findings.same_theta_losses, half, length),
        f"{half:,} to {length:,}": (findings.position_losses, half, length),
        f"{length:,} to {end:,}": (findings.position_losses, length, end),
        f"past {end:,}": (findings.position_losses, end, None),
    }
    less = {title: mean_differences(*column) for title, column in columns.items()}
    others = {
        title: {name: values for name, values in found.items() if name != "a"}
        for title, found in less.items()
    }
    return _by_configuration(others, sign="+")


def needles(findings: Findings, is_right: Callable[[NeedleTrial], bool]) -> str:
    """Tabulate the share of trials that are right, by the size of the context."""

    def right_in(length: int) -> Callable[[list[NeedleTrial]], float]:
        return lambda trials: float(np.mean([is_right(x) for x in trials if x.length == length]))

    lengths = sorted(findings.study["needle_lengths"])
    return _by_configuration(
        {f"{length:,} tokens": values_of(findings.trials, right_in(length)) for length in lengths}
    )


def heads(findings: Findings) -> str:
    """Tabulate how sharp the heads are where n keys are seen, and their s."""
    grids = {tuple(one.num_keys) for home in findings.sharpness.values() for one in home.values()}
    if len(grids) != 1:
        return "Not measured yet."
    (num_keys,) = grids
    length = findings.train_length
    marks = sorted({length // 16, length, 4 * length}.intersection(num_keys) | {num_keys[-1]})

    def mean_of(what: str, n: int) -> Callable[[Sharpness], float]:
        place = num_keys.index(n)
        return lambda record: float(np.array(getattr(record, what))[:, :, place].mean())

    columns = {
        f"{words} at n = {n:,}": values_of(findings.sharpness, mean_of(what, n))
        for words, what in (("largest weight", "largest"), ("entropy", "entropy"))
        for n in marks
    }
    # At the last n within the RoPE limit, where that is known, and at the last of all.
    within = [n for n in num_keys if length < n <= (findings.rope_limit or 0)]
    for n in (*within[-1:], num_keys[-1]):
        columns[f"heads that lose sharpness by n = {n:,}"] = values_of(
            findings.sharpness, lambda one, n=n: lost_sharpness(one, length, n)
        )
    # Not every rule has one.
    with_s = {
        name: {replica: s for replica, values in home.items() if (s := learned(values, "s"))}
        for name, home in findings.scales.items()
    }
    columns["s"] = values_of(with_s, lambda s: float(np.mean(s)))
    return _by_configuration(columns)


def probe(findings: Findings) -> str:
    """Tabulate how much of the learned p_n each shape explains, also without the first n."""
    rows = []
    for first in (2, 8, 32):
        shares: dict[str, list[float]] = {}
        for table in findings.tables.values():
            for fit in fit_table(table, first):
                shares.setdefault(fit.shape, []).append(fit.r2)
        if shares:
            rows.append([f"{first}", *(cell(shares[name]) for name in (*SHAPES, "power"))])
    header = ["from n =", *(f"R^2 of {name}" for name in SHAPES), "of the best power of n"]
    return markdown(header, rows) if rows else "Not measured yet."


def comparisons(found: Sequence[Comparison]) -> str:
    """Tabulate every comparison that was measured; below, why others were not made."""
    left_out = [one for one in found if one.effect is None]
    table = judged([one for one in found if one not in left_out and one.basis != EXACT])
    if not left_out:
        return table
    why = dict.fromkeys(one.basis for one in left_out)
    return f"{table}\n\nNot made: {len(left_out)} comparisons. {'; '.join(why)}."


def judged(found: Sequence[Comparison]) -> str:
    """Tabulate comparisons with what their intervals are over, and their verdicts."""
    return markdown(["claim", *COMPARED], [[one.claim, *compared(one)] for one in found])


def _by_configuration(
    columns: Mapping[str, Mapping[str, Sequence[float]]], *, sign: Literal["", "+"] = ""
) -> str:
    """Tabulate every configuration that has a value in one of the columns."""
    rows = []
    for name in MEASURED:
        found = [column.get(name, []) for column in columns.values()]
        if runs := max(len(values) for values in found):
            cells = (cell(values, runs, sign) for values in found)
            rows.append([look(name).label, str(runs), *cells])
    return markdown(["configuration", "runs", *columns], rows)


def cell(values: Sequence[float], runs: int = 0, sign: Literal["", "+"] = "") -> str:
    """Write the mean, least and largest; how many there are where a row has more."""
    if not values:
        return "-"
    low, mean, high = (
        f"{value:{sign}.3f}" for value in (min(values), np.mean(values), max(values))
    )
    spread = f" ({low} to {high})" if len(values) > 1 else ""
    # Not all of the row's runs were measured so far.
    fewer = f", {len(values)} of them" if len(values) < runs else ""
    return f"{mean}{spread}{fewer}"
