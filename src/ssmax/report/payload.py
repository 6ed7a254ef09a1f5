"""A study's findings as the plain values that the page is made of."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ssmax.records import Comparison, Fading, PositionLoss
from ssmax.report.captions import CAPTIONS, CHOICES, CLAIMS, IN_PIECES, NOTES, overall
from ssmax.report.curves import (
    accuracy_map,
    by_position,
    by_rank,
    mean_curves,
    places_beyond,
    pooled,
    said_word,
    smoothed,
    top_score,
    usual_word,
)
from ssmax.report.findings import ByReplica, Findings
from ssmax.report.fits import fit_table
from ssmax.report.style import LOOKS, labels

POINTS = 200
"""Of a curve on the page."""


def payload(findings: Findings, *, static: dict[str, str]) -> dict[str, Any]:
    """All of the page but its looks; what was not measured is missing."""
    preset = findings.study["preset"]
    called = labels(findings.runs)
    training = {name: smoothed(*curve) for name, curve in mean_curves(findings.curves).items()}
    figures = {
        "2": _figure2(findings),
        "4": _curves(training),
        "5": _figure5(findings),
        "6": _figure6(findings),
        "7": _figure7(findings),
        "8": _figure8(findings),
    }
    return {
        "title": "Scalable-Softmax, reproduced",
        "preset": preset,
        "note": NOTES.get(preset.partition(":")[0], ""),
        "train_length": findings.train_length,
        "looks": {
            name: dataclasses.asdict(look) | {"label": called.get(name, look.label)}
            for name, look in LOOKS.items()
        },
        "claims": claims(findings),
        "figures": {name: figure for name, figure in figures.items() if _has_data(figure)},
        "captions": CAPTIONS,
        "static": static,
        "scales": _scales(findings),
        "fading": _fading(findings),
        "provenance": [
            {"what": what, **dataclasses.asdict(one)} for what, one in findings.provenances
        ],
        "commands": [
            *(findings.commands or [f"ssmax reproduce --preset {preset}"]),
            "ssmax report FOLDER  # draws this page again from its records",
        ],
        "choices": [*CHOICES, *([IN_PIECES] if findings.is_in_pieces else [])],
    }


def claims(findings: Findings) -> list[dict[str, Any]]:
    """Every claim with its comparisons; a control's have no part in the verdict."""
    found = []
    for name, text in CLAIMS.items():
        mine = [one for one in findings.comparisons if one.claim == name]
        found.append(
            {
                "id": name,
                "figure": int(name[1:]),
                "text": text,
                "verdict": overall([one.verdict for one in mine if not one.is_ours]),
                "comparisons": [_comparison(one) for one in mine],
            }
        )
    return found


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "text": one.text + (" [ours]" if one.is_ours else ""),
        "effect": one.effect,
        "low": one.low,
        "high": one.high,
        "unit": one.unit,
        "basis": one.basis,
        "verdict": one.verdict,
    }


def _has_data(figure: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) and value for value in figure.values())


def _curves(curves: Mapping[str, tuple[Sequence[int], np.ndarray]]) -> dict[str, Any]:
    thinned = {}
    for name, (x, y) in curves.items():
        keep = np.unique(np.linspace(0, len(x) - 1, min(POINTS, len(x))).round().astype(int))
        thinned[name] = {"x": [int(x[i]) for i in keep], "y": _short(y[keep].tolist())}
    return {"curves": thinned}


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


def _figure5(findings: Findings) -> dict[str, Any]:
    """At the test's theta and, where that was measured, at the training's."""

    def curves(losses: ByReplica[PositionLoss]) -> dict[str, Any]:
        return _curves({name: by_position(list(found.values())) for name, found in losses.items()})

    figure = curves(findings.position_losses) | {"theta": findings.theta}
    if findings.same_theta_losses:
        theta = findings.study["pretraining"]["model"]["theta"]
        figure["same_theta"] = curves(findings.same_theta_losses) | {"theta": theta}
    return figure


def _figure6(findings: Findings) -> dict[str, Any]:
    maps = {}
    for name, trials in pooled(findings.trials).items():
        lengths, depths, whole = accuracy_map(trials)
        first = [dataclasses.replace(trial, is_whole=trial.first_digit) for trial in trials]
        maps[name] = {
            "lengths": lengths,
            "depths": depths,
            "whole": whole.round(4).tolist(),
            "first": accuracy_map(first)[2].round(4).tolist(),
            "trials": len(trials) // (len(lengths) * len(depths)),
        }
    return {"maps": maps}


def _figure7(findings: Findings) -> dict[str, Any]:
    heads, length = {}, 0
    for name, scores in pooled(findings.papers_needle).items():
        heads[name] = {"y": _short(by_rank(scores)), "answer": usual_word(scores)}
        length = scores[0].length
    return {"heads": heads, "length": length}


def _figure8(findings: Findings) -> dict[str, Any]:
    trials, length = {}, 0
    for name, scores in pooled(findings.scores).items():
        ranked = sorted(scores, key=lambda score: -top_score(score))
        trials[name] = {
            "y": _short(top_score(score) for score in ranked),
            "answers": [said_word(score) for score in ranked],
        }
        length = scores[0].length
    return {"trials": trials, "length": length}


def _scales(findings: Findings) -> dict[str, Any]:
    """Every head's s, and b where there is one, of the first run."""
    found = {}
    for name, by_seed in findings.scales.items():
        values = by_seed[min(by_seed)]
        s = [row for key, row in values.items() if key.endswith(".scale")]
        b = [row for key, row in values.items() if key.endswith(".bias")]
        if s and name in LOOKS:
            found[name] = {"s": s, "b": b or None, "start": _start(findings, name)}
    return found


def _start(findings: Findings, name: str) -> float:
    """Where s began: such that the factor, s log(n)^power, is 1 on average over n = 1..L."""
    power = {"temperature": 0.0, "sqrt_log": 0.5}.get(name, 1.0)
    log_n = np.log(np.arange(1, findings.train_length + 1))
    return findings.train_length / float((log_n**power).sum())


def _fading(findings: Findings) -> dict[str, Any]:
    found = {}
    for name, by_seed in findings.fading.items():
        records = [by_seed[seed] for seed in sorted(by_seed)]
        found[name] = {
            "n": records[0].num_keys,
            "largest": _short(np.mean([record.largest for record in records], axis=(0, 1, 2))),
            "entropy": _short(np.mean([record.entropy for record in records], axis=(0, 1, 2))),
            "heads": _fading_by_head(records[0], findings.train_length),
        }
    return found


def _fading_by_head(record: Fading, train_length: int) -> dict[str, Any] | None:
    """Every head at the last n that training has seen and at the last of all."""
    places = places_beyond(record, train_length)
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
