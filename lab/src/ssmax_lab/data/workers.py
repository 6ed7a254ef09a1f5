"""One function over many tasks, in this process or in several."""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from ssmax.errors import MachineError

Task = TypeVar("Task")
Result = TypeVar("Result")


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    job: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    workers: int,
    on_result: Callable[[Result], None],
) -> None:
    """Call job on every task, and on_result in this process on each result, in any order."""
    workers = min(workers, len(tasks))
    if workers <= 1:
        for task in tasks:
            on_result(job(task))
        return
    # Forked children would inherit threads' locks; a spawned one starts clean.
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawned, _follow_parent) as pool:
        try:
            futures = [pool.submit(job, task) for task in tasks]
            for future in concurrent.futures.as_completed(futures):
                on_result(future.result())
        except BrokenProcessPool as error:
            raise MachineError(
                "a worker was killed, perhaps for lack of memory: run the same command again with "
                "fewer workers, and what is finished stays; or a script called this without "
                '`if __name__ == "__main__":`, which every worker imports'
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Die with the parent: a worker that outlived it would write beside its successors."""
    # Ctrl-C reaches the whole group; the parent is the one to speak of it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
