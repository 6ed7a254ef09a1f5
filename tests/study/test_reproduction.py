"""A study from its text to its page: in processes, interrupted, again, with a job that fails."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from ssmax.study import reproduction
from ssmax.study.reproduction import read_study, report, reproduce


def test_a_study_from_text_to_page_and_again(tiny, tmp_path, capfd):
    folder = tmp_path / "a study"
    done = reproduce(tiny, folder, configurations=["a", "b", "e", "probe"], seeds=1, workers=2)
    out = capfd.readouterr().out
    assert done.is_whole and not done.failed
    assert "done  needle-e-0" in out and "left" in out
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

    # A second time nothing is done again, and the page comes out the same.
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")}
    page = done.page.read_bytes()
    again = reproduce(tiny, folder, configurations=["a", "b", "e", "probe"], seeds=1)
    assert again.is_whole and "all of it is done" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")} == before
    assert done.page.read_bytes() == page

    # More seeds are more jobs of the same study; other settings are another study.
    dry = reproduce(tiny, folder, configurations=["b"], seeds=2, dry_run=True)
    assert not dry.is_whole
    assert re.search(r"pretrain +2 jobs, 1 left, 1:16 each  b-0, b-1", capfd.readouterr().out)
    other = tiny.__class__(**{**_fields(tiny), "digits": 3})
    with pytest.raises(ValueError, match="holds another study"):
        reproduce(other, folder)
    with pytest.raises(ValueError, match="was begun with data"):
        reproduce(tiny, folder, data=tmp_path)


def _fields(study):
    return {name: getattr(study, name) for name in study.__slots__}


def test_only_some_figures(tiny, tmp_path):
    done = reproduce(tiny, tmp_path / "s", figures=[1, 3])
    assert done.is_whole and {one.claim for one in done.comparisons} == {"C1", "C3"}


def test_a_job_that_fails_is_named_and_the_rest_is_done(tiny, tmp_path, capfd, monkeypatch):
    real = reproduction.worker_command

    def broken(folder, job, **options):
        if job.name == "pretrain-b-0":
            return [sys.executable, "-c", "import sys; print('no such luck'); sys.exit(1)"]
        return real(folder, job, **options)

    monkeypatch.setattr(reproduction, "worker_command", broken)
    done = reproduce(tiny, tmp_path / "s", configurations=["a", "b"], seeds=1, figures=[5])
    assert done.failed == {"pretrain-b-0": "no such luck"} and not done.is_whole
    out = capfd.readouterr().out
    assert "FAILED  pretrain-b-0: no such luck" in out and "done  loss-a-0" in out
    assert done.page is not None


def test_stopped_in_the_middle_it_goes_on(tiny, tmp_path):
    """SIGINT to the conductor alone, as a terminal gives it; then the rest."""
    folder = tmp_path / "s"
    longer = tiny.__class__(
        **{**_fields(tiny), "pretraining": tiny.pretraining.replaced({"run.steps": 4000})}
    )
    _write(longer, _made(folder))
    code = (
        "import sys; from pathlib import Path; from ssmax.study.reproduction import *;"
        "study, _ = read_study(Path(sys.argv[1]));"
        "done = reproduce(study, Path(sys.argv[1]), configurations=['a'], seeds=1, figures=[4]);"
        "sys.exit(0 if done.is_whole else 130)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    journal = folder / "runs" / "a-0" / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "what runs is saved first" in out
    log = (folder / "logs" / "pretrain-a-0.log").read_text()
    stopped = int(
        re.search(r"stopped by SIGTERM after step ([\d,]+)", log).group(1).replace(",", "")
    )
    assert 0 < stopped < 4000
    assert not (folder / "done" / "pretrain-a-0.json").exists()
    study, jobs = read_study(folder)
    assert study == longer and "pretrain-a-0" in jobs


def _write(study, folder):
    jobs = reproduction.plan(study, configurations=["a"])
    data = str((folder / "data").resolve())
    reproduction._write(study, folder, jobs, origin=reproduction.Origin(data=data, test=data))


def _made(folder):
    folder.mkdir()
    return folder


def test_workers_go_when_the_conductor_is_killed(tiny, tmp_path):
    folder = _made(tmp_path / "s")
    longer = tiny.__class__(
        **{**_fields(tiny), "pretraining": tiny.pretraining.replaced({"run.steps": 100_000})}
    )
    code = (
        "import sys; from pathlib import Path; from ssmax.study.reproduction import *;"
        "study, _ = read_study(Path(sys.argv[1]));"
        "reproduce(study, Path(sys.argv[1]), configurations=['a'], seeds=1, figures=[4])"
    )
    _write(longer, folder)
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    journal = folder / "runs" / "a-0" / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    log = folder / "logs" / "pretrain-a-0.log"
    while "stopped by SIGTERM" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "stopped by SIGTERM" in log.read_text()


def test_a_folder_of_something_else_is_refused(tiny, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="holds something that is no study"):
        reproduce(tiny, tmp_path)
    with pytest.raises(ValueError, match="is no study"):
        report(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_error(tiny, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="Permission"):
        reproduce(tiny, tmp_path / "s", figures=[1])
