"""Run one job, also under torchrun: `python -m ssmax_lab.study.worker FOLDER JOB`."""

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from ssmax._progress import logging_to_terminal
from ssmax.errors import MachineError, NonfiniteError, UsageError

PARENT_DEATH_SIGNAL = 1
"""Linux: prctl's PR_SET_PDEATHSIG."""


def main() -> int:
    """Do the job of the study in a folder; 0 done, 1 failed, 2 refused, 130 stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("job")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    arguments = parser.parse_args()
    _follow_parent()
    started = time.monotonic()

    import torch

    from ssmax_lab.study.jobs import Stopped, run_job, tidy
    from ssmax_lab.study.plan import mark_done
    from ssmax_lab.study.reproduction import read_study

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        study, jobs = read_study(arguments.folder)
        job = jobs[arguments.job]
        with logging_to_terminal():
            run_job(study, arguments.folder, job, data=arguments.data, device=arguments.device)
    except Stopped as stopped:
        print(stopped)
        return 130
    except UsageError as error:
        print(error)
        return 2
    except (MachineError, NonfiniteError) as error:
        print(error)
        return 1
    if os.environ.get("RANK", "0") == "0":
        mark_done(arguments.folder, job, time.monotonic() - started)
        tidy(study, arguments.folder, job)
    return 0


def _follow_parent() -> None:
    """Stop when the scheduler is gone, however it went: nobody else would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
