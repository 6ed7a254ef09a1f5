"""A study's page, from its findings."""

import json
import shlex
from collections.abc import Mapping
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from ssmax._files import write_whole
from ssmax_lab.analysis.findings import Findings
from ssmax_lab.analysis.statistics import verdict_of
from ssmax_lab.configurations import called
from ssmax_lab.records import FIGURES, PAGE, Comparison
from ssmax_lab.report.captions import CAPTIONS, CHOICES, CLAIMS, IN_PARTS, NOTES
from ssmax_lab.report.figures import study_figures
from ssmax_lab.report.page import document, explorer_part, origins
from ssmax_lab.report.style import Figure, Table, save
from ssmax_lab.report.tables import NONE, number

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


def study_page(
    findings: Findings, figures: Mapping[str, Figure], drawings: Mapping[str, str]
) -> str:
    """Make the page of a study; what was not measured is said to be missing.

    `drawings` are the figures as SVG, for a browser without JavaScript.
    """
    preset = findings.study["preset"]
    told = claims(findings)
    words = [claim["verdict"].partition(" larger than ")[0] for claim in told]

    def shown(key: str, *, figure_id: str, title: str = "") -> dict[str, Any]:
        figure, svg = figures.get(key), drawings.get(key, "")
        caption = CAPTIONS[key]
        return {"id": figure_id, "number": title, "figure": figure, "svg": svg, "caption": caption}

    def named(*names: str) -> list[dict[str, Any]]:
        return [shown(name, figure_id=f"figure{name}") for name in names if name in figures]

    return document(
        "Scalable-Softmax, reproduced",
        sections=SECTIONS,
        kicker=f"Reproduction · preset {preset} · training length {findings.train_length:,}",
        note=note(findings),
        first=named("1_in_heads", "_grid", "_retrieval"),
        recorded=recorded() if preset.partition(":")[0] == "quick" else None,
        counts={word: words.count(word) for word in dict.fromkeys(words)},
        claims=told,
        figures=[
            shown(key, figure_id=f"figure-{key}", title=f"Figure {key}")
            for key in map(str, range(1, 9))
        ],
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
    added = ["every digit is a token"] if study["tokenizer"] == "gpt2-digits" else []
    if taught := study["pretraining"]["data"].get("needle_length"):
        added.append(
            f"pretraining mixes in documents of at most {taught} tokens with a number to be found"
        )
    elif any(one.startswith("hidden") for one in study["questions"].split("+")):
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
    """Tell the model and its training."""
    model, steps = study["pretraining"]["model"], study["pretraining"]["run"]["steps"]
    theta, tokens = (
        model["theta"],
        study["pretraining"]["run"]["batch_size"] * model["train_length"],
    )
    positions = f"rotary base {theta:,.10g} ({theta * study['theta_factor']:,.10g} in tests)"
    if model["rotary_dim"] == 0:
        positions = "no rotary positions"
    elif model["rotary_dim"] is not None:
        head = model["head_dim"] or model["hidden_size"] // model["num_heads"]
        positions += f" on {model['rotary_dim']} of a head's {head} channels"
    if model["window"]:
        spared = f" but for one layer in {model['full_every']}" if model["full_every"] else ""
        positions += f", windows of {model['window']} keys{spared}"
    is_papers = model.items() >= PAPERS_MODEL.items()
    whose = "The paper's" if is_papers else "A"
    fewer = f", where the paper's have {PAPERS_TOKENS_A_STEP:,}"
    return (
        f"{whose} model of {parameters(study)} "
        f"parameters: {model['num_layers']} layers of {model['num_heads']} heads, hidden size "
        f"{model['hidden_size']}, {positions}. It is trained for {_rounded(steps * tokens)} "
        f"tokens, {steps:,} steps of {tokens:,}"
        f"{fewer if is_papers and tokens < PAPERS_TOKENS_A_STEP else ''}."
    )


def _runs(runs: Mapping[str, int]) -> str:
    """Tell how many of which configuration, the most first."""
    alike = {n: [name for name in runs if runs[name] == n] for n in sorted({*runs.values()})[::-1]}
    if len(alike) < 2:
        return "".join(f"{n} run{'s' * (n > 1)} of each configuration." for n in alike)
    told = []
    for n, names in alike.items():
        is_rest = n == min(alike) and len(names) > 1
        which = "each other configuration" if is_rest else ", ".join(map(called, names))
        told.append(f"{n} of {which}")
    return f"Runs: {'; '.join(told)}."


def _rounded(count: int) -> str:
    """Write three digits, in words where there are more."""
    for size, word in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{word}"
    return f"{count}"
