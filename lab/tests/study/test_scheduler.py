"""Jobs one after the other: when they start, what is told of one that failed."""

import signal
import sys
import threading

import pytest

from ssmax_lab.study.plan import plan
from ssmax_lab.study.scheduler import Scheduler


def scheduler(folder, jobs, command, **options):
    return Scheduler(folder, jobs, command=command, workers=1, measured_on="here", **options)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "killed by signal 9, Killed: memory may have run out"),
        (signal.SIGSEGV, "killed by signal 11, Segmentation fault"),
    ],
)
def test_a_worker_that_was_killed_is_told_by_its_signal(tiny, tmp_path, caplog, number, told):
    """Its last line says only how far it was."""
    code = f"import os; print('step 10/150', flush=True); os.kill(os.getpid(), {int(number)})"
    jobs = [job for job in plan(tiny, configurations=["a"], seeds=1) if job.kind == "data"]
    here = scheduler(tmp_path, jobs, lambda job: [sys.executable, "-c", code])
    here.run()
    assert here.failed == {"data": told}
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
            "done.parent.mkdir(exist_ok=True); done.touch()"
        )
        return [sys.executable, "-c", code, str(tmp_path / "done" / f"{job.name}.json")]

    def keep():
        seen.append(all_started.wait(timeout=30))

    here = scheduler(tmp_path, jobs, command, on_done=keep)
    assert here.run() is None
    assert seen[0], "the first call held up the last job"
    assert len(here.is_done) == len(jobs)
