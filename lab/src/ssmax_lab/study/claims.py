"""The paper's claims as comparisons with numbers: what is expected, what was measured, a verdict.

A claim is never tuned to pass. Its verdict is that of its primary comparison (C5 has two, and C1
and C3 are mathematics), fixed here before a study is run; all else that is compared is printed
beside it, with its effect and interval, and decides nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.analysis.findings import ByReplica, Findings, Record, Replica
from ssmax_lab.analysis.formulas import (
    FIGURE_1_S,
    SHAPES,
    figure1_output,
    fit_table,
    ssmax_factor,
    z_max_needed,
)
from ssmax_lab.analysis.measures import (
    accuracy_at,
    last_tenth,
    mean_between,
    mean_loss,
    retrieval_accuracy,
    top_heads_score,
    top_score,
    weight_changes,
)
from ssmax_lab.analysis.statistics import (
    EXACT,
    SECONDARY,
    TOO_SMALL,
    Interval,
    Side,
    exact,
    holm,
    over_seeds,
)
from ssmax_lab.configurations import CONFIGURATIONS, CONTROL, PILOT_SEED, called
from ssmax_lab.records import Comparison, NeedleScore, Provenance, RetrievalGrid

MARGINS = {"C2": 0.02, "C4": 0.005, "C5": 0.05, "C6": 0.05, "C7": 0.05, "C8": 0.05}
"""The least difference that counts, in the unit of each claim's primary comparison; our choice."""
TAUGHT = 0.95
"""Retrieval accuracy, where it was taught, of a model that learned the task."""
UNSATURATED = (0.1, 0.9)
"""Where softmax's accuracy is outside, a cell can show neither a gain nor a loss."""
NO_VERDICT = ("quick",)
"""Presets whose model is too small to speak of the paper's claims on large ones."""
BEYOND = "beyond the training length"

Values = Mapping[str, Mapping[Replica, float]]
"""A number of every run of every configuration."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two configurations that are compared, and how in words."""

    first: str
    second: str
    text: str
    expected: Side | None = None
    """What the claim says of them, where this is its primary comparison."""
    is_papers: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """A comparison, wherever it was made."""

    claim: str
    text: str
    interval: Interval
    unit: str
    expected: Side | None = None
    is_ours: bool = False


def judge(findings: Findings, provenance: Provenance) -> list[Comparison]:
    """Make every comparison that what was measured allows."""
    results = [*_claim_1(findings), *_claim_2(findings), *_claim_3()]
    for claim in (_claim_4, _claim_5, _claim_6, _claim_7, _claim_8):
        results += claim(findings)
    is_too_small = findings.study["preset"].partition(":")[0] in NO_VERDICT
    # Primary comparisons over seeds are read together.
    p_values = [None if one.expected is None or is_too_small else one.interval.p for one in results]
    adjusted = iter(holm([p for p in p_values if p is not None]))
    made = []
    for one, p in zip(results, p_values, strict=True):
        found, p = one.interval, None if p is None else next(adjusted)
        if one.expected is None:
            verdict = SECONDARY
        elif is_too_small and found.is_measured and found.basis != EXACT:
            verdict = TOO_SMALL
        else:
            verdict = found.verdict(one.expected, margin=MARGINS.get(one.claim, 0.0), p=p)
        made.append(
            Comparison(
                claim=one.claim, text=one.text, effect=found.effect if found.is_measured else None,
                unit=one.unit, low=found.low, high=found.high, basis=found.basis, p_holm=p,
                verdict=verdict, is_ours=one.is_ours, provenance=provenance,
            )
        )  # fmt: skip
    return made


def _claim_1(findings: Findings) -> list[Result]:
    sizes = [2**power for power in range(1, 17)]
    fall = figure1_output(sizes[-1], 1.0) - figure1_output(sizes[0], 1.0)
    least = min(figure1_output(n, ssmax_factor(n)) for n in sizes)

    # What the vectors are in a model: does a head's largest weight fall with n?
    pairs = [
        Pair("b", name, f"{BEYOND} the largest weight of (b)'s heads falls less than "
             f"{called(name)}'s", is_papers=False)
        for name in ("a", CONTROL)
    ]  # fmt: skip
    length = findings.train_length
    values = _values(findings.sharpness, lambda one: float(np.mean(weight_changes(one, length))))
    return [
        Result("C1", "softmax's largest output falls between n = 2 and n = 65,536", exact(fall),
               "of the weight", "below"),
        Result("C1", "SSMax's (s = 0.43) stays above 0.8 for every n between", exact(least - 0.8),
               "over 0.8", "above"),
        *_compared("C1", "of the weight", (pairs, values)),
    ]  # fmt: skip


def _claim_2(findings: Findings) -> list[Result]:
    unexplained: dict[str, dict[Replica, float]] = {name: {} for name in (*SHAPES, "power")}
    slopes: dict[str, dict[Replica, float]] = {"slope": {}, "none": {}}
    for run, table in findings.tables.items():
        for fit in fit_table(table):
            off = np.asarray(table[1:]) - np.asarray(fit.curve)
            unexplained[fit.shape][run] = float(np.mean(off**2) / max(np.var(table[1:]), 1e-30))
            if fit.shape == "log n":
                slopes["slope"][run], slopes["none"][run] = fit.a1, 0.0
    pairs = [
        Pair("log n", "n", "log n fits the learned p_n better than n does", "below"),
        Pair("log n", "sqrt n", "log n fits the learned p_n better than sqrt n does"),
        Pair("log n", "power", "log n fits the learned p_n as well as the best power of n"),
    ]
    rises = [Pair("slope", "none", "the learned p_n rises with log n")]
    return [
        *_compared("C2", "of the variance", (pairs, unexplained)),
        *_compared("C2", "a1", (rises, slopes)),
    ]


def _claim_3() -> list[Result]:
    sizes = [10**power for power in range(1, 6)]
    steps = np.diff([z_max_needed(n, 1.0) for n in sizes])
    most = max(z_max_needed(n, ssmax_factor(n)) for n in sizes)
    return [
        Result("C3", "the z_max that softmax needs grows with every tenfold n to 100,000",
               exact(min(steps)), "a step", "above"),
        Result("C3", "the z_max that SSMax needs never exceeds 1 + 1/s",
               exact(most - (1 + 1 / FIGURE_1_S)), "over 1 + 1/s", "below"),
    ]  # fmt: skip


def _claim_4(findings: Findings) -> list[Result]:
    if findings.study["pretraining"]["data"].get("needle_length"):
        # Its training loss is half that of the needles.
        return []
    where = "in the last tenth of training"

    def below(first: str, second: str) -> Pair:
        text = f"{where} the loss of {called(first)} is below that of {called(second)}"
        return Pair(first, second, text, is_papers=False)

    pairs = [
        Pair("b", "a", f"{where} (b)'s loss is below (a)'s", "below"),
        Pair("c", "a", f"{where} (c)'s loss is below (a)'s"),
        Pair("d", "a", f"{where} (d)'s loss is below (a)'s"),
        Pair("d", "b", f"{where} (d)'s loss is the lowest: below (b)'s"),
        Pair("d", "c", f"{where} (d)'s loss is the lowest: below (c)'s"),
        Pair("c", "b", f"{where} (c)'s loss is about equal to (b)'s"),
        Pair("b", CONTROL, f"{where} (b)'s loss is below the control's"),
        *_of_controls(findings.curves, below),
    ]  # fmt: skip
    return _compared("C4", "nats", (pairs, _values(findings.curves, last_tenth)))


def _claim_5(findings: Findings) -> list[Result]:
    length, limit = findings.train_length, findings.rope_limit
    losses, same_theta = findings.position_losses, findings.same_theta_losses

    def loses_less(first: str, second: str, where: str = BEYOND, *, is_papers: bool = True) -> Pair:
        text = f"{where} {called(first)} loses less than {called(second)}"
        return Pair(first, second, text, is_papers=is_papers)

    to_4t = Pair("b", "a", "from the training length T to 4T, at the unchanged RoPE base, "
                 "(b) loses less than (a)", "below", is_papers=False)  # fmt: skip
    to_limit = Pair("b", "a", "from T to the RoPE limit, at the larger RoPE base, (b) loses less "
                    "than (a)", "below")  # fmt: skip
    far = [
        loses_less("b", "a"),
        loses_less("c", "a"),
        Pair("d", "b", f"{BEYOND} (d) is degraded: above (b)"),
        Pair("f", "b", f"{BEYOND} (f) does not quite reach (b)"),
        loses_less("f", "a"),
        loses_less("b", CONTROL),
        *_of_controls(losses, lambda first, second: loses_less(first, second, is_papers=False)),
    ]
    near = Pair("e", "a", "within the training length (e) loses more than (a)")
    far_same_theta = [
        loses_less("b", name, f"{BEYOND}, at the unchanged RoPE base,", is_papers=False)
        for name in ("a", CONTROL)
    ]
    beyond, within = (mean_loss(length, is_long=is_long) for is_long in (True, False))
    groups = [
        ([to_4t], _values(same_theta, mean_between(length, 4 * length))),
        (far, _values(losses, beyond)),
        ([near], _values(losses, within)),
        (far_same_theta, _values(same_theta, beyond)),
    ]
    if limit is not None:
        groups.insert(1, ([to_limit], _values(losses, mean_between(length, round(limit)))))
    return _compared("C5", "nats", *groups)


def _of_controls(found: Mapping[str, object], pair: Callable[[str, str], Pair]) -> list[Pair]:
    """Compare each control as its row of the table says, where it was measured."""
    return [
        pair(first, second)
        for name, one in CONFIGURATIONS.items()
        if name in found
        for first, second in (
            *((name, other) for other in one.loses_less_than),
            *((other, name) for other in one.loses_more_than),
        )
    ]


def unsaturated_cells(findings: Findings) -> list[tuple[float, int]]:
    """List the RoPE bases, times the training's, and lengths at which retrieval is compared.

    They are those that the study names, or where (a) of the pilot seed is neither near 0 nor 1.
    """
    if known := findings.study.get("cells"):
        return [(factor, length) for factor, length in known]
    pilots = [one for run, one in findings.grids.get("a", {}).items() if run.seed == PILOT_SEED]
    if not pilots or not learned_task(pilots[0]):
        return []
    least, most = UNSATURATED
    return [
        (factor, length)
        for factor, row in zip(pilots[0].base_factors, pilots[0].accuracy, strict=True)
        for length, found in zip(pilots[0].lengths, row, strict=True)
        if length > pilots[0].taught_length and least <= found <= most
    ]


def is_counted(findings: Findings, run: Replica) -> bool:
    """Tell whether a run is compared: the pilot, where there is one, is not."""
    return bool(findings.study.get("cells")) or run.seed != PILOT_SEED


def learned_task(grid: RetrievalGrid) -> bool:
    """Tell whether retrieval works at the length and the RoPE base at which it was taught."""
    return grid.accuracy[0][0] >= TAUGHT


def mean_accuracy(grid: RetrievalGrid, cells: Sequence[tuple[float, int]]) -> float:
    """Average the accuracy over cells."""
    return float(np.mean([
        grid.accuracy[grid.base_factors.index(factor)][grid.lengths.index(length)]
        for factor, length in cells
    ]))  # fmt: skip


def _claim_6_unsaturated(findings: Findings) -> list[Result]:
    """Compare retrieval at lengths at which it was not taught, of models that learned it."""
    cells = unsaturated_cells(findings)
    if not cells:
        return []
    counted: dict[str, dict[Replica, RetrievalGrid]] = {}
    for name, grids in findings.grids.items():
        trained = findings.grids.get(CONFIGURATIONS[name].base or name, {})
        counted[name] = {
            run: grid
            for run, grid in grids.items()
            if is_counted(findings, run) and run in trained and learned_task(trained[run])
        }
    where = "where softmax retrieves neither all nor nothing"

    def retrieves_more(first: str, second: str, at: str = where) -> Pair:
        text = f"{at}, {called(first)} retrieves more than {called(second)}"
        return Pair(first, second, text, is_papers=False)

    def on(some: Sequence[tuple[float, int]]) -> Values:
        return {
            name: {run: mean_accuracy(grid, some) for run, grid in found.items()}
            for name, found in counted.items()
        }

    pairs = [
        Pair("b", "a", f"{where}, (b) retrieves more than (a)", "above"),
        retrieves_more("c", "a"),
        retrieves_more("b", CONTROL),
        *_of_controls(counted, retrieves_more),
    ]
    length = findings.train_length
    parts = {
        "at the unchanged RoPE base, to T": [(f, n) for f, n in cells if f == 1 and n <= length],
        "at larger RoPE bases, to T": [(f, n) for f, n in cells if f > 1 and n <= length],
        "beyond T": [(f, n) for f, n in cells if n > length],
    }
    groups = [(pairs, on(cells))] + [
        ([retrieves_more("b", "a", f"{where}, {words}")], on(some))
        for words, some in parts.items()
        if some
    ]
    return [*_made("C6", "of the numbers", *groups), *_missed_gate(findings)]


def _missed_gate(findings: Findings) -> list[Result]:
    """Tell which configurations have seeds that did not learn the task, and count for nothing."""
    missed: list[Result] = []
    for name, grids in findings.grids.items():
        runs = [run for run in grids if is_counted(findings, run)]
        failed = [run for run in runs if not learned_task(grids[run])]
        if failed and not CONFIGURATIONS[name].base:
            text = f"{called(name)} did not learn the task where it was taught, and is left out"
            seeds = _nothing(f"{len(failed)} of {len(runs)} seeds: below {TAUGHT:g}")
            missed.append(Result("C6", text, seeds, "of the numbers", is_ours=True))
    return missed


def _claim_6(findings: Findings) -> list[Result]:
    if findings.grids:
        return _claim_6_unsaturated(findings)
    length = findings.train_length
    accuracy = _values(findings.trials, retrieval_accuracy(length, is_long=True))
    pairs = _above(f"{BEYOND} the needle retrieval accuracy of (b) is above that of {{}}")
    results = _compared("C6", "of the numbers", (pairs, accuracy))
    if of_b := findings.trials.get("b"):
        # The size nearest to ten times the training length.
        sizes = sorted({trial.length for trial in next(iter(of_b.values()))})
        nearest = min(sizes, key=lambda size: abs(size - 10 * length))
        both = {
            **_values({"b": of_b}, accuracy_at(nearest)),
            **_values({"half": of_b}, lambda _: 0.5),
        }
        text = f"the needle retrieval accuracy of (b) is above a half at {nearest:,} tokens"
        results += _compared("C6", "over a half", ([Pair("b", "half", text)], both))
    return results


def _claim_7(findings: Findings) -> list[Result]:
    pairs = _above("(b)'s top heads weigh the paper's needle more than {}'s")
    values = _values(findings.papers_needle, _mean_score(top_heads_score))
    return _compared("C7", "of the weight", (pairs, values))


def _claim_8(findings: Findings) -> list[Result]:
    pairs = _above("the top needle score of (b) is above that of {}")
    pairs += [Pair(name, "a", f"({name}) lies above (a)") for name in ("c", "d", "e", "f")]
    values = _values(findings.scores, _mean_score(top_score))
    return _compared("C8", "of the weight", (pairs, values))


def _mean_score(score: Callable[[NeedleScore], float]) -> Callable[[list[NeedleScore]], float]:
    return lambda scores: float(np.mean(list(map(score, scores))))


def _above(text: str) -> list[Pair]:
    """Expect (b) above each of the others, whose names go into the text; (a) comes first."""
    others = ("a", "c", "d", "e", "f", CONTROL)
    return [
        Pair("b", name, text.format(called(name)), "above" if name == "a" else None)
        for name in others
    ]


def _values(
    found: ByReplica[Record], value: Callable[[Record], float]
) -> dict[str, dict[Replica, float]]:
    return {
        name: {run: value(record) for run, record in by_replica.items()}
        for name, by_replica in found.items()
    }


def _compared(claim: str, unit: str, *groups: tuple[Sequence[Pair], Values]) -> list[Result]:
    """Compare pairs by their values; what nothing was measured of is left out whole."""
    made = _made(claim, unit, *groups)
    return made if any(one.interval.is_measured for one in made) else []


def _made(claim: str, unit: str, *groups: tuple[Sequence[Pair], Values]) -> list[Result]:
    # The control is ours everywhere.
    return [
        Result(
            claim, pair.text, _interval(pair, values), unit, pair.expected,
            not pair.is_papers or CONTROL in (pair.first, pair.second),
        )
        for pairs, values in groups
        for pair in pairs
    ]  # fmt: skip


def _interval(pair: Pair, values: Values) -> Interval:
    """Compare over the seeds that both have, within a part; or say why that cannot be done.

    Of a seed that several parts have the mean counts, once: it started from the same weights and
    saw the same batches in each.
    """
    both = (pair.first, pair.second)
    if failed := [called(name) for name in both if values.get(name) == {}]:
        return _nothing(f"{' and '.join(failed)} did not learn the task")
    if missing := [called(name) for name in both if name not in values]:
        verb = "was" if len(missing) == 1 else "were"
        return _nothing(f"{' and '.join(missing)} {verb} not measured")
    first, second = values[pair.first], values[pair.second]
    runs = sorted(first.keys() & second.keys())
    if not runs:
        return _nothing("no seed was measured of both, side by side")
    seeds = sorted({run.seed for run in runs})
    try:
        interval = over_seeds(*(
            [float(np.mean([one[run] for run in runs if run.seed == seed])) for seed in seeds]
            for one in (first, second)
        ))  # fmt: skip
    except UsageError as error:
        return _nothing(str(error))
    parts = len({run.part for run in runs})
    within = f" within {parts} parts" if parts > 1 else ""
    return dataclasses.replace(interval, basis=interval.basis + within)


def _nothing(why: str) -> Interval:
    return Interval(effect=math.nan, basis=why)
