"""Measured results as tables in Markdown, for the README and the docs."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.analysis.findings import Findings, read_findings
from ssmax_lab.analysis.formulas import breaks_at
from ssmax_lab.analysis.measures import Item, differences, last_tenth, mean_between, paired
from ssmax_lab.analysis.statistics import EXACT, SECONDARY, over_seeds
from ssmax_lab.configurations import look
from ssmax_lab.records import Comparison
from ssmax_lab.report.results_figures import MORE_THAN_HELD, MORE_THAN_SOFTMAX
from ssmax_lab.report.study_page import parameters
from ssmax_lab.report.study_tables import (
    cell,
    comparisons,
    heads,
    judged,
    needles,
    numbers,
    probe,
    stretches,
)
from ssmax_lab.report.tables import effect, markdown, said

SHORT: dict[str, str] = {
    "log n fits the learned p_n better than n does": "R^2 of n less R^2 of log n, fitted to p_n",
    "in the last tenth of training (b)'s loss is below (a)'s": "training loss, last tenth, nats",
    "from the training length T to 4T, at the unchanged RoPE base, (b) loses less than (a)": (
        "loss from T to 4T, base unchanged, nats"
    ),
    "from T to the RoPE limit, at the larger RoPE base, (b) loses less than (a)": (
        "loss from T to the RoPE limit, larger base, nats"
    ),
    "beyond the training length the needle retrieval accuracy of (b) is above that of (a)": (
        "needle retrieval accuracy beyond T"
    ),
    "(b)'s top heads weigh the paper's needle more than (a)'s": (
        "paper's needle: weight of the top heads"
    ),
    "the top needle score of (b) is above that of (a)": "random needles: weight of the top head",
    "beyond the training length the largest weight of (b)'s heads falls less than (a)'s": (
        "largest weight kept beyond T: how much less of it is lost"
    ),
}
"""What a reader wants to know first, the primary comparisons and the heads; and their titles where
there is little room."""
HEADLINES = tuple(SHORT)
IN_SHORT = (HEADLINES[3], HEADLINES[2], HEADLINES[1])
"""What the README says of (b) less (a)."""
VARIED = {
    "loss from T to 4T, unchanged RoPE base, (b) - (a), nats": HEADLINES[2],
    "from T to the RoPE limit, larger base": HEADLINES[3],
    "beyond T, larger base": "beyond the training length (b) loses less than (a)",
    "needle retrieval accuracy beyond T": HEADLINES[4],
}
"""What is looked at when something is varied, by the title of its column."""
RETRIEVAL = {
    "(b) less (a)": MORE_THAN_SOFTMAX["b"],
    "constant less (a)": MORE_THAN_SOFTMAX["constant"],
    "(b) less n held": MORE_THAN_HELD,
}
"""What is compared where retrieval can fail, by the title of its column."""
BASES = ("quick", "small")
"""Presets of which something is varied."""
LARGEST_FIRST = ("paper", "gpu", "small", "million", "quick")


def read_results(folder: Path) -> dict[str, Findings]:
    """Every study of a folder of results, by its folder's name."""
    return {path.parent.name: read_findings(path.parent) for path in folder.glob("*/study.json")}


def tables(results: Mapping[str, Findings]) -> dict[str, str]:
    """All tables by the name that a document calls them by."""
    made = {
        "in short": in_short(results),
        "headlines": headlines(results),
        "losses": losses(results),
        "retrieval": retrieval(results),
        "scales": scales(results),
        "claims": claims(results),
        "computed": computed(results),
        "RoPE limit": rope_limits(results),
        "RoPE base scaling": base_scaling(results),
    }
    made |= {f"variants of {base}": variants(results, base) for base in BASES}
    for name, findings in sorted(results.items()):
        made[f"{name} numbers"] = numbers(findings)
        made[f"{name} stretches"] = stretches(findings)
        made[f"{name} needles"] = needles(findings, lambda trial: trial.is_whole)
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
            raise UsageError(f"there is no table {match[2]!r}; there are: {', '.join(made)}")
        return f"{match[1]}\n{made[match[2]]}\n{match[3]}"

    marks = r"(<!-- results: (.+?) -->)\n.*?\n?(<!-- end of results -->)"
    return re.sub(marks, anew, text, flags=re.DOTALL)


def headlines(results: Mapping[str, Findings]) -> str:
    """The first things to know, of the newest study of every preset that gives verdicts."""
    shown = _with_verdicts(results)
    rows = [[one.claim, SHORT[one.text], *cells] for one, cells in _beside(shown, HEADLINES)]
    return markdown(
        ["claim", "primary comparison, (b) SSMax less (a) softmax", *map(_short_name, shown)], rows
    )


def in_short(results: Mapping[str, Findings]) -> str:
    """Tabulate three effects in the newest studies that give verdicts."""
    shown = _with_verdicts(results)
    rows = [[SHORT[one.text], *cells] for one, cells in _beside(shown, IN_SHORT)]
    return markdown(["(b) SSMax less (a) softmax", *map(_short_name, shown)], rows)


def claims(results: Mapping[str, Findings]) -> str:
    """Everything that the paper says and a study measured, in the newest study of every preset."""
    shown = _newest(results)
    claim_of = {
        one.text: one.claim
        for findings in shown.values()
        for one in findings.comparisons
        if one.basis != EXACT and not (one.is_ours and one.verdict == SECONDARY)
    }
    found = _beside(shown, sorted(claim_of, key=claim_of.__getitem__))
    rows = [[one.claim, said(one), one.unit, *cells] for one, cells in found]
    return markdown(["claim", "the paper says", "unit", *map(_short_name, shown)], rows)


def _beside(
    shown: Mapping[str, Findings], texts: Sequence[str]
) -> Iterator[tuple[Comparison, list[str]]]:
    """Give each comparison that a study has, and its effect in all of them."""
    for text in texts:
        found = [_by_text(findings).get(text) for findings in shown.values()]
        if first := next(filter(None, found), None):
            yield first, list(map(_short_effect, found))


def losses(results: Mapping[str, Findings]) -> str:
    """Tabulate the loss of (a) and of (b) by octave, mean over the seeds that have both."""
    octaves = {"T/2 to T": (0.5, 1), "T to 2T": (1, 2), "2T to 4T": (2, 4)}
    rows = []
    for name, findings in _with_verdicts(results).items():
        length, larger = findings.train_length, f"base x {findings.study['theta_factor']:g}"
        homes = {"base unchanged": findings.same_theta_losses, larger: findings.position_losses}
        for base, home in homes.items():
            pairs = paired(home).get("b", [])
            if any(len(one.mean) < 4 * length for pair in pairs for one in pair) or not pairs:
                continue
            cells = []
            for start, stop in octaves.values():
                mean = mean_between(int(start * length), stop * length)
                a, b = (np.mean([mean(one) for one in ones]) for ones in zip(*pairs, strict=True))
                cells.append(f"{a:.3f}, {b:.3f}")
            rows.append([f"{_short_name(name)}, {base}", str(len(pairs)), *cells])
    return markdown(["loss in nats: (a), (b)", "seeds", *octaves], rows)


def retrieval(results: Mapping[str, Findings]) -> str:
    """Tabulate needle retrieval accuracy in the studies in which it can fail."""
    rows = []
    for name, findings in sorted(results.items(), key=_largest_first):
        if findings.grids:
            told = _by_text(findings)
            cells = [_short_effect(told.get(text)) for text in RETRIEVAL.values()]
            rows.append([_short_name(name), told[MORE_THAN_SOFTMAX["b"]].basis, *cells])
    return markdown(["study", "over", *RETRIEVAL], rows)


def scales(results: Mapping[str, Findings]) -> str:
    """Tabulate what configurations with settings of their own change, against (a)."""
    header = ["less (a), nats", "training loss, last tenth", "T to 4T, base unchanged",
              "T to the RoPE limit, larger base"]  # fmt: skip
    rows = []
    for findings in results.values():
        if not any(look(name).settings for name in findings.curves) or not findings.rope_limit:
            continue
        length, limit = findings.train_length, round(findings.rope_limit)
        less = (
            differences(findings.curves, _less(last_tenth)),
            differences(findings.same_theta_losses, _less(mean_between(length, 4 * length))),
            differences(findings.position_losses, _less(mean_between(length, limit))),
        )
        rows += [
            [look(name).label, *(_over_seeds(one.get(name)) for one in less)]
            for name in findings.curves
            if name != "a"
        ]
    return markdown(header, rows)


def _less(value: Callable[[Item], float]) -> Callable[[Item, Item], float]:
    return lambda base, own: value(own) - value(base)


def _over_seeds(less: Sequence[float] | None) -> str:
    if not less:
        return "-"
    found = over_seeds(less, [0.0] * len(less))
    if found.low is None or found.high is None:
        return f"{found.effect:+.3f}, {found.basis}"
    return f"{found.effect:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _by_text(findings: Findings) -> dict[str, Comparison]:
    return {one.text: one for one in findings.comparisons}


def recorded(results: Mapping[str, Findings]) -> str:
    """Write the headlines of the newest GPU studies for the pages of smaller ones, as JSON."""
    told = []
    for name, findings in _newest(results).items():
        if findings.study["preset"] not in ("gpu", "small"):
            continue
        by_text = _by_text(findings)
        rows = [
            [said(by_text[text]), effect(by_text[text]), by_text[text].verdict]
            for text in HEADLINES
            if text in by_text and by_text[text].effect is not None
        ]
        size = parameters(findings.study)
        what = f"{_short_name(name)}: {size} parameters, T = {findings.train_length:,}"
        told.append({"what": what, "header": ["comparison", "effect", "verdict"], "rows": rows})
    return json.dumps(told, indent=1) + "\n"


def _with_verdicts(results: Mapping[str, Findings]) -> dict[str, Findings]:
    """Leave `quick`, whose model is too small, out where there is another preset.

    Studies of retrieval alone have a table of their own.
    """
    newest = _newest(results)
    large = {
        name: one
        for name, one in newest.items()
        if one.study["preset"] != "quick" and not one.grids
    }
    return large or newest


def _newest(results: Mapping[str, Findings]) -> dict[str, Findings]:
    """Of every preset, the largest first; no variants, nor what no commit holds the code of."""
    by_preset = {
        findings.study["preset"]: (name, findings)
        for name, findings in sorted(results.items())
        if ":" not in findings.study["preset"] and _is_committed(findings)
    }
    return dict(sorted(by_preset.values(), key=_largest_first))


def _short_effect(one: Comparison | None, *, has_verdict: bool = True) -> str:
    """Write the effect with its interval and a primary verdict, or of how few seeds it is."""
    if one is None or one.effect is None:
        return "-"
    if has_verdict and one.verdict != SECONDARY:
        return f"{one.interval(3)} {one.verdict}"
    return one.interval(3) + (f", {one.basis}" if one.low is None else "")


def _largest_first(result: tuple[str, Findings]) -> tuple[int, str]:
    name, findings = result
    preset, _, _ = findings.study["preset"].partition(":")
    return LARGEST_FIRST.index(preset), name


def _is_committed(findings: Findings) -> bool:
    return not any(here.commit.endswith("+") for _, here in findings.provenances)


def variants(results: Mapping[str, Findings], base: str) -> str:
    """What becomes of (b) against (a) where position code, windows or size are varied."""
    found = {}
    for _, findings in sorted(results.items()):
        preset, _, variant = findings.study["preset"].partition(":")
        if preset == base and _is_committed(findings) and findings.position_losses:
            told = _by_text(findings)
            found[variant] = [
                _short_effect(told.get(text), has_verdict=False) for text in VARIED.values()
            ]
    rows = [[variant or "as it is", *found[variant]] for variant in sorted(found)]
    return markdown(["varied", *VARIED], rows) if any(found) else "Not measured yet."


def rope_limits(results: Mapping[str, Findings]) -> str:
    """The RoPE limit, and where the loss breaks; of heads that turn as a whole."""

    def places(findings: Findings, rule: str) -> str:
        losses = [one.mean for one in findings.position_losses.get(rule, {}).values()]
        found = [breaks_at(mean, findings.train_length) for mean in losses]
        return _range(found, end=len(losses[0])) if losses else "-"

    whole = {
        name: findings
        for name, findings in results.items()
        if (model := findings.study["pretraining"]["model"])["rotary_dim"] is None
        and model["window"] is None
    }
    return _by_study(whole, "breaks at", places, ("a", "b", "c", "temperature"))


def base_scaling(results: Mapping[str, Findings]) -> str:
    """What the test's theta costs in the second half of the training length, run by run."""

    def costs(findings: Findings, rule: str) -> str:
        part = slice(findings.train_length // 2, findings.train_length)
        before = findings.same_theta_losses.get(rule, {})
        after = findings.position_losses.get(rule, {})
        both = [(before[run].mean[part], after[run].mean[part]) for run in after if run in before]
        return cell([float(np.mean(np.subtract(new, old))) for old, new in both], sign="+")

    return _by_study(results, "pays", costs, ("a", "b", "c", "e", "temperature"))


def _by_study(
    results: Mapping[str, Findings],
    what: str,
    told: Callable[[Findings, str], str],
    configurations: Sequence[str],
) -> str:
    """Something of these configurations in every study with rotary positions."""
    rows = []
    for study, findings in sorted(results.items(), key=_largest_first):
        if not findings.position_losses or findings.rope_limit is None:
            continue
        if not _is_committed(findings):
            continue
        model = findings.study["pretraining"]["model"]
        theta = f"{model['theta']:,.0f} x {findings.study['theta_factor']:g}"
        length, until = f"{findings.train_length:,}", f"{findings.rope_limit:,.0f}"
        cells = [told(findings, name) for name in configurations]
        rows.append([_short_name(study), length, theta, until, *cells])
    names = {"temperature": "control"}
    first, *others = (names.get(name, f"({name})") for name in configurations)
    header = ["study", "training length", "theta", "RoPE limit", f"{first} {what}", *others]
    return markdown(header, rows)


def _range(places: Sequence[int | None], *, end: int) -> str:
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        return "not everywhere" if known else f"not to {end:,}"
    low, high = min(known), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def computed(results: Mapping[str, Findings]) -> str:
    """The comparisons that are mathematics, and the same in every study."""
    one = next(iter(results.values()))
    return judged([found for found in one.comparisons if found.basis == EXACT])


def _short_name(name: str) -> str:
    """Without its date."""
    return name.partition("_")[2] or name
