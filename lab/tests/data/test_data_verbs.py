"""ssmax-lab data, as it is typed: one line for every failure, and the right exit code."""

import json
import shutil

import pytest

from ssmax_lab.data import preparation
from ssmax_lab.data.workers import run_all

pytest.importorskip("typer", reason="needs the extra 'lab'")

from ssmax_lab import cli


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preparation, "TASK_BYTES", 500)
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} " * 30)
    return tmp_path


def prepare(*options):
    return cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes", *options])


def said_last(capsys):
    """The one line of an error, behind those of progress."""
    *progress, last = capsys.readouterr().err.splitlines()
    assert all(line.startswith("part ") for line in progress)
    return last


def test_a_killed_worker_is_one_line(texts, monkeypatch, capsys):
    monkeypatch.setattr(preparation, "run_task", exit_at_once)
    assert prepare("--workers", "2") == 1
    assert said_last(capsys).startswith("ssmax-lab: a worker was killed")


def exit_at_once(task, **_):
    import os

    os._exit(9)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_tokenizer_that_cannot_encode_is_one_line(texts, capsys, workers):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}))
    made.save("words.json")
    assert prepare("--tokenizer", "words.json", "--workers", workers) == 2
    assert said_last(capsys).startswith("ssmax-lab: words.json cannot encode")


def test_ctrl_c_says_that_the_same_command_resumes(texts, monkeypatch, capsys):
    def interrupted(job, tasks, *, workers, on_result):
        run_all(job, tasks[:2], workers=1, on_result=on_result)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "run_all", interrupted)
        assert prepare() == 130
    assert said_last(capsys) == (
        "ssmax-lab: stopped; what is finished stays in tokens, and the same command resumes"
    )
    assert prepare("--workers", "1") == 0


def test_a_side_that_is_gone_is_missed(texts, capsys):
    assert prepare("--workers", "1", "--validation-fraction", "0.3") == 0
    assert cli.run(["data", "verify", "tokens"]) == 0
    # A side alone is a folder of shards like any other.
    assert cli.run(["data", "verify", "tokens/validation"]) == 0
    capsys.readouterr()
    for side in ("train", "validation"):
        shutil.move(f"tokens/{side}", "away")
        assert cli.run(["data", "verify", "tokens"]) == 2
        assert f"tokens/{side} is missing" in capsys.readouterr().err
        shutil.move("away", f"tokens/{side}")


def test_a_preparation_that_held_nothing_out_needs_no_validation(texts, capsys):
    assert prepare("--workers", "1", "--validation-fraction", "0") == 0
    assert "held out" not in capsys.readouterr().out
    assert cli.run(["data", "verify", "tokens"]) == 0


def test_it_is_told_that_no_text_was_held_out(texts, capsys):
    (texts / "one.jsonl").write_text(json.dumps({"text": "the only text"}))
    assert cli.run(["data", "prepare", "one.jsonl", "one", "--tokenizer", "bytes"]) == 0
    assert "no text was held out" in capsys.readouterr().out
