"""Measured results as tables in Markdown and a figure, for the README and the docs."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssmax.records import Comparison, Fading, NeedleTrial, PositionLoss
from ssmax.report.captions import EXACT
from ssmax.report.curves import places_beyond
from ssmax.report.figures import variants as variants_drawn
from ssmax.report.findings import ByReplica, Findings, Record, read_findings
from ssmax.report.fits import SHAPES, fit_table
from ssmax.report.reach import breaks_at, carries_to
from ssmax.report.style import LOOKS

HEADLINES = (
    "log n fits the learnt p_n better than n does",
    "(b) learns below (a)",
    "beyond the training length (b) loses less than (a)",
    "beyond the training length (b) finds more numbers than (a)",
    "(b)'s top heads weigh the paper's needle more than (a)'s",
    "the top needle score of (b) is above that of (a)",
    "beyond the training length the largest weight of (b)'s heads falls less than (a)'s",
)
"""What a reader wants to know first: a comparison of each claim that is measured, and fading."""
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
    made = {
        "headlines": headlines(results),
        "claims": claims(results),
        "computed": computed(results),
        "reach": reach(results),
    }
    made |= {f"variants of {base}": variants(results, base) for base in BASES}
    for name, findings in sorted(results.items()):
        made[f"{name} numbers"] = numbers(findings)
        made[f"{name} needles"] = needles(findings, lambda trial: trial.is_whole)
        made[f"{name} all digits"] = needles(
            findings, lambda trial: trial.digits_right == len(trial.number)
        )
        made[f"{name} first digits"] = needles(findings, lambda trial: trial.first_digit)
        made[f"{name} heads"] = heads(findings)
        made[f"{name} probe"] = probe(findings)
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
    """The first things to know, of the newest study of every preset."""
    shown = _newest(results)
    made = [findings.curves.get("b", {}) for findings in shown.values()]
    seeds = ["", "seeds of (b)", "", *(str(len({one.seed for one in runs})) for runs in made)]
    return _side_by_side(shown, HEADLINES, last=seeds)


def claims(results: Mapping[str, Findings]) -> str:
    """Everything that the paper says and a study measured, in the newest study of every preset."""
    shown = _newest(results)
    claim_of = {
        one.text: one.claim
        for findings in shown.values()
        for one in findings.comparisons
        if not one.is_ours and one.basis != EXACT
    }
    return _side_by_side(shown, sorted(claim_of, key=claim_of.__getitem__))


def _newest(results: Mapping[str, Findings]) -> dict[str, Findings]:
    """Of every preset, the largest first; no variants, nor what no commit holds the code of."""
    by_preset = {
        findings.study["preset"]: (name, findings)
        for name, findings in sorted(results.items())
        if ":" not in findings.study["preset"] and _is_committed(findings)
    }
    return dict(sorted(by_preset.values(), key=_largest_first))


def _side_by_side(
    shown: Mapping[str, Findings], texts: Sequence[str], *, last: Sequence[str] | None = None
) -> str:
    told = [{one.text: one for one in findings.comparisons} for findings in shown.values()]
    rows = []
    for text in texts:
        found = [by_text.get(text) for by_text in told]
        first = next((one for one in found if one is not None), None)
        if first is not None:
            rows.append([first.claim, _said(first), first.unit, *map(_short_effect, found)])
    if last is not None:
        rows.append(list(last))
    return _table(["claim", "the paper says", "unit", *map(_short_name, shown)], rows)


def _short_effect(one: Comparison | None) -> str:
    if one is None or one.verdict == "not measured":
        return "-"
    # Over documents or trials it says nothing of other seeds.
    return f"{one.interval(3)} {one.verdict}" + ", one seed" * one.basis.endswith("one seed")


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


def reach(results: Mapping[str, Findings]) -> str:
    """How far rotary positions carry, and where the loss breaks; of heads that turn as a whole."""
    rows = []
    for name, findings in sorted(results.items(), key=_largest_first):
        model, length = findings.study["pretraining"]["model"], findings.train_length
        is_plain = model["rotary_width"] is None and model["window"] is None
        if not (is_plain and _is_committed(findings)):
            continue
        factor = findings.study["theta_factor"]
        pairs = (model["head_width"] or model["width"] // model["num_heads"]) // 2
        until = carries_to(length, pairs=pairs, theta=model["theta"], factor=factor)
        broken = [
            _range([breaks_at(one.mean, length) for one in findings.position_losses[rule].values()])
            if rule in findings.position_losses
            else "-"
            for rule in ("a", "b", "c", "temperature")
        ]
        theta = f"{model['theta']:,.0f} x {factor:g}"
        rows.append([_short_name(name), f"{length:,}", theta, f"{until:,.0f}", *broken])
    header = ["study", "training length", "theta", "carries to", "(a) breaks at", "(b)", "(c)"]
    return _table([*header, "control"], rows)


def _range(places: Sequence[int | None]) -> str:
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        return "not everywhere" if known else "nowhere"
    low, high = min(known), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


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
    return _by_configuration(
        {
            "training loss, last tenth": _values(findings.curves, _last_tenth),
            f"loss within {length:,}": _values(
                findings.position_losses, _loss(length, is_long=False)
            ),
            "beyond": _values(findings.position_losses, _loss(length, is_long=True)),
            "beyond, theta unchanged": _values(
                findings.same_theta_losses, _loss(length, is_long=True)
            ),
            f"numbers found within {length:,}": _values(
                findings.trials, _found(length, is_long=False)
            ),
            "numbers found beyond": _values(findings.trials, _found(length, is_long=True)),
        }
    )


def _by_configuration(columns: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """A row for every configuration that has a value in one of the columns."""
    rows = []
    for name, look in LOOKS.items():
        found = [column.get(name, []) for column in columns.values()]
        if runs := max(len(values) for values in found):
            rows.append([look.label, str(runs), *(_cell(values, runs) for values in found)])
    return _table(["configuration", "runs", *columns], rows)


def needles(findings: Findings, is_right: Callable[[NeedleTrial], bool]) -> str:
    """The share of trials that every configuration gets right, by the size of the context."""

    def right_in(length: int) -> Callable[[list[NeedleTrial]], float]:
        return lambda trials: float(np.mean([is_right(x) for x in trials if x.length == length]))

    lengths = sorted(findings.study["needle_lengths"])
    return _by_configuration(
        {f"{length:,} tokens": _values(findings.trials, right_in(length)) for length in lengths}
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
        f"{words} at n = {n:,}": _values(findings.fading, mean_of(what, place))
        for words, what in (("largest weight", "largest"), ("entropy", "entropy"))
        for n, place in places.items()
    }
    columns["heads that fade"] = _values(findings.fading, lambda one: _faded(one, length))
    # Not every rule has one.
    with_s = {
        name: {replica: learnt for replica, learnt in home.items() if _s_of(learnt)}
        for name, home in findings.scales.items()
    }
    columns["s"] = _values(with_s, lambda learnt: float(np.mean(_s_of(learnt))))
    return _by_configuration(columns)


def _faded(record: Fading, train_length: int) -> float:
    """The share of heads whose largest weight beyond the training length loses half or more."""
    before, after = places_beyond(record, train_length)
    weights = np.asarray(record.largest)
    return float(np.mean(weights[:, :, after] <= weights[:, :, before] / 2))


def _s_of(learnt: Mapping[str, Sequence[float]]) -> list[Sequence[float]]:
    """Every layer's, a number per head."""
    return [row for name, row in learnt.items() if name.endswith(".scale")]


def probe(findings: Findings) -> str:
    """How much of the learnt p_n each shape explains, over all n and without the first of them."""
    rows = []
    for first in (2, 8, 32):
        shares: dict[str, list[float]] = {}
        for table in findings.tables.values():
            for fit in fit_table(table, first):
                shares.setdefault(fit.name if fit.name in SHAPES else "power", []).append(fit.r2)
        if shares:
            rows.append([f"{first}", *(_cell(shares[name]) for name in (*SHAPES, "power"))])
    header = ["from n =", *(f"R^2 of {name}" for name in SHAPES), "of the best power of n"]
    return _table(header, rows) if rows else "Not measured yet."


def comparisons(found: Sequence[Comparison]) -> str:
    """Every comparison that was measured, and its verdict; below, why others were not made."""
    left_out = [one for one in found if one.verdict == "not measured"]
    made = [one for one in found if one not in left_out and one.basis != EXACT]
    table = _judged(made)
    if not left_out:
        return table
    why = dict.fromkeys(one.basis for one in left_out)
    return f"{table}\n\nNot made: {len(left_out)} comparisons. {'; '.join(why)}."


def computed(results: Mapping[str, Findings]) -> str:
    """The comparisons that are mathematics, and the same in every study."""
    one = next(iter(results.values()))
    return _judged([found for found in one.comparisons if found.basis == EXACT])


def _judged(found: Sequence[Comparison]) -> str:
    rows = [
        [
            one.claim,
            _said(one),
            _effect(one),
            one.basis,
            one.verdict,
        ]
        for one in found
    ]
    return _table(["claim", "comparison", "effect [95 %]", "over", "verdict"], rows)


def _cell(values: Sequence[float], runs: int = 0) -> str:
    if not values:
        return "-"
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    # Not all of the row's runs were measured so far.
    fewer = f", {len(values)} of them" if len(values) < runs else ""
    return f"{np.mean(values):.3f}{spread}{fewer}"


def _effect(one: Comparison) -> str:
    return "-" if one.effect is None else f"{one.interval(3)} {one.unit}"


def _said(one: Comparison) -> str:
    return one.text + (" [ours]" if one.is_ours else "")


def _short_name(name: str) -> str:
    """Without its date."""
    return name.partition("_")[2] or name


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
