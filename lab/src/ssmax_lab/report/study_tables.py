"""One study's records as tables in Markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from ssmax_lab.records import Comparison, Fading, NeedleTrial, PositionLoss
from ssmax_lab.report.captions import EXACT
from ssmax_lab.report.curves import paired, places_beyond
from ssmax_lab.report.findings import ByReplica, Findings, Record
from ssmax_lab.report.fits import SHAPES, fit_table
from ssmax_lab.report.style import LOOKS


def numbers(findings: Findings) -> str:
    """Means of every configuration over its runs, from the least to the largest in brackets."""
    length = findings.train_length
    return _by_configuration(
        {
            "training loss, last tenth": values_of(findings.curves, _last_tenth),
            f"loss within {length:,}": values_of(
                findings.position_losses, mean_loss(length, is_long=False)
            ),
            "beyond": values_of(findings.position_losses, mean_loss(length, is_long=True)),
            "beyond, theta unchanged": values_of(
                findings.same_theta_losses, mean_loss(length, is_long=True)
            ),
            f"numbers found within {length:,}": values_of(
                findings.trials, share_found(length, is_long=False)
            ),
            "numbers found beyond": values_of(findings.trials, share_found(length, is_long=True)),
        }
    )


def stretches(findings: Findings) -> str:
    """The loss less (a)'s of the same seed and part: within, as far as positions carry, past it.

    How far they carry is arithmetic, and so not chosen by what is seen.
    """
    length, reach = findings.train_length, findings.carries_to
    if reach is None:
        return "Nothing bounds how far positions carry."
    half, end = length // 2, round(reach)
    columns = {
        f"{half:,} to {length:,}, theta unchanged": (findings.same_theta_losses, half, length),
        f"{half:,} to {length:,}": (findings.position_losses, half, length),
        f"{length:,} to {end:,}": (findings.position_losses, length, end),
        f"past {end:,}": (findings.position_losses, end, None),
    }
    return _by_configuration(
        {
            title: {
                name: [
                    float(np.mean(np.subtract(own.mean, base.mean)[start:stop]))
                    for base, own in pairs
                ]
                for name, pairs in paired(losses).items()
                if name != "a"
            }
            for title, (losses, start, stop) in columns.items()
        },
        sign="+",
    )


def needles(findings: Findings, is_right: Callable[[NeedleTrial], bool]) -> str:
    """The share of trials that every configuration gets right, by the size of the context."""

    def right_in(length: int) -> Callable[[list[NeedleTrial]], float]:
        return lambda trials: float(np.mean([is_right(x) for x in trials if x.length == length]))

    lengths = sorted(findings.study["needle_lengths"])
    return _by_configuration(
        {f"{length:,} tokens": values_of(findings.trials, right_in(length)) for length in lengths}
    )


def heads(findings: Findings) -> str:
    """How sharp the heads of every configuration are where n keys are seen, and their s."""
    grids = {tuple(one.num_keys) for home in findings.fading.values() for one in home.values()}
    if len(grids) != 1:
        return "Not measured yet."
    (num_keys,) = grids
    length = findings.train_length
    marks = {length // 16, length, 4 * length}.intersection(num_keys) | {num_keys[-1]}
    places = {n: num_keys.index(n) for n in sorted(marks)}

    def mean_of(what: str, place: int) -> Callable[[Fading], float]:
        return lambda record: float(np.array(getattr(record, what))[:, :, place].mean())

    columns = {
        f"{words} at n = {n:,}": values_of(findings.fading, mean_of(what, place))
        for words, what in (("largest weight", "largest"), ("entropy", "entropy"))
        for n, place in places.items()
    }
    # As far as positions carry, where that is known, and at the last n.
    carried = [n for n in num_keys if length < n <= (findings.carries_to or 0)]
    for n in (*carried[-1:], num_keys[-1]):
        faded = values_of(findings.fading, lambda one, n=n: _faded(one, length, n))
        columns[f"heads that fade by n = {n:,}"] = faded
    # Not every rule has one.
    with_s = {
        name: {replica: learned for replica, learned in home.items() if _s_of(learned)}
        for name, home in findings.scales.items()
    }
    columns["s"] = values_of(with_s, lambda learned: float(np.mean(_s_of(learned))))
    return _by_configuration(columns)


def _faded(record: Fading, train_length: int, n: int) -> float:
    """The share of heads whose largest weight loses half or more from the training length to n."""
    before, _ = places_beyond(record, train_length)
    weights = np.asarray(record.largest)
    return float(np.mean(weights[:, :, record.num_keys.index(n)] <= weights[:, :, before] / 2))


def _s_of(learned: Mapping[str, Sequence[float]]) -> list[Sequence[float]]:
    """Every layer's, a number per head."""
    return [row for name, row in learned.items() if name.endswith(".s")]


def probe(findings: Findings) -> str:
    """How much of the learned p_n each shape explains, over all n and without the first of them."""
    rows = []
    for first in (2, 8, 32):
        shares: dict[str, list[float]] = {}
        for table in findings.tables.values():
            for fit in fit_table(table, first):
                shares.setdefault(fit.name if fit.name in SHAPES else "power", []).append(fit.r2)
        if shares:
            rows.append([f"{first}", *(cell(shares[name]) for name in (*SHAPES, "power"))])
    header = ["from n =", *(f"R^2 of {name}" for name in SHAPES), "of the best power of n"]
    return markdown(header, rows) if rows else "Not measured yet."


def comparisons(found: Sequence[Comparison]) -> str:
    """Every comparison that was measured, and its verdict; below, why others were not made."""
    left_out = [one for one in found if one.verdict == "not measured"]
    made = [one for one in found if one not in left_out and one.basis != EXACT]
    table = judged(made)
    if not left_out:
        return table
    why = dict.fromkeys(one.basis for one in left_out)
    return f"{table}\n\nNot made: {len(left_out)} comparisons. {'; '.join(why)}."


def judged(found: Sequence[Comparison]) -> str:
    """Comparisons with what their intervals are over, and their verdicts."""
    rows = [
        [
            one.claim,
            said(one),
            effect(one),
            one.basis,
            one.verdict,
        ]
        for one in found
    ]
    return markdown(["claim", "comparison", "effect [95 %]", "over", "verdict"], rows)


def values_of(home: ByReplica[Record], value: Callable[[Record], float]) -> dict[str, list[float]]:
    """What every run of every configuration has."""
    return {name: list(map(value, by_replica.values())) for name, by_replica in home.items()}


def mean_loss(length: int, *, is_long: bool) -> Callable[[PositionLoss], float]:
    """The mean within the training length, or beyond it."""
    part = slice(length, None) if is_long else slice(length)
    return lambda record: float(np.mean(record.mean[part]))


def share_found(length: int, *, is_long: bool) -> Callable[[list[NeedleTrial]], float]:
    """The share of whole numbers within the training length, or beyond it."""

    def share(trials: list[NeedleTrial]) -> float:
        return float(np.mean([one.is_whole for one in trials if (one.length > length) == is_long]))

    return share


def _last_tenth(curve: tuple[list[int], list[float]]) -> float:
    return float(np.mean(curve[1][-max(1, len(curve[1]) // 10) :]))


def _by_configuration(
    columns: Mapping[str, Mapping[str, Sequence[float]]], *, sign: Literal["", "+"] = ""
) -> str:
    """A row for every configuration that has a value in one of the columns."""
    rows = []
    for name, look in LOOKS.items():
        found = [column.get(name, []) for column in columns.values()]
        if runs := max(len(values) for values in found):
            rows.append([look.label, str(runs), *(cell(values, runs, sign) for values in found)])
    return markdown(["configuration", "runs", *columns], rows)


def cell(values: Sequence[float], runs: int = 0, sign: Literal["", "+"] = "") -> str:
    """The mean, and from the least to the largest; how many there are where a row has more."""
    if not values:
        return "-"
    low, mean, high = (
        f"{value:{sign}.3f}" for value in (min(values), np.mean(values), max(values))
    )
    spread = f" ({low} to {high})" if len(values) > 1 else ""
    # Not all of the row's runs were measured so far.
    fewer = f", {len(values)} of them" if len(values) < runs else ""
    return f"{mean}{spread}{fewer}"


def effect(one: Comparison) -> str:
    """With its interval and unit."""
    return "-" if one.effect is None else f"{one.interval(3)} {one.unit}"


def said(one: Comparison) -> str:
    """In words, marked where it is not the paper's."""
    return one.text + (" [ours]" if one.is_ours else "")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
