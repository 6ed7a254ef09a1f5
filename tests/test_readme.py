"""README and docs do as they say: every Python block runs, prints what stands below it, and the
numbers quoted are those of the records.
"""

import contextlib
import csv
import importlib.util
import io
import math
import re
from pathlib import Path

import pytest
import torch

from ssmax_lab import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="needs vLLM; make test-engines runs it in vLLM's environment",
)
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


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


FIGURES = re.findall(
    r"^\| .+ \| `ssmax-lab (reproduce .+)` \| (\d+) \|$", (ROOT / "README.md").read_text(), re.M
)


@pytest.mark.parametrize(("typed", "minutes"), FIGURES)
def test_a_figure_takes_as_long_as_its_plan_says(typed, minutes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run([*typed.split(), "--dry-run"]) == 0
    planned = re.search(r"about (\d+):(\d+) for", capsys.readouterr().out)
    assert math.ceil(int(planned[1]) + int(planned[2]) / 60) == int(minutes)


def test_every_figure_has_its_command():
    named = {name for typed, _ in FIGURES for name in re.findall(r"figure\d", typed)}
    # The other two are computed, without a plan.
    assert named == {f"figure{number}" for number in (2, 4, 5, 6, 7, 8)}


def cost_table() -> list[str]:
    """The cost table as the records give it: the newest row of every competitor."""
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["benchmark"] == "attention_cost" and "H200" in row["device"]
        ]
    newest = {(row["shape"], row["mode"], row["competitor"]): row["ratio"] for row in rows}
    text = (ROOT / "README.md").read_text()
    header = re.search(r"\| shape \| mode \|(.*)\|\n", text).group(1)
    competitors = [name.strip() for name in header.split("|")]
    cases = dict.fromkeys((row["shape"], row["mode"]) for row in rows)
    return [
        f"| {shape} | {mode} | "
        + " | ".join(_ratio(newest.get((shape, mode, name))) for name in competitors)
        + " |"
        for shape, mode in cases
    ]


def _ratio(value: str | None) -> str:
    if value is None:
        return "-"
    return f"{float(value):.3f}" if float(value) < 2 else f"{float(value):.1f}"


def test_the_cost_table_is_that_of_the_records():
    text = (ROOT / "README.md").read_text()
    table = re.search(r"\| shape \| mode \|.*\n\|[-|]+\n((?:\|.*\n)*)", text).group(1)
    assert table.splitlines() == cost_table()
