"""A study stopped by the clock, resumed, or given something else than it was begun with."""

import dataclasses
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from ssmax_lab import cli
from ssmax_lab.analysis.findings import read_findings
from ssmax_lab.cli.study import OUT_OF_TIME
from ssmax_lab.data.preparation import prepare
from ssmax_lab.study import scheduler
from ssmax_lab.study.reproduction import report, reproduce

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.slow
def test_the_clock_stops_a_study_and_the_same_command_goes_on(
    tiny, tokens, tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO", "ssmax_lab")
    monkeypatch.setattr(scheduler, "SECONDS_TO_START", 0)
    longer = dataclasses.replace(
        tiny, pretraining=tiny.pretraining.with_overrides({"run.steps": 1_000_000})
    )
    folder, steps = tmp_path / "s", []
    # A busy machine may not come to its first step in time: then the command is given once more.
    while len(steps) < 2:
        stopped = reproduce(
            longer, folder, configurations=["a"], seeds=1, figures=[4], data=tokens,
            minutes=0.2, records=tmp_path / "p.tar.xz",
        )  # fmt: skip
        assert stopped.stopped_by == "clock" and not stopped.is_whole and not stopped.failed
        assert "the time is used" in caplog.text
        log = (folder / "logs" / "pretrain-a-0.log").read_text()
        found = re.findall(r"stopped by SIGTERM after step ([\d,]+)", log)
        steps = [int(step.replace(",", "")) for step in found]
    assert 0 < steps[0] < steps[1]
    # Nothing twice: the metrics has every step once.
    with tarfile.open(tmp_path / "p.tar.xz") as packed:
        lines = packed.extractfile("runs/a-0/metrics.jsonl").read().decode().splitlines()
    made = [line["step"] for line in map(json.loads, lines) if line["kind"] == "step"]
    assert made == list(range(1, steps[-1] + 1))


def test_a_stop_by_the_clock_has_an_exit_status_of_its_own(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(scheduler, "SECONDS_TO_START", 61)
    typed = f"reproduce --configs a --seeds 1 --only figure4 --minutes 1 --out {tmp_path / 's'}"
    assert cli.run(typed.split()) == OUT_OF_TIME
    assert "the 1 minutes are used; what was done is kept" in capfd.readouterr().err
    assert not (tmp_path / "s" / "logs").exists()


@pytest.mark.slow
def test_n_held_changes_nothing_within_the_training_length(tiny, tokens, tmp_path):
    """Nor does it train anything; beyond, and under a constant everywhere, the loss is another."""
    configurations = ["a", "b", "c", "constant", "b_held", "c_held"]
    done = reproduce(
        tiny, tmp_path / "study", configurations=configurations, seeds=1, figures=[5], data=tokens,
        workers=2,
    )  # fmt: skip
    assert done.is_whole, done.failed
    losses = {
        name: next(iter(found.values()))
        for name, found in read_findings(tmp_path / "study").position_losses.items()
    }
    assert list(losses) == configurations
    length = tiny.train_length
    for held, base in {"b_held": "b", "c_held": "c"}.items():
        assert losses[held].mean[:length] == losses[base].mean[:length]
        assert losses[held].mean[length:] != losses[base].mean[length:]
    # At n = 1 there is nothing to sharpen.
    assert losses["constant"].mean[0] == losses["a"].mean[0]
    assert losses["constant"].mean[1:length] != losses["a"].mean[1:length]
    assert losses["constant"].run == f"a-0+temperature={tiny.test_constant:.4g}@{tiny.theta:g}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"records": Path("records.zip")}, r"NAME\.tar\.xz"),
        ({"device": "tpu", "dry_run": True}, "device must be cpu or cuda, got 'tpu'"),
        ({"configurations": ["x"]}, r"there is no configuration 'x'; known: a, b, "),
    ],
)
def test_bad_input_gets_one_clear_error(tiny, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        reproduce(tiny, tmp_path / "s", **options)


def test_a_folder_holds_one_text_whatever_its_path(tiny, text, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "tokens")
    asked = {"configurations": ["a"], "seeds": 1, "figures": [4], "data": tmp_path / "tokens"}
    assert reproduce(tiny, tmp_path / "s", **asked).is_whole
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "0.txt").write_text("Milk. " * 2000)
    (tmp_path / "texts" / "1.txt").write_text("Water. " * 2000)
    prepare(str(tmp_path / "texts"), tmp_path / "tokens", tokenizer="bytes", workers=1,
            validation_fraction=0.5)  # fmt: skip
    with pytest.raises(ValueError, match="made with other tokens"):
        reproduce(tiny, tmp_path / "s", **asked)


def test_questions_are_known_by_name_and_not_by_where(tiny, tokens, tmp_path):
    asked = {"configurations": ["a"], "seeds": 1, "figures": [1], "data": tokens}
    for name in ("here", "there"):
        study = tiny.with_questions(f"{tmp_path / name / 'q.json'}+hidden:5")
        assert reproduce(study, tmp_path / "s", **asked).is_whole
    with pytest.raises(ValueError, match="holds another study"):
        reproduce(tiny.with_questions("hidden:5"), tmp_path / "s", **asked)


@pytest.mark.slow
def test_a_study_goes_on_with_what_a_run_may_change(tiny, tokens, tmp_path):
    asked = {"configurations": ["a"], "seeds": 1, "figures": [4], "data": tokens}
    assert reproduce(tiny, tmp_path / "s", **asked).is_whole
    how = tiny.with_settings({"run.on_nonfinite": "skip", "run.micro_batch": 1})
    assert reproduce(how, tmp_path / "s", **asked).is_whole
    for other in ({"run.steps": 13}, {"optim.lr": 0.5}):
        with pytest.raises(ValueError, match="holds another study"):
            reproduce(tiny.with_settings(other), tmp_path / "s", **asked)


@pytest.mark.slow
def test_a_study_and_its_text_may_be_moved_together(tiny, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "old" / "tokens")
    asked = {"configurations": ["a"], "seeds": 1, "figures": [4]}
    assert reproduce(tiny, tmp_path / "old/s", data=tmp_path / "old/tokens", **asked).is_whole
    (tmp_path / "old").rename(tmp_path / "new")
    assert reproduce(tiny, tmp_path / "new/s", data=tmp_path / "new/tokens", **asked).is_whole


def test_records_that_cannot_be_written_are_told_when_the_page_is_there(tiny, tokens, tmp_path):
    (tmp_path / "p.tar.xz").mkdir()
    with pytest.raises(OSError, match=r"records cannot be written to .*p\.tar\.xz"):
        reproduce(tiny, tmp_path / "s", figures=[1], data=tokens, records=tmp_path / "p.tar.xz")
    assert (tmp_path / "s" / "report.html").exists()


def test_text_to_measure_on_has_the_tokens_of_the_training(tiny, text, tokens, tmp_path):
    prepare(str(text), tmp_path / "small", tokenizer="small", workers=1, validation_fraction=0.2)
    with pytest.raises(ValueError, match="prepare both with one tokenizer"):
        reproduce(tiny, tmp_path / "s", data=tokens, test=tmp_path / "small")


@pytest.mark.parametrize("key", ["run.seed=7", "data.folder=x", "model.rule=ssmax"])
def test_what_a_study_decides_is_not_set(key, tmp_path, capsys):
    typed = ["reproduce", "--dry-run", "--set", key, "--out", str(tmp_path / "s")]
    assert cli.run(typed) == 2
    assert f"{key.partition('=')[0]} differs between the runs" in capsys.readouterr().err


@pytest.mark.slow
def test_damaged_records_are_named_and_verdicts_made_anew(tiny, tokens, tmp_path):
    folder = tmp_path / "s"
    reproduce(tiny, folder, configurations=["a"], seeds=1, figures=[5], data=tokens)
    verdicts = folder / "verdicts.jsonl"
    there = verdicts.read_text()
    verdicts.write_text("garbage\n")
    report(folder)
    assert verdicts.read_text() == there
    for name, content, message in (
        (
            "results/a-0/sharpness.jsonl",
            "",
            r"empty; without done/loss-a-0.json",
        ),
        ("runs/a-0/metrics.jsonl", '{"kind": "st', r"metrics.jsonl has no steps"),
        ("runs/a-0/config.json", "{", r"config.json is not the record of a run"),
    ):
        before = (folder / name).read_text()
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            report(folder)
        (folder / name).write_text(before)
