"""ssmax-lab data, as it is typed: one line for every failure, and the right exit code."""

import json

import pytest

from ssmax_lab.data import preparation

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


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_tokenizer_that_cannot_encode_is_one_line(texts, capsys, workers):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}))
    made.save("words.json")
    assert prepare("--tokenizer", "words.json", "--workers", workers) == 2
    assert said_last(capsys).startswith("ssmax-lab: words.json cannot encode")


def test_ctrl_c_says_that_the_same_command_resumes(texts, monkeypatch, capsys):
    def interrupted(logger, what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "log_progress", interrupted)
        assert prepare("--workers", "1") == 130
    assert said_last(capsys) == (
        "ssmax-lab: stopped; what is finished stays in tokens, and the same command resumes"
    )
    assert prepare("--workers", "1") == 0


def test_a_side_alone_is_a_folder_of_shards_like_any_other(texts):
    assert prepare("--workers", "1", "--validation-fraction", "0.3") == 0
    assert cli.run(["data", "verify", "tokens"]) == 0
    assert cli.run(["data", "verify", "tokens/validation"]) == 0


def test_a_preparation_that_held_nothing_out_needs_no_validation(texts, capsys):
    assert prepare("--workers", "1", "--validation-fraction", "0") == 0
    assert "held out" not in capsys.readouterr().out
    assert cli.run(["data", "verify", "tokens"]) == 0


def test_it_is_told_that_no_text_was_held_out(texts, capsys):
    (texts / "one.jsonl").write_text(json.dumps({"text": "the only text"}))
    assert cli.run(["data", "prepare", "one.jsonl", "one", "--tokenizer", "bytes"]) == 0
    assert "no text was held out" in capsys.readouterr().out
