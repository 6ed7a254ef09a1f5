"""What is told of a worker that failed."""

import signal
import sys

import pytest

from ssmax.study.conductor import Conductor, why_failed
from ssmax.study.plan import plan


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "killed by SIGKILL: memory may have run out"),
        (signal.SIGSEGV, "killed by SIGSEGV"),
    ],
)
def test_a_worker_that_was_killed_is_told_by_its_signal(tiny, tmp_path, capfd, number, told):
    """Its last line says only how far it was."""
    code = f"import os; print('step 10/150', flush=True); os.kill(os.getpid(), {int(number)})"
    jobs = [job for job in plan(tiny, configurations=["a"], seeds=1) if job.kind == "data"]
    conductor = Conductor(
        tmp_path,
        jobs,
        study=tiny,
        command=lambda job: [sys.executable, "-c", code],
        workers=1,
    )
    conductor.run()
    assert conductor.failed == {"data": told}
    assert f"FAILED  data: {told}; all of it in" in capfd.readouterr().out


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    assert why_failed(-99, tmp_path) == "killed by signal 99"
