"""Jobs side by side in processes of their own, shown in one line, stopped and started at will."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ssmax.records import PIECE_VARIABLE
from ssmax.study.plan import Job, can_start, seconds_taken
from ssmax.train.watch import LiveLine, clock

LOGS = "logs"
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_START = 45
"""With less left of the time, nothing is started: it would be compiled and stopped."""
StoppedBy = Literal["signal", "clock"]
# The first line of a worker's last words: "step 10/600  loss ...", "cell 3/30".
_PROGRESS = re.compile(r"(?:^|[\r\n])(\w+ ([\d,]+)/([\d,]+))")


@dataclass(slots=True)
class Running:
    """A job that is being done."""

    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    share: float = 0.0
    words: str = "starting"
    is_told: bool = False
    """It knows that it has to stop."""

    def look(self) -> None:
        """How far it is, from the end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4000))
            found = _PROGRESS.findall(file.read().decode(errors="replace"))
        if found:
            self.words, done, total = found[-1]
            self.share = int(done.replace(",", "")) / max(1, int(total.replace(",", "")))


@dataclass(slots=True)
class Tally:
    """How much of the work is done, by what the jobs are expected to take."""

    weights: dict[str, float]
    done: float = 0.0
    done_here: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def left(self, running: Sequence[Running], expected: float) -> tuple[float, float]:
        """The share that is done, and seconds to go at the speed so far."""
        begun = sum(self.weights[one.job.name] * one.share for one in running)
        total = sum(self.weights.values())
        here, gone = self.done_here + begun, time.monotonic() - self.started
        rest = max(0.0, total - self.done - begun)
        # Until a tenth of it is done here, the plan's own estimate is the better one.
        is_known = here > 0.1 * (total - self.done + self.done_here)
        seconds = rest * gone / here if is_known else max(0.0, expected - gone)
        return (self.done + begun) / max(total, 1e-9), seconds


class Conductor:
    """Does the jobs of a study that are left, a few at a time."""

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job],
        *,
        command: Callable[[Job], list[str]],
        weights: dict[str, float],
        workers: int,
        expected: float,
        trains_alone: bool = False,
        minutes: float | None = None,
        piece: str = "",
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder: Path = folder
        self.jobs: Sequence[Job] = jobs
        self.command: Callable[[Job], list[str]] = command
        self.workers: int = workers
        self.expected: float = expected
        self.trains_alone: bool = trains_alone
        self.on_done: Callable[[], None] = on_done
        self.is_done: set[str] = {
            job.name for job in jobs if seconds_taken(folder, job) is not None
        }
        self.failed: dict[str, str] = {}
        self.tally: Tally = Tally(weights, done=sum(weights[name] for name in self.is_done))
        self.line: LiveLine = LiveLine()
        self.is_stopping: bool = False
        self.stopped_by: StoppedBy | None = None
        self.ends: float = math.inf if minutes is None else time.monotonic() + 60 * minutes
        # Workers learn from it whose records they make.
        self.environment: dict[str, str] = {**os.environ, PIECE_VARIABLE: piece}

    def run(self) -> StoppedBy | None:
        """All of it; what ended it early, where something did. Failures are in `failed`."""
        running: list[Running] = []
        before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            while True:
                if not self.is_stopping:
                    self._start_what_can(running)
                if not running:
                    return self.stopped_by
                time.sleep(SECONDS_BETWEEN_LOOKS)
                if time.monotonic() > self.ends and not self.is_stopping:
                    self.is_stopping, self.stopped_by = True, "clock"
                    self.line.say("the time is used: what runs is saved first")
                if self.is_stopping:
                    self._tell(running)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    self._ended(one)
                self._show(running)
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
            self.line.close()

    def _start_what_can(self, running: list[Running]) -> None:
        busy = {one.job.name for one in running}
        for job in self.jobs:
            if len(running) >= self.workers:
                return
            if job.name in self.is_done or job.name in self.failed or job.name in busy:
                continue
            beside = [one.job for one in running]
            if can_start(job, done=self.is_done, running=beside, trains_alone=self.trains_alone):
                if not self._has_time_for(job):
                    self.stopped_by = "clock"
                    continue
                running.append(self._start(job))
                # Preparing takes every core for itself.
                if job.kind == "data":
                    return

    def _has_time_for(self, job: Job) -> bool:
        return time.monotonic() + seconds_to_use(job, self.tally.weights[job.name]) <= self.ends

    def _start(self, job: Job) -> Running:
        log = self.folder / LOGS / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.command(job),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment,
                # Ctrl-C is for the conductor, who tells the others.
                start_new_session=True,
            )
        return Running(job, process, log)

    def _ended(self, one: Running) -> None:
        job = one.job
        seconds = seconds_taken(self.folder, job)
        if one.process.returncode == 0 and seconds is not None:
            self.is_done.add(job.name)
            self.tally.done += self.tally.weights[job.name]
            self.tally.done_here += self.tally.weights[job.name]
            self.line.say(f"done  {job.name}, {clock(seconds)}")
            self.on_done()
        elif not self.is_stopping:
            lines = one.log.read_text(errors="replace").strip().splitlines()
            self.failed[job.name] = lines[-1] if lines else f"exit {one.process.returncode}"
            self.line.say(f"FAILED  {job.name}: {self.failed[job.name]}; all of it in {one.log}")

    def _show(self, running: Sequence[Running]) -> None:
        for one in running:
            one.look()
        share, seconds = self.tally.left(running, self.expected)
        jobs = f"{len(self.is_done)}/{len(self.jobs)} jobs"
        words = "  ".join(f"[{one.job.name}: {one.words}]" for one in running)
        self.line.show(f"{jobs}  {share:.0%}  {clock(seconds)} left  {words}")

    def _stop(self, number: int, frame: object) -> None:
        if self.stopped_by == "signal":
            raise KeyboardInterrupt
        self.is_stopping, self.stopped_by = True, "signal"
        self.line.say("stopping: what runs is saved first; once more to stop at once")

    def _tell(self, running: Sequence[Running]) -> None:
        for one in running:
            if not one.is_told:
                one.process.terminate()
                one.is_told = True


def seconds_to_use(job: Job, expected: float) -> float:
    """With less of them a job gets nowhere: one that would begin again has to end."""
    return SECONDS_TO_START if job.goes_on else expected


def worker_command(
    folder: Path, job: Job, *, data: Path, device: str | None, threads: int, launcher: Sequence[str]
) -> list[str]:
    """The process that does a job; training under the launcher, where there is one."""
    is_shared = launcher and job.kind in ("pretrain", "finetune")
    start = [*launcher, "-m"] if is_shared else [sys.executable, "-m"]
    command = [*start, "ssmax.study.worker", str(folder), job.name, "--data", str(data)]
    command += ["--device", device] if device else []
    return command + (["--threads", str(threads)] if threads else [])
