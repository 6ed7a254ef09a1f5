"""Jobs side by side in processes of their own, shown in one line, stopped and started at will."""

import logging
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ssmax._files import make_folder
from ssmax._progress import clock, log_progress, roughly
from ssmax_lab.records import LOGS
from ssmax_lab.study.plan import TRAINED, Job, done_mark, side_by_side

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_START = 45
"""With less left of the time, nothing is started: it would be compiled and stopped."""
StoppedBy = Literal["signal", "clock"]
# The first line of a worker's last words: "step 10/600  loss ...", "token 3/30".
_PROGRESS = re.compile(r"(?:^|[\r\n])(\w+ ([\d,]+)/([\d,]+))")


@dataclass(slots=True)
class Running:
    """A job that is being done."""

    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    said_before: int
    """Bytes of the log that an earlier command left."""
    started: float = field(default_factory=time.monotonic)
    words: str = "starting"
    share: float = 0.0
    """Of a training's steps, as it reported last."""
    reported: float | None = None
    """When a training first did."""
    first_share: float = 0.0
    """What was done by then, by an earlier command or job."""

    def look(self) -> None:
        """Read how far it is, from the end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(self.said_before, self.log.stat().st_size - 4000))
            found = _PROGRESS.findall(file.read().decode(errors="replace"))
        if found:
            self.words, done, total = found[-1]
            # A measurement has several parts, and counts when it has ended.
            if self.job.kind in TRAINED:
                self.share = int(done.replace(",", "")) / max(1, int(total.replace(",", "")))
                if self.reported is None:
                    self.reported, self.first_share = time.monotonic(), self.share


class Scheduler:
    """Does the jobs of a study that are left, a few at a time.

    `on_done` is called in a thread of its own when jobs have ended, never twice at a time; what
    ends during its last call is for the caller to keep.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job],
        *,
        command: Callable[[Job], list[str]],
        workers: int,
        measured_on: str,
        environment: Mapping[str, str] | None = None,
        minutes: float | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.jobs, self.command, self.workers = folder, jobs, command, workers
        self.measured_on, self.on_done = measured_on, on_done
        self.environment: dict[str, str] = {**os.environ, **(environment or {})}
        self.ends: float = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.is_done: set[str] = {job.name for job in jobs if done_mark(folder, job).is_file()}
        self.failed: dict[str, str] = {}
        self.stopped_by: StoppedBy | None = None
        self.is_stopping: bool = False
        self.has_news: bool = False
        self.took: float = 0.0
        self.planned: float = 0.0
        """Seconds of the jobs that ended, and those that the preset expects of them."""

    def run(self) -> StoppedBy | None:
        """Do all of it; return what ended it early, if anything. Failures are in `failed`."""
        running: list[Running] = []
        keeper: threading.Thread | None = None
        is_terminated = False
        before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            while True:
                if not self.is_stopping:
                    self._start_what_can(running)
                if self.has_news and not (keeper and keeper.is_alive()):
                    # Many records take half a minute to pack, and no job waits for that.
                    self.has_news = False
                    keeper = threading.Thread(target=self.on_done)
                    keeper.start()
                if not running:
                    return self.stopped_by
                time.sleep(SECONDS_BETWEEN_LOOKS)
                if time.monotonic() > self.ends and not self.is_stopping:
                    self.is_stopping, self.stopped_by = True, "clock"
                    logger.info("the time is used: what runs is saved first")
                if self.is_stopping and not is_terminated:
                    is_terminated = True
                    for one in running:
                        one.process.terminate()
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    self._ended(one)
                # What was stopped is saved, and yet no longer among what runs.
                if not self.is_stopping:
                    self._show(running)
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()
            if keeper:
                keeper.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start_what_can(self, running: list[Running]) -> None:
        busy = {one.job.name for one in running}
        for job in self.jobs:
            is_over = job.name in self.is_done or job.name in self.failed or job.name in busy
            if is_over or not self.is_done.issuperset(job.needs):
                continue
            if len(running) >= self.workers:
                return
            if time.monotonic() + SECONDS_TO_START > self.ends:
                self.stopped_by = "clock"
                return
            running.append(self._start(job))

    def _start(self, job: Job) -> Running:
        make_folder(self.folder / LOGS)
        log = self.folder / LOGS / f"{job.name}.log"
        with log.open("ab") as file:
            said_before = file.tell()
            process = subprocess.Popen(
                self.command(job),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment,
                # Ctrl-C is for the scheduler, which stops the others.
                start_new_session=True,
            )
        return Running(job, process, log, said_before)

    def _ended(self, one: Running) -> None:
        job, seconds = one.job, time.monotonic() - one.started
        if one.process.returncode == 0 and done_mark(self.folder, job).is_file():
            self.is_done.add(job.name)
            # How long a text takes tells nothing of the others.
            if job.kind != "data":
                self.took += seconds
                self.planned += (1.0 - one.first_share) * job.seconds
            logger.info(f"done  {job.name}, {clock(seconds)}")
            self.has_news = True
        elif not self.is_stopping:
            self.failed[job.name] = why_failed(one.process.returncode, one.log)
            logger.error(f"FAILED  {job.name}: {self.failed[job.name]}; all of it in {one.log}")

    def _show(self, running: Sequence[Running]) -> None:
        for one in running:
            one.look()
        lost = set(self.failed)
        for job in self.jobs:
            if lost.intersection(job.needs):
                lost.add(job.name)
        left = [job for job in self.jobs if job.name not in self.is_done | lost]
        words = "  ".join(f"[{one.job.name}: {one.words}]" for one in running)
        details = f"{self.time_left(left, running)}  {words}"
        log_progress(logger, "job", len(self.is_done), len(self.jobs), details)

    def time_left(self, left: Sequence[Job], running: Sequence[Running]) -> str:
        """Say when all is done at the pace of this command; at first, what the preset expects."""
        took, planned = self.took, self.planned
        seconds = {job.name: job.expected for job in left}
        for one in running:
            if one.reported is not None:
                took += time.monotonic() - one.reported
                planned += (one.share - one.first_share) * one.job.seconds
                seconds[one.job.name] = (1.0 - one.share) * one.job.seconds
        expected = side_by_side(seconds.values(), self.workers)
        if not planned:
            return f"about {roughly(expected)} on {self.measured_on}"
        return f"{clock(expected * took / planned)} left"

    def _stop(self, number: int, frame: object) -> None:
        if self.stopped_by == "signal":
            raise KeyboardInterrupt
        self.is_stopping, self.stopped_by = True, "signal"
        logger.info("stopping: what runs is saved first; once more to stop at once")


def why_failed(code: int, log: Path) -> str:
    """Quote a worker's last words; one that was killed had no time to say why."""
    if code < 0:
        words = f"killed by signal {-code}, {signal.strsignal(-code)}"
        return words + (": memory may have run out" if -code == signal.SIGKILL else "")
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit {code}"
