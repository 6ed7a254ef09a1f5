"""The text of a study: a short one is not read many times unless somebody asks for it."""

import dataclasses
import json
import subprocess
import sys
import tarfile

import pytest

from ssmax_lab import cli
from ssmax_lab.study.presets import check_source
from ssmax_lab.study.reproduction import reproduce


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("one bottle of beer")
    return tmp_path


@pytest.mark.parametrize("preset", ["gpu", "small", "small:no-rotary"])
def test_a_large_preset_without_text_is_refused_before_torch_is_loaded(home, preset):
    code = (
        "import sys; from ssmax_lab import cli; "
        "print(cli.run(sys.argv[1:]), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "reproduce", "--preset", preset],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["2", "False"]
    assert f"the {preset} preset wants a text: --text FOLDER" in done.stderr
    assert "--text embedded" in done.stderr
    assert [path.name for path in home.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    "typed",
    [
        "--preset gpu --set optim.lr=1e-4",
        "--preset small --only figure1 --only figure5",
        "--preset million",
    ],
)
def test_so_is_one_whose_options_have_to_be_read_first(home, capsys, typed):
    assert cli.run(["reproduce", *typed.split()]) == 2
    assert "--text FOLDER" in capsys.readouterr().err
    assert [path.name for path in home.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "--preset gpu --text embedded",
        "--preset small --text texts",
        "--preset gpu --text hf:NAME",
        "--preset paper",
    ],
)
def test_who_names_a_text_gets_the_plan(home, capsys, typed):
    assert cli.run(["reproduce", "--dry-run", *typed.split()]) == 0
    assert "text to learn from" in capsys.readouterr().out


def test_what_is_computed_needs_no_text(home, capsys):
    assert cli.run(["reproduce", "--preset", "gpu", "--only", "figure1"]) == 0


@pytest.mark.parametrize(
    ("typed", "word"),
    [
        ("--text nowhere", "nowhere"),
        ("--text tokens:nowhere", "nowhere"),
        ("--text texts --data tokens", "--data"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(home, capsys, typed, word):
    assert cli.run(["reproduce", *typed.split()]) == 2
    err = capsys.readouterr().err
    assert word in err and err.count("\n") == 1
    assert [path.name for path in home.iterdir()] == ["texts"]


def test_a_source_has_its_full_path(home):
    assert check_source("texts") == str(home / "texts")
    assert check_source("tokens:texts/") == f"tokens:{home / 'texts'}"
    assert check_source("embedded") == "embedded" and check_source("hf:a:b") == "hf:a:b"


@pytest.mark.usefixtures("undrawn")
def test_a_study_keeps_its_text(tiny, tokens, tmp_path):
    """Prepared from another it would be another study; its own tokens may come from anywhere."""
    study = dataclasses.replace(tiny, source=str(tmp_path / "here" / "texts"))
    folder = tmp_path / "s"
    reproduce(study, folder, figures=[1], records=tmp_path / "out" / "p.tar.xz")
    other = dataclasses.replace(study, source="embedded")
    with pytest.raises(ValueError, match="--text"):
        reproduce(other, folder, figures=[1])
    # No path of this machine goes into the records.
    with tarfile.open(tmp_path / "out" / "p.tar.xz") as packed:
        values = json.load(packed.extractfile("study.json"))
    assert values["study"]["source"] == "texts"
    reproduce(study, tmp_path / "t", figures=[1], data=tokens)
    reproduce(other, tmp_path / "t", figures=[1], data=tokens)
