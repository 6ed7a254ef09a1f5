"""A study from its text to its page: in processes, interrupted, again, with a job that fails."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from ssmax_lab.analysis.findings import read_study_file
from ssmax_lab.records import PositionLoss, read_jsonl
from ssmax_lab.study import reproduction
from ssmax_lab.study.jobs import tidy
from ssmax_lab.study.partial import pack
from ssmax_lab.study.plan import Job
from ssmax_lab.study.presets import Study, gpu
from ssmax_lab.study.reproduction import report, reproduce
from ssmax_lab.study.scheduler import Scheduler
from ssmax_lab.train.checkpoint import checkpoint_folder
from ssmax_lab.train.recipes import configured


@pytest.mark.slow
def test_a_study_from_text_to_page_and_again(tiny, tmp_path, capfd, caplog):
    caplog.set_level("INFO", "ssmax_lab")
    folder = tmp_path / "a study"
    done = reproduce(tiny, folder, configurations=["a", "b", "e", "f", "probe"], seeds=1, workers=2)
    assert done.is_whole and not done.failed
    assert "done  needle-e-0" in caplog.text and "pretrain-b-0: " in caplog.text
    # Every kind of job says how much of it is done, up to all of it.
    for job in ("pretrain-b-0", "finetune-b-0", "loss-b-0", "needle-b-0"):
        log = (folder / "logs" / f"{job}.log").read_text()
        shares = [
            int(at.replace(",", "")) / int(of.replace(",", ""))
            for at, of in re.findall(r"^\w+ ([\d,]+)/([\d,]+)", log, re.MULTILINE)
        ]
        assert shares[-1] == 1.0, job
    assert {one.claim for one in done.comparisons} == {f"C{number}" for number in range(1, 9)}
    assert done.page == folder / "report.html" and done.page.stat().st_size > 10_000
    for number in range(1, 9):
        assert (folder / "figures" / f"figure{number}.png").stat().st_size > 1000
    # All configurations of a seed see the same batches in the same order.
    seeds = {
        json.loads((folder / "runs" / run / "config.json").read_text())["data"]["seed"]
        for run in ("a-0", "b-0", "e-0-qa")
    }
    assert seeds == {0}
    # (e) is (a), its softmax replaced: the same run, another rule.
    config = json.loads((folder / "runs" / "e-0-qa" / "config.json").read_text())
    assert config["model"]["rule"] == "ssmax" and config["data"]["base"].endswith("a-0")

    # (f) is (a) until its switch.
    first = (folder / "runs" / "f-0" / "events.jsonl").read_text().splitlines()[0]
    switch_step = configured(tiny.pretraining, "f").switch_step
    assert 0 < switch_step == json.loads(first)["step"]
    # What was trained is a model; many runs' checkpoints would fill a disk.
    assert not list((folder / "runs").glob("*/checkpoints/*"))

    # A second time nothing is done again, and the page comes out the same.
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")}
    page = done.page.read_bytes()
    again = reproduce(tiny, folder, configurations=["a", "b", "e", "f", "probe"], seeds=1)
    assert again.is_whole and "all of it is done" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")} == before
    assert done.page.read_bytes() == page

    # More seeds are more jobs of the same study; other settings are another study.
    (folder / "done" / "finetune-b-0.json").rename(folder / "done" / "needed")
    dry = reproduce(tiny, folder, configurations=["b"], seeds=1, dry_run=True)
    assert "for 1 job, " in capfd.readouterr().out and not dry.is_whole
    (folder / "done" / "needed").rename(folder / "done" / "finetune-b-0.json")
    dry = reproduce(tiny, folder, configurations=["b"], seeds=2, dry_run=True)
    assert not dry.is_whole
    assert re.search(r"pretrain +2 jobs, 1 left, 2:15 each  b-0, b-1", capfd.readouterr().out)
    other = dataclasses.replace(tiny, digits=3)
    with pytest.raises(ValueError, match="holds another study"):
        reproduce(other, folder)
    with pytest.raises(ValueError, match="no prepared tokens"):
        reproduce(tiny, folder, data=tmp_path)


def test_a_study_is_done_once(tiny, tokens, tmp_path, capfd, caplog):
    """Of every kind of job one, with a model whose softmax is replaced in fine-tuning."""
    caplog.set_level("INFO", "ssmax_lab")
    folder = tmp_path / "a study"
    asked = {"configurations": ["e"], "seeds": 1, "data": tokens, "workers": 2}
    done = reproduce(tiny, folder, **asked)
    assert done.is_whole and not done.failed
    names = ("pretrain-a-0", "finetune-e-0", "loss-e-0", "needle-e-0")
    assert all(f"done  {name}" in caplog.text for name in names)
    config = json.loads((folder / "runs" / "e-0-qa" / "config.json").read_text())
    assert config["model"]["rule"] == "ssmax" and config["data"]["base"].endswith("a-0")
    assert not list((folder / "runs" / "e-0-qa").glob("checkpoints/*"))
    assert done.page == folder / "report.html" and done.page.stat().st_size > 10_000
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")}
    again = reproduce(tiny, folder, **asked)
    assert again.is_whole and "all of it is done" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")} == before
    with pytest.raises(ValueError, match="holds another study"):
        reproduce(dataclasses.replace(tiny, digits=3), folder, **asked)


def test_softmax_keeps_the_checkpoint_that_f_begins_with_until_it_has(tiny, tmp_path):
    switch = checkpoint_folder(
        tmp_path / "runs" / "a-0", configured(tiny.pretraining, "f").switch_step
    )
    last = checkpoint_folder(tmp_path / "runs" / "a-0", tiny.pretraining.run.steps)
    for folder in (switch, last):
        folder.mkdir(parents=True)
    tidy(tiny, tmp_path, Job(kind="pretrain", configuration="a"))
    assert switch.is_dir() and not last.exists()
    tidy(tiny, tmp_path, Job(kind="pretrain", configuration="f"))
    assert not switch.exists()


@pytest.mark.slow
def test_records_are_brought_out_after_every_job(tiny, tokens, tmp_path, monkeypatch):
    """A machine may be gone at any moment, and leaves what was done by then."""
    archive, brought = tmp_path / "out" / "p.tar.xz", []

    def watched(folder, path):
        pack(folder, path)
        with tarfile.open(path) as packed:
            brought.append({name for name in packed.getnames() if name.startswith("done/")})

    monkeypatch.setattr(reproduction, "pack", watched)
    options = {"configurations": ["a"], "seeds": 1, "figures": [5], "data": tokens}
    assert reproduce(tiny, tmp_path / "s", records=archive, **options).is_whole
    trained = {"done/pretrain-a-0.json"}
    assert brought[0] == trained and brought[-1] == trained | {"done/loss-a-0.json"}
    assert list(archive.parent.iterdir()) == [archive]


def test_a_preset_for_gpus_is_not_begun_on_a_cpu_that_nobody_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not reproduce(gpu(), tmp_path / "s", dry_run=True).is_whole
    assert "'embedded', not prepared yet; --text takes another" in capfd.readouterr().out
    with pytest.raises(ValueError, match=r"gpu preset is made for a GPU.*--device cpu"):
        reproduce(gpu(), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_the_plan_says_how_far_the_text_reaches(tiny, tokens, tmp_path, capfd):
    longer = dataclasses.replace(tiny, loss_documents=10_000)
    reproduce(longer, tmp_path / "s", data=tokens, dry_run=True)
    out = capfd.readouterr().out
    assert re.search(r"text to learn from +[\d,]+ tokens, [\d.]+ times over in a pretraining", out)
    assert re.search(r"text to measure on +about \d+ rows of [\d,]+ tokens, not 10000; --test", out)


@pytest.mark.usefixtures("undrawn")
def test_to_draw_again_changes_no_verdict_that_is_the_same(tiny, tmp_path, monkeypatch):
    reproduce(tiny, tmp_path / "s", figures=[1, 3])
    verdicts = tmp_path / "s" / "verdicts.jsonl"
    before = verdicts.read_text()
    monkeypatch.setenv("SSMAX_COMMIT", "another")
    report(tmp_path / "s")
    assert verdicts.read_text() == before
    verdicts.write_text("".join(before.splitlines(keepends=True)[:-1]))
    report(tmp_path / "s")
    assert '"another"' in verdicts.read_text()


def test_a_job_that_fails_is_named_and_the_rest_is_done(
    tiny, tokens, tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO", "ssmax_lab")
    real = Scheduler._start

    def broken(self, job):
        if job.name == "pretrain-b-0":
            code = "import sys; print('no such luck'); sys.exit(1)"
            monkeypatch.setattr(self, "command", lambda job: [sys.executable, "-c", code])
        one = real(self, job)
        monkeypatch.undo()
        return one

    monkeypatch.setattr(Scheduler, "_start", broken)
    done = reproduce(
        tiny, tmp_path / "s", configurations=["b", "a"], seeds=1, figures=[4], data=tokens
    )
    assert done.failed == {"pretrain-b-0": "no such luck"} and not done.is_whole
    assert "FAILED  pretrain-b-0: no such luck" in caplog.text
    assert "done  pretrain-a-0" in caplog.text
    assert done.page is not None


@pytest.mark.slow
def test_it_is_measured_on_all_of_a_text_for_tests(tiny, tokens, tmp_path):
    shutil.copytree(tokens / "validation", tmp_path / "tests" / "train")
    of_tests = {"data": tokens, "test": tmp_path / "tests"}
    for folder, texts in (("s", of_tests), ("t", {"data": tokens})):
        done = reproduce(
            tiny, tmp_path / folder, configurations=["a"], seeds=1, figures=[5], **texts
        )
        assert done.is_whole
    read = [tmp_path / name / "results" / "a-0" / "position_loss.jsonl" for name in "st"]
    (first,), (second,) = (read_jsonl(path, PositionLoss) for path in read)
    assert first.mean == second.mean


def test_text_without_a_side_to_measure_on_is_refused_before_anything_is_trained(
    tiny, tokens, tmp_path
):
    shutil.copytree(tokens / "train", tmp_path / "all" / "train")
    with pytest.raises(ValueError, match="has no validation side"):
        reproduce(tiny, tmp_path / "s", data=tmp_path / "all")
    assert not (tmp_path / "s").exists()


SCHEDULER = """
import sys
from pathlib import Path
from ssmax._progress import logging_to_terminal
from ssmax_lab.analysis.findings import read_study_file
from ssmax_lab.study.presets import Study
from ssmax_lab.study.reproduction import reproduce
folder, data = map(Path, sys.argv[1:])
study = Study.from_dict(read_study_file(folder)["study"])
with logging_to_terminal(sys.stdout):
    done = reproduce(study, folder, configurations=["a"], seeds=1, figures=[4], data=data)
sys.exit({None: 0, "signal": 130}[done.stopped_by])
"""


@pytest.fixture
def scheduled(tiny, tokens, tmp_path):
    """A study whose training has begun and does not end, its folder and its process."""
    study = dataclasses.replace(
        tiny, pretraining=tiny.pretraining.with_overrides({"run.steps": 10**6})
    )
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({"study": study.to_dict()}))
    process = subprocess.Popen(
        [sys.executable, "-c", SCHEDULER, str(folder), str(tokens)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "runs" / "a-0" / "metrics.jsonl"
    try:
        until(lambda: metrics.exists() and metrics.stat().st_size)
        yield study, folder, process
    finally:
        process.kill()
        process.communicate()


def until(is_so, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stopped_in_the_middle_its_training_is_saved(scheduled):
    """SIGINT to the scheduler alone, as a terminal gives it."""
    study, folder, process = scheduled
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "what runs is saved first" in out
    log = (folder / "logs" / "pretrain-a-0.log").read_text()
    step = int(re.search(r"stopped by SIGTERM after step ([\d,]+)", log)[1].replace(",", ""))
    assert (folder / "runs" / "a-0" / "checkpoints" / f"step-{step:08}").is_dir()
    assert not (folder / "done" / "pretrain-a-0.json").exists()
    assert Study.from_dict(read_study_file(folder)["study"]) == study


def test_workers_go_when_the_scheduler_is_killed(scheduled):
    _, folder, process = scheduled
    process.kill()
    log = folder / "logs" / "pretrain-a-0.log"
    until(lambda: "stopped by SIGTERM" in log.read_text())


def test_a_folder_of_something_else_is_refused(tiny, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"letter\.txt is a file"):
        reproduce(tiny, tmp_path / "letter.txt", dry_run=True)
    with pytest.raises(ValueError, match="holds something that is no study"):
        reproduce(tiny, tmp_path)
    with pytest.raises(ValueError, match="is no study"):
        report(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"study": 1}', '{"study": {"preset": "quick"}}', "\xff"]
)
def test_a_broken_study_is_named(tiny, tmp_path, content):
    (tmp_path / "study.json").write_text(content)
    for call in (lambda: reproduce(tiny, tmp_path), lambda: report(tmp_path)):
        with pytest.raises(ValueError, match=r"study\.json is not the record of a study"):
            call()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_error(tiny, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="Permission"):
        reproduce(tiny, tmp_path / "s", figures=[1])
