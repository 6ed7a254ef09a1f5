"""A study's page, from its findings."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ssmax._files import write_whole
from ssmax_lab.analysis.findings import Findings
from ssmax_lab.analysis.statistics import verdict_of
from ssmax_lab.configurations import called
from ssmax_lab.records import FIGURES, PAGE
from ssmax_lab.report.captions import CAPTIONS, CHOICES, CLAIMS, IN_PARTS, NOTES
from ssmax_lab.report.explorer import explorer
from ssmax_lab.report.figures import study_figures
from ssmax_lab.report.page import document, origins
from ssmax_lab.report.style import Figure, save
from ssmax_lab.report.tables import COMPARED, NONE, Table, compared


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
    preset, _, variant = findings.study["preset"].partition(":")
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
        kicker=f"Reproduction · preset {findings.study['preset']} · {parameters(findings.study)} "
        f"parameters · training length {findings.train_length:,}",
        note=" ".join(
            filter(None, [variant and f"The variant {variant} of the preset.", NOTES.get(preset)])
        ),
        about=about(findings),
        first=named("1_in_heads", "_grid", "_retrieval"),
        recorded=recorded() if preset == "quick" else None,
        counts={word: words.count(word) for word in dict.fromkeys(words)},
        claims=told,
        figures=[
            shown(key, figure_id=f"figure-{key}", title=f"Figure {key}")
            for key in map(str, range(1, 9))
        ],
        heads=named("_s"),
        explorer={"id": "figure-explorer", "figure": explorer()},
        provenance=origins(findings.provenances),
        commands=[
            *(findings.commands or [f"ssmax-lab reproduce --preset {findings.study['preset']}"]),
            "ssmax-lab report FOLDER  # draws this page again from its records",
        ],
        choices=[*CHOICES, *([IN_PARTS] if findings.is_in_parts else [])],
    )


def recorded() -> list[dict[str, Any]]:
    """Read what the recorded GPU studies show, as `make results` wrote it."""
    text = files("ssmax_lab.report").joinpath("recorded.json").read_text(encoding="utf-8")
    return [{"what": study.pop("what"), "table": Table(**study)} for study in json.loads(text)]


def claims(findings: Findings) -> list[dict[str, Any]]:
    """Collect every claim with its comparisons, of which the primary ones decide it."""
    found = []
    for name, text in CLAIMS.items():
        mine = [one for one in findings.comparisons if one.claim == name]
        table = Table(header=COMPARED, rows=list(map(compared, mine)))
        verdict = verdict_of(name, mine)
        found.append(
            {"id": name, "figure": name[1:], "text": text, "verdict": verdict, "table": table}
        )
    return found


def about(findings: Findings) -> Table:
    """Set the study's model and training beside the paper's."""
    study, model = findings.study, findings.study["pretraining"]["model"]
    run, theta = study["pretraining"]["run"], model["theta"]
    tokens = run["batch_size"] * model["train_length"]
    head = model["head_dim"] or model["hidden_size"] // model["num_heads"]
    rotary = head if model["rotary_dim"] is None else model["rotary_dim"]
    spared = f", but for one layer in {model['full_every']}" if model["full_every"] else ""
    taught = study["pretraining"]["data"].get("needle_length")
    runs = findings.runs
    told_runs = ", ".join(f"{called(name)} {count}" for name, count in runs.items())
    if len({*runs.values()}) == 1:
        told_runs = f"{next(iter(runs.values()))} of each configuration"
    rows = [
        ("parameters", parameters(study), "162 million"),
        (
            "layers, heads, hidden size",
            f"{model['num_layers']}, {model['num_heads']}, {model['hidden_size']}",
            "12, 12, 768",
        ),
        ("training length", f"{findings.train_length:,}", "1,024"),
        (
            "RoPE base, in tests",
            f"{theta:,.10g}, {theta * study['theta_factor']:,.10g}",
            "10,000, 500,000",
        ),
        ("channels of a head that rotate", f"{rotary} of {head}", "64 of 64"),
        ("window", f"{model['window']} keys{spared}" if model["window"] else NONE, NONE),
        (
            "training",
            f"{_rounded(run['steps'] * tokens)} tokens: {run['steps']:,} steps of {tokens:,}",
            "steps of 2,097,152 tokens; their number is not stated",
        ),
        ("tokenizer", study["tokenizer"], "gpt2"),
        ("retrieval taught in pretraining", f"to {taught} tokens" if taught else NONE, NONE),
        ("questions of fine-tuning", study["questions"] or NONE, "SQuAD 2.0"),
        ("runs", told_runs or NONE, NONE),
    ]
    kept = [row for row in rows if row[1:] != (NONE, NONE)]
    return Table(header=["", "this study", "the paper"], rows=kept)


def parameters(study: Mapping[str, Any]) -> str:
    """Count the parameters of (a), in words; other rules learn a few numbers a head besides."""
    model = study["pretraining"]["model"]
    hidden_size, heads = model["hidden_size"], model["num_heads"]
    head = model["head_dim"] or hidden_size // heads
    attention = 2 * hidden_size * head * (heads + (model["num_kv_heads"] or heads))
    block = attention + 2 * head * model["qk_norm"] + 3 * hidden_size * model["intermediate_size"]
    count = model["num_layers"] * (block + 2 * hidden_size) + hidden_size
    return _rounded(count + 2 * hidden_size * model["vocab_size"])


def _rounded(count: int) -> str:
    """Write three digits, in words where there are more."""
    for size, word in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{word}"
    return f"{count}"
