"""A study's figures and its page, from its findings."""

import json
import shlex
from collections.abc import Callable, Mapping
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ssmax._files import write_whole
from ssmax_lab.analysis.figure_inputs import (
    FIGURE_1_S,
    FIGURE_3_SIZES,
    figure1_output,
    ssmax_factor,
    z_max_needed,
)
from ssmax_lab.analysis.findings import Findings
from ssmax_lab.analysis.fits import fit_table
from ssmax_lab.analysis.measures import (
    last_tenth,
    pooled,
    retrieval_accuracy,
    usual_word,
    values_of,
)
from ssmax_lab.analysis.statistics import verdict_of
from ssmax_lab.configurations import called as in_words
from ssmax_lab.configurations import look
from ssmax_lab.records import FIGURES, PAGE, Comparison
from ssmax_lab.report import figures as drawn
from ssmax_lab.report.captions import CAPTIONS, CHOICES, CLAIMS, IN_PARTS, NOTES, PAPER
from ssmax_lab.report.page import document, explorer_part, origins
from ssmax_lab.report.style import Figure, Table, save
from ssmax_lab.report.tables import NONE, number, percent

SECTIONS = {
    "shows": "This run",
    "verdicts": "Claims",
    "figures": "Figures",
    "heads": "Heads",
    "explorer": "Explorer",
    "provenance": "Provenance",
}
CITATION = """@article{nakanishi2025scalable,
  title   = {Scalable-Softmax Is Superior for Attention},
  author  = {Nakanishi, Ken M.},
  journal = {arXiv preprint arXiv:2501.19399},
  year    = {2025}
}"""
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
HEADER = ("comparison", "effect", "95 % interval", "over", "verdict")


def draw(findings: Findings, folder: Path) -> Path:
    """Draw everything that can be drawn, and return the page."""
    figures = study_figures(findings)
    drawings = {
        name: save(figure, folder / FIGURES, f"figure{name}") for name, figure in figures.items()
    }
    write_whole(folder / PAGE, study_page(findings, figures, drawings))
    return folder / PAGE


def study_figures(findings: Findings) -> dict[str, Figure]:
    """Define the figures of what was measured, by number or name."""
    length = findings.train_length
    model, factor = findings.study["pretraining"]["model"], findings.study["theta_factor"]
    bases = {
        f"RoPE base x {factor:g} at test time": findings.position_losses,
        "unchanged RoPE base": findings.same_theta_losses,
    }
    by_base = {base: found for base, found in bases.items() if found}
    if factor == 1 or not model["theta"]:
        by_base = {"": findings.position_losses} if findings.position_losses else {}
    limits = dict.fromkeys(by_base, None) | {next(iter(by_base), ""): findings.rope_limit}
    every: dict[str, Callable[[], Figure | None]] = {
        "1": drawn.figure1,
        "2": lambda: drawn.figure2(findings.tables) if findings.tables else None,
        "3": drawn.figure3,
        "4": lambda: drawn.figure4(findings.curves) if findings.curves else None,
        "5": lambda: (
            drawn.figure5(by_base, train_length=length, rope_limits=limits) if by_base else None
        ),
        "6": lambda: drawn.figure6(pooled(findings.trials)) if findings.trials else None,
        "7": lambda: (
            drawn.figure7(pooled(findings.papers_needle)) if findings.papers_needle else None
        ),
        "8": lambda: drawn.figure8(pooled(findings.scores)) if findings.scores else None,
        "1_in_heads": lambda: (
            drawn.sharpness(findings.sharpness, train_length=length) if findings.sharpness else None
        ),
        "_retrieval": lambda: (
            drawn.retrieval(findings.trials, train_length=length) if findings.trials else None
        ),
        "_grid": lambda: (
            drawn.retrieval_grid(findings.grids, train_length=length) if findings.grids else None
        ),
        "_heads": lambda: drawn.sharpness_by_head(findings.sharpness, train_length=length),
        "_s": lambda: drawn.scales(findings.scales, train_length=length),
    }
    made = {name: make() for name, make in every.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def study_page(
    findings: Findings, figures: Mapping[str, Figure], drawings: Mapping[str, str]
) -> str:
    """Make the page of a study; what was not measured is said to be missing.

    `drawings` are the figures as SVG, for a browser without JavaScript.
    """
    preset = findings.study["preset"]
    told = claims(findings)
    words = [claim["verdict"].partition(" larger than ")[0] for claim in told]
    paper = beside_paper(findings)
    numbered = [
        {
            "id": f"figure-{key}",
            "number": f"Figure {key}",
            "figure": figures.get(key),
            "svg": drawings.get(key, ""),
            "caption": CAPTIONS[key],
            "paper": paper.get(key),
        }
        for key in map(str, range(1, 9))
    ]

    def named(*names: str) -> list[dict[str, Any]]:
        return [
            {
                "id": f"figure{name}",
                "figure": figures[name],
                "svg": drawings[name],
                "caption": CAPTIONS[name],
            }
            for name in names
            if name in figures
        ]

    return document(
        "Scalable-Softmax, reproduced",
        sections=SECTIONS,
        kicker=f"Reproduction · preset {preset} · training length {findings.train_length:,}",
        note=note(findings),
        first=named("1_in_heads", "_grid", "_retrieval"),
        recorded=recorded() if preset.partition(":")[0] == "quick" else None,
        counts={word: words.count(word) for word in dict.fromkeys(words)},
        claims=told,
        figures=numbered,
        heads=named("_heads", "_s"),
        explorer=explorer_part(),
        provenance=origins(findings.provenances),
        commands=[
            *(findings.commands or [f"ssmax-lab reproduce --preset {preset}"]),
            "ssmax-lab report FOLDER  # draws this page again from its records",
        ],
        choices=[*CHOICES, *([IN_PARTS] if findings.is_in_parts else [])],
        citation=CITATION,
    )


def recorded() -> list[dict[str, Any]]:
    """Read what the recorded GPU studies show, as `make results` wrote it."""
    text = files("ssmax_lab.report").joinpath("recorded.json").read_text(encoding="utf-8")
    return [
        {"what": study["what"], "table": Table(header=study["header"], rows=study["rows"])}
        for study in json.loads(text)
    ]


def claims(findings: Findings) -> list[dict[str, Any]]:
    """Collect every claim with its comparisons, of which the primary ones decide it."""
    found = []
    for name, text in CLAIMS.items():
        mine = [one for one in findings.comparisons if one.claim == name]
        table = Table(header=HEADER, rows=list(map(_comparison, mine)))
        verdict = verdict_of(name, mine)
        found.append(
            {"id": name, "figure": name[1:], "text": text, "verdict": verdict, "table": table}
        )
    return found


def _comparison(one: Comparison) -> list[str]:
    effect = NONE if one.effect is None else f"{number(one.effect, 3)} {one.unit}"
    is_known = one.low is not None and one.high is not None
    interval = f"{number(one.low, 3)} to {number(one.high, 3)}" if is_known else NONE
    return [one.text + (" [ours]" if one.is_ours else ""), effect, interval, one.over, one.verdict]


def beside_paper(findings: Findings) -> dict[str, Table]:
    """Put the paper's values, where they are known, beside those of this study."""
    ours = _ours(findings)
    return {
        key: Table(
            header=["", "the paper", "this study"],
            rows=[[what, papers, ours.get((key, what), NONE)] for what, papers in rows.items()],
        )
        for key, rows in PAPER.items()
    }


def _ours(findings: Findings) -> dict[tuple[str, str], str]:
    """Compute this study's values of what `PAPER` names."""
    length, study = findings.train_length, findings.study
    model, run = study["pretraining"]["model"], study["pretraining"].get("run", {})
    found = {
        ("1", "s"): f"{FIGURE_1_S}",
        ("1", "softmax, largest output at n = 65,536"): f"{figure1_output(65_536, 1.0):.4f}",
        ("1", "SSMax, largest output at n = 65,536"): (
            f"{figure1_output(65_536, ssmax_factor(65_536)):.4f}"
        ),
        ("3", "SSMax, lead over 1 for an output of a half"): " to ".join(
            f"{z_max_needed(n, ssmax_factor(n)) - 1:.2f}" for n in (10, FIGURE_3_SIZES[-1])
        ),
        ("4", "tokens a step"): (
            f"{run['batch_size'] * length:,}" if "batch_size" in run else NONE
        ),
        ("5", "training length"): f"{length:,}",
        ("5", "RoPE base at test time, times that in training"): f"{study['theta_factor']:g}",
    }
    if findings.tables:
        fits = [fit for table in findings.tables.values() for fit in fit_table(table)]
        shares = {
            shape: float(np.mean([fit.r2 for fit in fits if fit.shape == shape]))
            for shape in ("log n", "power")
        }
        found["2", "shape of p_n"] = (
            f"log n: R² {shares['log n']:.3f}; best power of n: {shares['power']:.3f}"
        )
    if findings.curves:
        means = {
            name: float(np.mean(values))
            for name, values in values_of(findings.curves, last_tenth).items()
            if look(name).is_papers
        }
        order = sorted(means, key=means.__getitem__)
        found["4", "loss of the last tenth, from the lowest"] = ", ".join(
            f"({name}) {means[name]:.3f}" for name in order
        )
    if findings.position_losses:
        longest = max(
            len(one.mean) for runs in findings.position_losses.values() for one in runs.values()
        )
        found["5", "longest test"] = f"{longest:,}"
    for name in ("a", "b"):
        runs = findings.trials.get(name)
        if runs:
            trials = [trial for one in runs.values() for trial in one]
            kept = [
                n
                for n in sorted({trial.length for trial in trials})
                if np.mean([trial.is_whole for trial in trials if trial.length == n]) >= 0.5
            ]
            farthest = f"{max(kept) / length:.3g} times T" if kept else "nowhere"
            beyond = [retrieval_accuracy(length, is_long=True)(one) for one in runs.values()]
            found["6", f"({name}) finds half of the numbers or more to"] = (
                f"{farthest}; {percent(float(np.mean(beyond)))} of all beyond T"
            )
    if findings.papers_needle:
        needles = pooled(findings.papers_needle)
        found["7", "context"] = f"{next(iter(needles.values()))[0].length:,}"
        found["7", "most answers"] = "; ".join(
            f"({name}) {usual_word(one)}" for name, one in needles.items() if look(name).is_papers
        )
    if "num_layers" in model:
        found["7", "heads"] = f"{model['num_layers'] * model['num_heads']}"
    if findings.scores:
        found["8", "trials of each run"] = " to ".join(
            dict.fromkeys(
                f"{len(one)}" for runs in findings.scores.values() for one in runs.values()
            )
        )
    return found


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


def parameters(study: Mapping[str, Any]) -> str:
    """Count the parameters of (a), in words; other rules learn a few numbers a head besides."""
    model = study["pretraining"]["model"]
    hidden_size, heads = model["hidden_size"], model["num_heads"]
    head = model["head_dim"] or hidden_size // heads
    attention = 2 * hidden_size * head * (heads + (model["num_kv_heads"] or heads))
    block = attention + 2 * head * model["qk_norm"] + 3 * hidden_size * model["intermediate_size"]
    count = model["num_layers"] * (block + 2 * hidden_size) + hidden_size
    return _rounded(count + 2 * hidden_size * model["vocab_size"])


def _trained(study: Mapping[str, Any]) -> str:
    """Tell the model and its training; nothing where the study does not have all of it."""
    model, run = study["pretraining"]["model"], study["pretraining"].get("run", {})
    try:
        hidden_size, heads, rotated, window = (
            model[name] for name in ("hidden_size", "num_heads", "rotary_dim", "window")
        )
        head = model["head_dim"] or hidden_size // heads
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
            f"{whose} model of {parameters(study)} "
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
