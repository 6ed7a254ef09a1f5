"""Every example runs offline and does what its first lines say, here with small settings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name, *options, home):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_transformer_of_a_hundred_lines_learns_under_both(tmp_path):
    out = run("transformer.py", "--steps", "10", home=tmp_path)
    losses = re.findall(r"^(\w+) +loss at 64: ([\d.]+), at 256: ([\d.]+)$", out, re.MULTILINE)
    assert [name for name, *_ in losses] == ["softmax", "ssmax"]
    # Ten steps are enough to leave log 256 behind.
    assert all(float(loss) < 4.5 for _, *found in losses for loss in found)
    assert len((EXAMPLES / "transformer.py").read_text().splitlines()) < 120


def test_only_s_learns_and_the_adapter_is_the_model(tmp_path):
    out = run("train_only_s.py", "--steps", "40", home=tmp_path)
    assert out.startswith("24 numbers learn")
    before, after = (
        float(re.search(rf"loss {word} ([\d.]+)", out)[1]) for word in ("before", "after")
    )
    assert after < before
    assert "loaded onto the base again, the same model" in out
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "ssmax.json",
        "ssmax.safetensors",
    ]


def test_position_loss_is_the_same_up_to_the_training_length(tmp_path):
    out = run("position_loss.py", "--length", "256", "--documents", "4", home=tmp_path)
    first, *_, last = re.findall(r"to +\d+ +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert first[0] == first[1] and last[0] != last[1]
    assert (tmp_path / "position_loss.svg").read_text().count("<svg") == 1


def test_the_needle_map_is_drawn(tmp_path):
    options = ["--length", "64", "--length", "128", "--depths", "2", "--trials", "5"]
    out = run("needle_map.py", *options, home=tmp_path)
    found = re.findall(r"^(\S+)  context +(\d+)  whole number ([\d.]+)$", out, re.MULTILINE)
    assert len(found) == 4
    assert all(float(share) > 0 for _, length, share in found if length == "64")
    assert (tmp_path / "needle_map.svg").read_text().count("<svg") == 1


def test_the_notebook_runs_and_its_figures_are_kept_inline(tmp_path):
    import nbclient
    import nbformat

    kept = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbformat.validate(kept)
    again = nbclient.NotebookClient(
        nbformat.from_dict(kept), timeout=600, kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()  # fmt: skip

    def figures(notebook):
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        return [
            "image/svg+xml" in output.get("data", {}) for cell in cells for output in cell.outputs
        ]

    assert sum(figures(kept)) == 3
    assert figures(again) == figures(kept)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_says_what_it_is(path):
    assert path.read_text().startswith('"""')
