"""The site's page on exports in other engines, from tests/engines/record.json."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "engines" / "record.json"
HEAD = """# Exports in other engines

Every [form](serve.md) that `ssmax export` writes computes the same in the engines that read it, by
the engine's plain command. `hf` needs the engine's flag for remote code, or in vLLM
[the plugin](vllm.md). `make test-engines` runs this.

- The models are small, one of them trained, with an s of its own in every head, at a training
  length of 64; and SmolLM2-135M-Instruct, converted, with every s up to 20 % from the neutral one.
  The float64 log-probabilities of our own model are the reference.
- **Prefill**: three prompts of 4,000 (SmolLM2: 512), 300 and 70 tokens, the long one in chunks.
  **Steps**: 200 greedy tokens after each, the three as one batch. Largest and mean error of a
  log-probability.
- **Rounding**: the errors that it explains. Small models: of the same form by Transformers with
  this package in the same dtype, in q8_0 with the weights that the file holds. SmolLM2: of the same
  engine with the same weights as plain softmax, every head's factor held at its mean over the
  prompts; trained weights have tokens on which all engines err most, softmax or not. **Softmax**:
  the mean difference of the same model without s.
- **Choices**: greedy tokens that the reference would choose after the same text. **Prefix**: of
  the three prompts, those that are continued by the same tokens from a cached prefix.
- **Beyond the limits**: a mean error of more than twice what rounding explains and 0.00001, or a
  largest one of more than four times it and 0.0001.
- Run: what has a row, on one CPU. Not run: what has none; SGLang; vLLM, MLX and ONNX Runtime on a
  GPU; users of llama.cpp, such as Ollama. vLLM on a CPU has no attention for heads of 16, those of
  the trained run.
"""


def page() -> str:
    """Write the whole page."""
    record: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    cells = [cell for cell in record.values() if "prefill" in cell]
    lines = [HEAD]
    for (engine, form), group in groupby(cells, key=lambda cell: (cell["engine"], cell["form"])):
        lines += section(engine, form, list(group))
    return "\n".join([*lines, *others(list(record.values()))]) + "\n"


def section(engine: str, form: str, cells: list[dict[str, Any]]) -> list[str]:
    versions = ", ".join(sorted({cell["version"] for cell in cells}))
    dates = sorted({cell["date"] for cell in cells})
    return [
        f"## {engine}, `{form}`",
        "",
        f"Run with {versions} on {' and '.join(dict.fromkeys([dates[0], dates[-1]]))}.",
        "",
        "| model | dtype | prefill | steps | rounding | softmax | choices | prefix |",
        "|---|---|---|---|---|---|---|---|",
        *(row(cell) for cell in cells),
        "",
    ]


def row(cell: dict[str, Any]) -> str:
    errors = [
        f"{largest:.2g}, {mean:.1g}"
        for largest, mean in (cell["prefill"], cell["steps"], cell["allowed"])
    ]
    dtype = cell["stored"] if cell["form"] == "gguf" else cell["dtype"]
    if cell["is_default"] and cell["form"] != "gguf" and cell["stored"] != dtype:
        dtype += f", by default of {cell['stored']}"
    return (
        f"| {cell['model']} | {dtype} | {' | '.join(errors)} | {cell['softmax']:.1g} | "
        f"{cell['same_choice']} of {cell['choices']} | {cell['same_from_cached_prefix']} of 3"
        f"{'' if cell.get('agrees', True) else ', **beyond the limits**'} |"
    )


def others(cells: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Servers",
        "",
        "Three texts at the same time, 200 greedy tokens each, in float32.",
        "",
    ]
    lines += ["| server | form | model | same texts | run |", "|---|---|---|---|---|"]
    lines += [
        f"| `{cell['engine']}` {cell['version']} | `{cell['form']}` | {cell['model']} | "
        f"{cell['same_texts']} of {cell['texts']} | {cell['date']} |"
        for cell in cells
        if "texts" in cell
    ]
    lines += ["", "## Several ranks", ""]
    lines += [
        f"{cell['engine']} {cell['version']}, {cell['model']}: {cell['ranks']} ranks hold half of "
        f"s and b each and choose the same {cell['new']} tokens as one; log-probabilities within "
        f"{cell['difference']:.1g}. Run on {cell['date']}."
        for cell in cells
        if "ranks" in cell
    ]
    refused = [f"{cell['engine']}: `{cell['form']}`" for cell in cells if "refused" in cell]
    lines += [
        "",
        "## Refused",
        "",
        "By the engine, without the plugin or the flag for remote code: ",
    ]
    lines[-1] += "; ".join(refused) + "."
    lines += [
        "",
        "When written, as `ministral` and `gguf`: a bias per head, QK-norm, windows, other rules, "
        "biases of projections; as `gguf` in q8_0: rows that are no multiple of 32; SmolLM2 stored "
        "in float32, where folding changes a logit by 0.025 over 30 layers (in bfloat16 it runs).",
    ]
    return lines
