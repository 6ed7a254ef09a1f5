"""README and docs do as they say: every Python block runs, prints what stands below it, and the
numbers quoted are those of the records.
"""

import contextlib
import csv
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch

import docs_site

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="needs vLLM; make test-engines runs it in vLLM's environment",
)
YARDSTICK = "Transformers, softmax (yardstick)"
BLOCK = re.compile(r"```python\n(.*?)```\n```text\n(.*?)```", re.DOTALL)


def blocks() -> list:
    found_in = []
    for page in PAGES:
        text = page.read_text()
        found = BLOCK.findall(text)
        assert len(found) == text.count("```python"), f"{page.name}: a block without its output"
        for number, (code, output) in enumerate(found, 1):
            marks = [NEEDS_VLLM] if "from vllm" in code else []
            found_in.append(pytest.param(code, output, id=f"{page.name} {number}", marks=marks))
    return found_in


@pytest.mark.parametrize(("code", "output"), blocks())
def test_a_block_prints_what_stands_below_it(code, output):
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "block", "exec"), {"__name__": "block"})
    assert printed.getvalue() == output


def test_code_fits_the_page():
    """The site shows 100 columns beside its contents."""
    for page in PAGES:
        for block in re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            assert [line for line in block.splitlines() if len(line) > 100] == [], page.name


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            # Pages that are generated with the site: its own links are checked there.
            if not link.startswith(("http", "studies/")) and link not in docs_site.GENERATED:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_figure_has_its_command():
    text = (ROOT / "docs" / "reproduce.md").read_text()
    typed = re.findall(r"^\| .+ \| `ssmax-lab (reproduce .+?)`.* \|$", text, re.M)
    named = {name for command in typed for name in re.findall(r"figure\d", command)}
    assert named == {f"figure{number}" for number in range(1, 9)}


COST = {
    "`ssmax_attention` and SDPA, forward and backward, 32 x 1,024 tokens, 12 heads": (
        "wall_clock", "B32 T1024 H12/12 D64", "forward+backward, eager",
        "softmax (yardstick)", "ours",
    ),
    "the same, 1 x 128 tokens: launches": (
        "wall_clock", "B1 T128 H12/12 D64", "forward+backward, eager", "softmax (yardstick)",
        "ours",
    ),
    "training step of the paper's model, 64 x 1,024 tokens": (
        "train_speed", "12x768 B64 T1024", "step", "ours, softmax", "ours, ssmax",
    ),
    "training step of a converted Llama 1.1 B, 8 x 4,096 tokens": (
        "hf_cost", "Llama 1.1 B B8 T4096", "train a step", YARDSTICK, "converted",
    ),
    "its decoding step, 8 prompts, static cache, compiled": (
        "hf_cost", "Llama 1.1 B B8 T4096", "decode a token, static cache, compiled", YARDSTICK,
        "converted",
    ),
}  # fmt: skip
"""Rows of the cost table: benchmark, shape, mode, and the two that are compared."""


def test_the_cost_table_is_that_of_the_records():
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if "H200" in row["device"]]
    newest = {
        (row["benchmark"], row["shape"], row["mode"], row["competitor"]): float(row["milliseconds"])
        for row in rows
    }
    text = (ROOT / "README.md").read_text()
    table = re.search(r"<!-- cost.*\n\|.*\n\|[-|]+\n((?:\|.*\n)*)", text).group(1)
    expected = []
    for title, (*case, plain, ours) in COST.items():
        times = [newest[*case, competitor] for competitor in (plain, ours)]
        cells = [f"{time:.1f}" if time > 10 else f"{time:.2f}" for time in times]
        expected.append(f"| {title} | {cells[0]} ms | {cells[1]} ms |")
    assert table.splitlines() == expected


def test_readme_and_docs_are_short():
    def words(pages):
        return sum(len(page.read_text().split()) for page in pages)

    assert words([ROOT / "README.md"]) <= 1_100
    assert words((ROOT / "docs").glob("*.md")) <= 25_000
    assert words([ROOT / "docs" / "results.md"]) <= 1_500


def test_shares_of_split_attention_are_those_of_the_records():
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["benchmark"] == "context_parallel"]
    newest = {(row["shape"], row["competitor"]): row for row in rows}
    line = (
        r"^\| ([\d,]+) \| (\d+) \| (\S+) of (\d+) \| (\S+) ms \| (\S+) ms \| (\S+) \| (.+) MiB \|$"
    )
    page = (ROOT / "docs" / "context-parallel.md").read_text()
    table = re.findall(line, page, re.MULTILINE)
    assert len(table) == len({shape for shape, _ in newest})
    for tokens, ranks, heads, width, softmax, ours, ratio, memory in table:
        shape = f"T{tokens.replace(',', '')} of {ranks} ranks H{heads} D{width}"
        yardstick, found = newest[shape, "softmax (yardstick)"], newest[shape, "ours"]
        assert f"{float(yardstick['milliseconds']):.1f}" == softmax
        assert f"{float(found['milliseconds']):.1f}" == ours
        assert f"{float(found['ratio']):.2f}" == ratio
        assert f"{float(found['peak_mib']):.0f}" == memory
