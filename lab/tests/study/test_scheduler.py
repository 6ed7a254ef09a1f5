"""Jobs one after the other: when they start, what is told of one that failed."""

import dataclasses
import signal
import sys
import threading

import pytest

from ssmax_lab.study.plan import plan
from ssmax_lab.study.scheduler import Scheduler, why_failed


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "killed by SIGKILL: memory may have run out"),
        (signal.SIGSEGV, "killed by SIGSEGV"),
    ],
)
def test_a_worker_that_was_killed_is_told_by_its_signal(tiny, tmp_path, caplog, number, told):
    """Its last line says only how far it was."""
    code = f"import os; print('step 10/150', flush=True); os.kill(os.getpid(), {int(number)})"
    jobs = [job for job in plan(tiny, configurations=["a"], seeds=1) if job.kind == "data"]
    scheduler = Scheduler(
        tmp_path,
        jobs,
        study=tiny,
        command=lambda job: [sys.executable, "-c", code],
        workers=1,
    )
    scheduler.run()
    assert scheduler.failed == {"data": told}
    assert f"FAILED  data: {told}; all of it in" in caplog.text


def test_jobs_go_on_while_records_are_kept(tiny, tmp_path):
    """Packing them takes half a minute, in which a GPU would stand still."""
    jobs = plan(tiny, configurations=["a"], seeds=1)[:3]
    all_started = threading.Event()
    seen = []

    def command(job):
        if job is jobs[-1]:
            all_started.set()
        code = (
            "import sys, pathlib; done = pathlib.Path(sys.argv[1]); "
            "done.parent.mkdir(exist_ok=True); done.write_text('{\"seconds\": 1}')"
        )
        return [sys.executable, "-c", code, str(tmp_path / "done" / f"{job.name}.json")]

    def keep():
        seen.append(all_started.wait(timeout=30))

    scheduler = Scheduler(tmp_path, jobs, study=tiny, command=command, workers=1, on_done=keep)
    assert scheduler.run() is None
    assert seen[0], "the first call held up the last job"
    assert len(scheduler.is_done) == len(jobs)


def test_the_next_training_starts_up_while_one_ends(tiny, tmp_path):
    """Where one fills the machine: not before its last seconds."""
    folder = tmp_path / "started"
    folder.mkdir()
    code = """
import pathlib, sys, time
started, done, name = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
(started / name).touch()
if name == "pretrain-a-0":
    other = started / "pretrain-b-0"
    print("step 1/1000", flush=True)
    time.sleep(1)
    # Of the first second's pace a thousand are to go.
    print("step 2/1000", flush=True)
    time.sleep(1)
    assert not other.exists(), "too early"
    print("step 990/1000", flush=True)
    until = time.monotonic() + 30
    while not other.exists():
        assert time.monotonic() < until, "too late"
        time.sleep(0.05)
done.parent.mkdir(exist_ok=True)
done.write_text('{"seconds": 1}')
"""
    jobs = plan(tiny, configurations=["a", "b"], seeds=1, figures=[4])

    def command(job):
        done = tmp_path / "done" / f"{job.name}.json"
        return [sys.executable, "-c", code, str(folder), str(done), job.name]

    alone = dataclasses.replace(tiny, trains_alone=True)
    scheduler = Scheduler(tmp_path, jobs, study=alone, command=command, workers=2)
    assert scheduler.run() is None and scheduler.failed == {}
    assert (folder / "pretrain-b-0").exists()


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    assert why_failed(-99, tmp_path) == "killed by signal 99"
