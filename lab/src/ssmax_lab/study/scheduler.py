"""Jobs side by side in processes of their own, shown in one line, stopped and started at will."""

import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssmax._progress import clock, log_progress, roughly
from ssmax_lab.records import LOGS, PART_VARIABLE
from ssmax_lab.study.plan import Job, can_start, expected_seconds, expected_time, seconds_taken
from ssmax_lab.study.presets import Study

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
    said_before: int = 0
    """Bytes of the log that an earlier command left."""
    words: str = "starting"
    first: tuple[float, float] | None = None
    """When it first reported its share, and which."""
    share: float = 0.0
    """Of its steps, as it reported last."""

    def look(self) -> None:
        """Read how far it is, from the end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(self.said_before, self.log.stat().st_size - 4000))
            found = _PROGRESS.findall(file.read().decode(errors="replace"))
        if found:
            self.words, done, total = found[-1]
            self.share = int(done.replace(",", "")) / max(1, int(total.replace(",", "")))
            self.first = self.first or (time.monotonic(), self.share)

    @property
    def is_ending(self) -> bool:
        """Say whether, at its pace, it is done before another job would have started up."""
        if self.first is None or self.share <= self.first[1]:
            return False
        began, share = self.first
        pace = (time.monotonic() - began) / (self.share - share)
        return pace * (1.0 - self.share) < SECONDS_TO_START


class TimeLeft:
    """Estimates when a study is done: what is left of it, at the pace of this command.

    Work is counted in the seconds that the preset expects of it.
    """

    def __init__(self, study: Study, jobs: Sequence[Job], workers: int) -> None:
        self.study: Study = study
        self.workers: int = workers
        self.work: dict[str, float] = {job.name: expected_seconds(study, job) for job in jobs}
        self.shares: dict[str, float] = {}
        self.began: float | None = None
        self.done: float = 0.0
        """Work of this command."""

    def update(self, job: Job, share: float, taken: float = 0.0) -> None:
        """Take the share of a job's steps that is done; an earlier command may have done some.

        `taken` are the seconds of a job that has ended.
        """
        whole = self.study.seconds[job.kind]
        if self.began is None:
            self.began = time.monotonic() - taken
        if job.name in self.shares:
            self.done += max(0.0, share - self.shares[job.name]) * whole
        elif share == 1.0:
            self.done += self.work[job.name]
        self.shares[job.name] = share
        self.work[job.name] = min(self.work[job.name], (1.0 - share) * whole)

    def words(self, left: Sequence[Job]) -> str:
        """Say the time left; before anything is measured, what the preset expects."""
        if self.began is None or not self.done:
            seconds = expected_time(self.study, left, self.workers)
            return f"about {roughly(seconds)} on {self.study.measured_on}"
        work = sum(self.work[job.name] for job in left)
        return f"{clock((time.monotonic() - self.began) * work / self.done)} left"


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
        study: Study,
        command: Callable[[Job], list[str]],
        workers: int,
        minutes: float | None = None,
        part: str = "",
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder: Path = folder
        self.jobs: Sequence[Job] = jobs
        self.command: Callable[[Job], list[str]] = command
        self.workers: int = workers
        self.trains_alone: bool = study.trains_alone
        self.on_done: Callable[[], None] = on_done
        self.is_done: set[str] = {
            job.name for job in jobs if seconds_taken(folder, job) is not None
        }
        self.failed: dict[str, str] = {}
        self.expected: dict[str, float] = {job.name: expected_seconds(study, job) for job in jobs}
        self.time_left: TimeLeft = TimeLeft(study, jobs, workers)
        self.has_news: bool = False
        self.is_stopping: bool = False
        self.stopped_by: StoppedBy | None = None
        self.ends: float = math.inf if minutes is None else time.monotonic() + 60 * minutes
        # Workers learn from it whose records they make.
        self.environment: dict[str, str] = {**os.environ, PART_VARIABLE: part}

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
            if len(running) >= self.workers:
                return
            if job.name in self.is_done or job.name in self.failed or job.name in busy:
                continue
            # A training that ends does not keep the next from its imports and its compiler.
            beside = [one.job for one in running if not one.is_ending]
            if can_start(job, done=self.is_done, running=beside, trains_alone=self.trains_alone):
                needs = seconds_to_use(job, self.expected[job.name])
                if time.monotonic() + needs > self.ends:
                    self.stopped_by = "clock"
                    continue
                running.append(self._start(job))
                # Preparing takes every core for itself.
                if job.kind == "data":
                    return

    def _start(self, job: Job) -> Running:
        log = self.folder / LOGS / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
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
        return Running(job, process, log, said_before=said_before)

    def _ended(self, one: Running) -> None:
        job = one.job
        seconds = seconds_taken(self.folder, job)
        if one.process.returncode == 0 and seconds is not None:
            self.is_done.add(job.name)
            # How long a text takes tells nothing of the others.
            if job.kind != "data":
                self.time_left.update(job, 1.0, taken=seconds)
            logger.info(f"done  {job.name}, {clock(seconds)}")
            self.has_news = True
        elif not self.is_stopping:
            self.failed[job.name] = why_failed(one.process.returncode, one.log)
            logger.error(f"FAILED  {job.name}: {self.failed[job.name]}; all of it in {one.log}")

    def _show(self, running: Sequence[Running]) -> None:
        for one in running:
            one.look()
            # A measurement has several parts, and counts when it has ended.
            if one.first is not None and one.job.kind in ("pretrain", "finetune"):
                self.time_left.update(one.job, one.share)
        lost = set(self.failed)
        for job in self.jobs:
            if lost.intersection(job.needs):
                lost.add(job.name)
        left = [job for job in self.jobs if job.name not in self.is_done | lost]
        words = "  ".join(f"[{one.job.name}: {one.words}]" for one in running)
        details = f"{self.time_left.words(left)}  {words}"
        log_progress(logger, "job", len(self.is_done), len(self.jobs), details)

    def _stop(self, number: int, frame: object) -> None:
        if self.stopped_by == "signal":
            raise KeyboardInterrupt
        self.is_stopping, self.stopped_by = True, "signal"
        logger.info("stopping: what runs is saved first; once more to stop at once")


def why_failed(code: int, log: Path) -> str:
    """Quote a worker's last words; one that was killed had no time to say why."""
    if code < 0:
        # Real-time signals have no name.
        known = {one.value: one.name for one in signal.Signals}
        words = f"killed by {known.get(-code, f'signal {-code}')}"
        return words + (": memory may have run out" if -code == signal.SIGKILL else "")
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit {code}"


def seconds_to_use(job: Job, expected: float) -> float:
    """Estimate the least that a job needs to get anywhere: one that begins again has to end."""
    return SECONDS_TO_START if job.is_resumable else expected


def worker_command(
    folder: Path, job: Job, *, data: Path, device: str | None, threads: int, launcher: Sequence[str]
) -> list[str]:
    """Make the command that does a job; training under the launcher, where there is one."""
    is_shared = launcher and job.kind in ("pretrain", "finetune")
    start = [*launcher, "-m"] if is_shared else [sys.executable, "-m"]
    command = [*start, "ssmax_lab.study.worker", str(folder), job.name, "--data", str(data)]
    command += ["--device", device] if device else []
    return command + (["--threads", str(threads)] if threads else [])
