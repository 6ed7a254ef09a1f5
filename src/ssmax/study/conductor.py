"""Jobs side by side in processes of their own, shown in one line, stopped and started at will."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssmax.records import PIECE_VARIABLE
from ssmax.study.plan import Job, begins_at, can_start, expected_seconds, makespan, seconds_taken
from ssmax.study.presets import Study
from ssmax.train.watch import LiveLine, clock

LOGS = "logs"
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_FORECASTS = 3.0
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
    begins_at: float = 0.0
    """The share of its steps that was done before."""
    said_before: int = 0
    """Bytes of the log that an earlier command left."""
    share: float = 0.0
    """Of the others."""
    words: str = "starting"
    is_told: bool = False
    """It knows that it has to stop."""
    first_seen: tuple[float, float] | None = None
    """When it first told its share, and which."""

    def look(self) -> None:
        """How far it is, from the end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(self.said_before, self.log.stat().st_size - 4000))
            found = _PROGRESS.findall(file.read().decode(errors="replace"))
        if found:
            self.words, done, total = found[-1]
            share = int(done.replace(",", "")) / max(1, int(total.replace(",", "")))
            self.share = max(0.0, share - self.begins_at) / (1.0 - self.begins_at)
            self.first_seen = self.first_seen or (time.monotonic(), self.share)

    @property
    def is_ending(self) -> bool:
        """At its own pace it is done before another job would have started up."""
        if self.first_seen is None:
            return False
        since, first = self.first_seen
        gone, done = time.monotonic() - since, self.share - first
        return done > 0.0 and gone / done * (1.0 - self.share) < SECONDS_TO_START


class Forecast:
    """How much of a study is done, and when all of it will be, by what its jobs should take."""

    def __init__(self, study: Study, jobs: Sequence[Job], workers: int, left: set[str]) -> None:
        self.study: Study = study
        self.jobs: Sequence[Job] = jobs
        self.workers: int = workers
        self.weights: dict[str, float] = {job.name: expected_seconds(study, job) for job in jobs}
        self.started: float = time.monotonic()
        self.left: set[str] = left
        """What was left then."""
        self.found: dict[str, float] = {}
        """The share of a job that an earlier command did, as its first words tell."""
        self.planned: float = self._planned(left, {})
        self._told: tuple[float, float] = (-math.inf, self.planned)

    def share(self, left: set[str], running: Mapping[str, float], done: set[str]) -> float:
        """Of the work, that is done; `running` has that of jobs that are being done."""
        # What failed is neither.
        total = sum(self.weights[name] for name in left | done)
        rest = sum(self.weights[name] * (1.0 - running.get(name, 0.0)) for name in left)
        return 1.0 - rest / max(total, 1e-9)

    def seconds(self, left: set[str], running: Mapping[str, float]) -> float:
        """To go: the plan's own estimate, at the pace so far once a tenth of it is behind."""
        for name, share in running.items():
            # Less than before: it was killed past its last checkpoint, or begins again.
            self.found[name] = min(share, self.found.get(name, share))
        now = time.monotonic()
        when, told = self._told
        # To plan a large study takes some hundredths of a second.
        if now - when < SECONDS_BETWEEN_FORECASTS:
            return max(0.0, told - (now - when))
        to_go, gone = self._planned(left, running), now - self.started
        found = {name: share for name, share in self.found.items() if share}
        self.planned = self._planned(self.left, found)
        behind = self.planned - to_go
        if behind > 0.1 * self.planned:
            to_go *= gone / behind
        else:
            to_go = max(0.0, self.planned - gone)
        self._told = now, to_go
        return to_go

    def _planned(self, left: set[str], running: Mapping[str, float]) -> float:
        jobs = [job for job in self.jobs if job.name in left]
        return makespan(self.study, jobs, self.workers, done=running)


class Conductor:
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
        piece: str = "",
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
        self.forecast: Forecast = Forecast(study, jobs, workers, self._left())
        self.line: LiveLine = LiveLine()
        self.has_news: bool = False
        self.is_stopping: bool = False
        self.stopped_by: StoppedBy | None = None
        self.ends: float = math.inf if minutes is None else time.monotonic() + 60 * minutes
        # Workers learn from it whose records they make.
        self.environment: dict[str, str] = {**os.environ, PIECE_VARIABLE: piece}

    def run(self) -> StoppedBy | None:
        """All of it; what ended it early, where something did. Failures are in `failed`."""
        running: list[Running] = []
        keeper: threading.Thread | None = None
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
                    self.line.say("the time is used: what runs is saved first")
                if self.is_stopping:
                    self._tell(running)
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
            self.line.close()

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
                if not self._has_time_for(job):
                    self.stopped_by = "clock"
                    continue
                running.append(self._start(job))
                # Preparing takes every core for itself.
                if job.kind == "data":
                    return

    def _has_time_for(self, job: Job) -> bool:
        return time.monotonic() + seconds_to_use(job, self.forecast.weights[job.name]) <= self.ends

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
                # Ctrl-C is for the conductor, who tells the others.
                start_new_session=True,
            )
        share = begins_at(self.forecast.study, job)
        return Running(job, process, log, begins_at=share, said_before=said_before)

    def _ended(self, one: Running) -> None:
        job = one.job
        seconds = seconds_taken(self.folder, job)
        if one.process.returncode == 0 and seconds is not None:
            self.is_done.add(job.name)
            self.line.say(f"done  {job.name}, {clock(seconds)}")
            self.has_news = True
        elif not self.is_stopping:
            self.failed[job.name] = why_failed(one.process.returncode, one.log)
            self.line.say(f"FAILED  {job.name}: {self.failed[job.name]}; all of it in {one.log}")

    def _show(self, running: Sequence[Running]) -> None:
        for one in running:
            one.look()
        left, shares = self._left(), {one.job.name: one.share for one in running}
        share = self.forecast.share(left, shares, self.is_done)
        seconds = self.forecast.seconds(left, shares)
        jobs = f"{len(self.is_done)}/{len(self.jobs)} jobs"
        words = "  ".join(f"[{one.job.name}: {one.words}]" for one in running)
        self.line.show(f"{jobs}  {share:.0%}  {clock(seconds)} left  {words}")

    def _left(self) -> set[str]:
        """What will still be done: not what has failed, nor what needs that."""
        lost = set(self.failed)
        for job in self.jobs:
            if lost.intersection(job.needs):
                lost.add(job.name)
        return {job.name for job in self.jobs} - self.is_done - lost

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


def why_failed(code: int, log: Path) -> str:
    """A worker's last words; one that was killed had no time to say why."""
    if code < 0:
        # Real-time signals have no name.
        known = {one.value: one.name for one in signal.Signals}
        words = f"killed by {known.get(-code, f'signal {-code}')}"
        return words + (": memory may have run out" if -code == signal.SIGKILL else "")
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit {code}"


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
