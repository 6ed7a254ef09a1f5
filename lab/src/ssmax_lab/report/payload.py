"""A study's findings as the plain values that the page is made of."""

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ssmax_lab.analysis.findings import ByReplica, Findings, Record, Replica
from ssmax_lab.analysis.fits import fit_table
from ssmax_lab.analysis.measures import (
    accuracy_map,
    by_position,
    by_rank,
    last_seen_and_last,
    learned,
    less_softmax,
    less_softmax_by_position,
    mean_curves,
    paired,
    pooled,
    said_word,
    smoothed,
    top_score,
    usual_word,
)
from ssmax_lab.analysis.rope import first_s
from ssmax_lab.analysis.statistics import verdict_of
from ssmax_lab.configurations import MEASURED, labels, look
from ssmax_lab.configurations import called as in_words
from ssmax_lab.records import PositionLoss, Sharpness
from ssmax_lab.report.captions import CAPTIONS, CHOICES, CLAIMS, IN_PARTS, NOTES

POINTS = 200
"""Of a curve on the page."""
PAPERS_MODEL = {
    "num_layers": 12,
    "num_heads": 12,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "vocab_size": 50_257,
    "train_length": 1024,
    "rotary_dim": None,
    "window": None,
}
PAPERS_TOKENS_A_STEP = 2_097_152
"""The paper's tables 1 and 2, to tell where a study has them."""


def payload(findings: Findings, *, static: dict[str, str]) -> dict[str, Any]:
    """Collect all of the page but its looks; what was not measured is missing."""
    preset = findings.study["preset"]
    figures = {
        "2": _figure2(findings),
        "4": _figure4(findings),
        "5": _figure5(findings),
        "6": _figure6(findings),
        "7": _figure7(findings),
        "8": _figure8(findings),
    }
    return {
        "title": "Scalable-Softmax, reproduced",
        "preset": preset,
        "note": note(findings),
        "train_length": findings.train_length,
        "looks": looks(MEASURED),
        "claims": claims(findings),
        "figures": {name: figure for name, figure in figures.items() if _has_data(figure)},
        "captions": CAPTIONS,
        "static": static,
        "scales": _scales(findings),
        "sharpness": _sharpness(findings),
        "provenance": [
            {"what": what, **dataclasses.asdict(one)} for what, one in findings.provenances
        ],
        "commands": [
            *(findings.commands or [f"ssmax-lab reproduce --preset {preset}"]),
            "ssmax-lab report FOLDER  # draws this page again from its records",
        ],
        "choices": [*CHOICES, *([IN_PARTS] if findings.is_in_parts else [])],
    }


def looks(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Collect how configurations are drawn."""
    return {
        name: {key: getattr(look(name), key) for key in ("label", "colour", "dash")}
        for name in names
    }


def note(findings: Findings) -> str:
    """Say what the verdicts can and cannot tell, from the study's own settings and records."""
    study = findings.study
    preset, _, variant = study["preset"].partition(":")
    words = [word for command in findings.commands for word in shlex.split(command)]
    changed = [
        after if word == "--set" else word.removeprefix("--set=")
        for word, after in pairwise([*words, ""])
        if word == "--set" or word.startswith("--set=")
    ]
    added = []
    if study.get("tokenizer") == "gpt2-digits":
        added.append("every digit is a token")
    taught = study["pretraining"].get("data", {}).get("needle_length")
    if taught:
        added.append(
            f"pretraining mixes in documents of at most {taught} tokens with a number to be found"
        )
    elif any(one.startswith("hidden") for one in study.get("questions", "").split("+")):
        added.append("fine-tuning asks for numbers hidden in the training's text")
    sentences = [
        f"The variant {variant} of the {preset} preset." if variant else "",
        f"Changed with --set: {', '.join(dict.fromkeys(changed))}." if changed else "",
        _trained(study),
        _runs(findings.runs),
        NOTES.get(preset, ""),
        "Added to the paper's recipe, for numbers to be looked up after few tokens: "
        f"{', and '.join(added)}."
        if added
        else "",
    ]
    return " ".join(filter(None, sentences))


def _trained(study: Mapping[str, Any]) -> str:
    """Tell the model and its training; nothing where the study does not have all of it."""
    model, run = study["pretraining"]["model"], study["pretraining"].get("run", {})
    try:
        hidden_size, heads, head, rotated, window = (
            model[name] for name in ("hidden_size", "num_heads", "head_dim", "rotary_dim", "window")
        )
        head = head or hidden_size // heads
        # Of (a); what other rules learn besides is a few numbers a head.
        attention = 2 * hidden_size * head * (heads + (model["num_kv_heads"] or heads))
        block = (
            attention + 2 * head * model["qk_norm"] + 3 * hidden_size * model["intermediate_size"]
        )
        count = model["num_layers"] * (block + 2 * hidden_size) + hidden_size
        count += 2 * hidden_size * model["vocab_size"]
        theta, tokens = model["theta"], run["batch_size"] * model["train_length"]
        positions = f"rotary base {theta:,.10g} ({theta * study['theta_factor']:,.10g} in tests)"
        if rotated is not None:
            some = f"{positions} on {rotated} of a head's {head} channels"
            positions = some if rotated else "no rotary positions"
        if window:
            spared = f" but for one layer in {model['full_every']}" if model["full_every"] else ""
            positions += f", windows of {window} keys{spared}"
        is_papers = model.items() >= PAPERS_MODEL.items()
        whose = "The paper's" if is_papers else "A"
        papers = f", where the paper's have {PAPERS_TOKENS_A_STEP:,}"
        return (
            f"{whose} model of {_rounded(count)} "
            f"parameters: {model['num_layers']} layers of {heads} heads, hidden size "
            f"{hidden_size}, {positions}. It is trained for {_rounded(run['steps'] * tokens)} "
            f"tokens, {run['steps']:,} steps of {tokens:,}"
            f"{papers if is_papers and tokens < PAPERS_TOKENS_A_STEP else ''}."
        )
    except KeyError:
        return ""


def _runs(runs: Mapping[str, int]) -> str:
    """Tell how many of which configuration, the most first."""
    alike = {n: [name for name in runs if runs[name] == n] for n in sorted({*runs.values()})[::-1]}
    if len(alike) < 2:
        return "".join(f"{n} run{'s' * (n > 1)} of each configuration." for n in alike)
    told = []
    for n, names in alike.items():
        is_rest = n == min(alike) and len(names) > 1
        which = "each other configuration" if is_rest else ", ".join(map(in_words, names))
        told.append(f"{n} of {which}")
    return f"Runs: {'; '.join(told)}."


def _rounded(count: int) -> str:
    """Write three digits, in words where there are more."""
    for size, word in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{word}"
    return f"{count}"


def claims(findings: Findings) -> list[dict[str, Any]]:
    """Collect every claim with its comparisons, of which the primary ones decide it."""
    found = []
    for name, text in CLAIMS.items():
        mine = [one for one in findings.comparisons if one.claim == name]
        comparisons = [
            {key: getattr(one, key) for key in ("effect", "low", "high", "unit", "verdict")}
            | {"text": one.text + (" [ours]" if one.is_ours else ""), "basis": one.over}
            for one in mine
        ]
        found.append(
            {
                "id": name,
                "figure": int(name[1:]),
                "text": text,
                "verdict": verdict_of(name, mine),
                "comparisons": comparisons,
            }
        )
    return found


def _has_data(figure: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) and value for value in figure.values())


def _labels(found: ByReplica[Any]) -> dict[str, str]:
    """Label configurations where these runs are drawn."""
    return labels({name: len(runs) for name, runs in found.items()})


def _first(runs: Mapping[Replica, Record], name: str) -> tuple[str, Record]:
    """Return the first run of a configuration, and its label where it is drawn alone."""
    replica = min(runs)
    is_one_of_seed = [one.seed for one in runs].count(replica.seed) == 1
    which = f"seed {replica.seed}" if is_one_of_seed else str(replica)
    return f"{look(name).label}, {which}", runs[replica]


Points = tuple[Sequence[int], np.ndarray]


def _curves(curves: Mapping[str, Points], called: Mapping[str, str]) -> dict[str, Any]:
    thinned = {}
    for name, (x, y) in curves.items():
        keep = np.unique(np.linspace(0, len(x) - 1, min(POINTS, len(x))).round().astype(int))
        points = {"x": [int(x[i]) for i in keep], "y": _short(y[keep].tolist())}
        thinned[name] = {"label": called[name], **points}
    return {"curves": thinned}


def _less_softmax(
    found: ByReplica[Record],
    curve: Callable[[Sequence[tuple[Record, Record]]], Points],
    *,
    is_in_parts: bool,
) -> dict[str, Any]:
    """Subtract (a)'s losses, over the replicas that both have; nothing where there are none.

    Runs of other seeds, or of other machines, differ by more than configurations do.
    """
    pairs = paired(found)
    shown = {name: both for name, both in pairs.items() if both}
    if len(shown) < 2:
        return {}
    called = labels({name: len(both) for name, both in shown.items()})
    shared = "seed and part" if is_in_parts else "seed"
    missing = [in_words(name) for name in pairs if name not in shown]
    words = f"means over the runs that share {shared} with a run of (a)"
    left_out = f"; left out, as none of theirs does: {', '.join(missing)}" if missing else ""
    curves = {name: curve(both) for name, both in shown.items()}
    return {"less": _curves(curves, called) | {"note": words + left_out}}


def _figure2(findings: Findings) -> dict[str, Any]:
    tables, fits = {}, {}
    for replica, table in findings.tables.items():
        tables[str(replica)] = _short(table[1:])
        fits[str(replica)] = [
            {
                "name": fit.name,
                **{key: _short([getattr(fit, key)])[0] for key in ("a1", "a2", "r2")},
                "curve": _short(fit.curve),
            }
            for fit in fit_table(table)
        ]
    return {"tables": tables, "fits": fits, "first": 2}


def _figure4(findings: Findings) -> dict[str, Any]:
    found = findings.curves
    curves = {name: smoothed(*curve) for name, curve in mean_curves(found).items()}
    return _curves(curves, _labels(found)) | _less_softmax(
        found,
        lambda pairs: smoothed(*less_softmax(pairs)),
        is_in_parts=findings.is_in_parts,
    )


def _figure5(findings: Findings) -> dict[str, Any]:
    """Collect losses at the test's theta and, where that was measured, at the training's."""

    def curves(losses: ByReplica[PositionLoss]) -> dict[str, Any]:
        means = {name: by_position(list(found.values())) for name, found in losses.items()}
        return _curves(means, _labels(losses)) | _less_softmax(
            losses, less_softmax_by_position, is_in_parts=findings.is_in_parts
        )

    figure = curves(findings.position_losses) | {"theta": findings.theta}
    if findings.rope_limit is not None:
        figure["rope_limit"] = round(findings.rope_limit)
    if findings.same_theta_losses:
        theta = findings.study["pretraining"]["model"]["theta"]
        figure["same_theta"] = curves(findings.same_theta_losses) | {"theta": theta}
    return figure


def _figure6(findings: Findings) -> dict[str, Any]:
    maps, called = {}, _labels(findings.trials)
    for name, trials in pooled(findings.trials).items():
        lengths, depths, whole = accuracy_map(trials)
        first = [dataclasses.replace(trial, is_whole=trial.first_digit) for trial in trials]
        maps[name] = {
            "label": called[name],
            "lengths": lengths,
            "depths": depths,
            "whole": whole.round(4).tolist(),
            "first": accuracy_map(first)[2].round(4).tolist(),
            "trials": len(trials) // (len(lengths) * len(depths)),
        }
    return {"maps": maps}


def _figure7(findings: Findings) -> dict[str, Any]:
    heads, length, called = {}, 0, _labels(findings.papers_needle)
    for name, scores in pooled(findings.papers_needle).items():
        heads[name] = {
            "label": called[name],
            "y": _short(by_rank(scores)),
            "answer": usual_word(scores),
        }
        length = scores[0].length
    return {"heads": heads, "length": length}


def _figure8(findings: Findings) -> dict[str, Any]:
    trials, length, called = {}, 0, _labels(findings.scores)
    for name, scores in pooled(findings.scores).items():
        ranked = sorted(scores, key=lambda score: -top_score(score))
        trials[name] = {
            "label": called[name],
            "y": _short(top_score(score) for score in ranked),
            "answers": [said_word(score) for score in ranked],
        }
        length = scores[0].length
    return {"trials": trials, "length": length}


def _scales(findings: Findings) -> dict[str, Any]:
    """Collect every head's s, and b where there is one, of the first run."""
    found = {}
    for name, runs in findings.scales.items():
        label, values = _first(runs, name)
        s, b = learned(values, "s"), learned(values, "bias")
        if s and name in MEASURED:
            start = first_s(look(name).rule, findings.train_length)
            found[name] = {"label": label, "s": s, "b": b or None, "start": start}
    return found


def _sharpness(findings: Findings) -> dict[str, Any]:
    found, called = {}, _labels(findings.sharpness)
    for name, runs in findings.sharpness.items():
        records = [runs[replica] for replica in sorted(runs)]
        label, first = _first(runs, name)
        heads = _sharpness_by_head(first, findings.train_length)
        found[name] = {
            "label": called[name],
            "n": records[0].num_keys,
            "largest": _short(np.mean([record.largest for record in records], axis=(0, 1, 2))),
            "entropy": _short(np.mean([record.entropy for record in records], axis=(0, 1, 2))),
            "heads": heads and {"label": label, **heads},
        }
    return found


def _sharpness_by_head(record: Sharpness, train_length: int) -> dict[str, Any] | None:
    """Collect every head at the last n that training has seen and at the last of all."""
    places = last_seen_and_last(record, train_length)
    if places[0] == places[1]:
        return None
    grids = {
        what: [
            [_short(head[place] for head in layer) for layer in getattr(record, what)]
            for place in places
        ]
        for what in ("largest", "entropy")
    }
    return {"n": [record.num_keys[place] for place in places], **grids}


def _short(values: Iterable[float]) -> list[float | None]:
    """Five digits are more than a page can show; what is not finite it cannot show at all."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
