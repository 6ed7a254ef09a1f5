"""Jobs side by side in processes of their own, shown in one line, stopped and started at will."""

import logging
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ssmax._progress import clock, log_progress, roughly
from ssmax_lab.records import LOGS, PART_VARIABLE
from ssmax_lab.study.plan import (
    KINDS,
    Job,
    Kind,
    begins_at,
    can_start,
    expected_seconds,
    makespan,
    seconds_taken,
    share_done,
)
from ssmax_lab.study.presets import Study

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_FORECASTS = 3.0
RECENT = 3
"""Jobs of a kind that ended last: what the next of it takes is their median."""
SECONDS_TO_START = 45
"""With less left of the time, nothing is started: it would be compiled and stopped."""
StoppedBy = Literal["signal", "clock"]
# The first line of a worker's last words: "step 10/600  loss ...", "token 3/30".
_PROGRESS = re.compile(r"(?:^|[\r\n])(\w+ ([\d,]+)/([\d,]+))")


@dataclass(slots=True)
class Progress:
    """How far a job is, by its own report, and at what pace."""

    share: float = 0.0
    """Of its work; before its first report, what an earlier command did."""
    started: float = field(default_factory=lambda: time.monotonic())
    first: tuple[float, float] | None = None
    """When it first reported its share, and which."""
    last: tuple[float, float] | None = None
    """When its share last changed, and to what."""

    def update(self, share: float) -> None:
        """Take the share that it reports now."""
        if self.first is None or share < self.share:
            self.first = self.last = (time.monotonic(), share)
        elif share > self.share:
            self.last = (time.monotonic(), share)
        self.share = share

    @property
    def work(self) -> float | None:
        """Estimate the seconds of all of its work at its pace so far, once it has a pace."""
        if self.first is None or self.last is None or self.last[1] <= self.first[1]:
            return None
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])

    @property
    def whole(self) -> float | None:
        """Estimate likewise, with the time it took to start up."""
        if self.first is None or self.work is None:
            return None
        return self.first[0] - self.started + self.work

    def to_go(self, expected: float) -> float:
        """Estimate the seconds left of it; `expected` is all of it, while it has no pace."""
        seconds = expected if self.work is None else self.work
        since = (self.last or (self.started,))[0]
        return max(0.0, (1.0 - self.share) * seconds - (time.monotonic() - since))


@dataclass(slots=True)
class Running:
    """A job that is being done."""

    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    progress: Progress
    is_resumed: bool = False
    """An earlier command did a part of it."""
    begins_at: float = 0.0
    """The share of its steps that another job did."""
    said_before: int = 0
    """Bytes of the log that an earlier command left."""
    words: str = "starting"
    is_terminated: bool = False
    """It was asked to stop."""

    def look(self) -> None:
        """Read how far it is, from the end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(self.said_before, self.log.stat().st_size - 4000))
            found = _PROGRESS.findall(file.read().decode(errors="replace"))
        if not found:
            return
        self.words, done, total = found[-1]
        share = int(done.replace(",", "")) / max(1, int(total.replace(",", "")))
        self.progress.update(max(0.0, share - self.begins_at) / (1.0 - self.begins_at))

    @property
    def is_ending(self) -> bool:
        """Say whether, at its own pace, it is done before another job would have started up."""
        return self.progress.work is not None and self.progress.to_go(0.0) < SECONDS_TO_START


class Forecast:
    """How much of a study is done, and when all of it will be.

    A job takes as long as others of its kind did on this machine, by their pace where none has
    ended. Kinds that have not been measured take the preset's estimate, times what the measured
    ones take of theirs. `taken` is what jobs took in earlier commands, `begun` the share of jobs
    that those left unfinished.
    """

    def __init__(
        self,
        study: Study,
        jobs: Sequence[Job],
        workers: int,
        *,
        taken: Mapping[str, float] | None = None,
        begun: Mapping[str, float] | None = None,
    ) -> None:
        self.study: Study = study
        self.jobs: Mapping[str, Job] = {job.name: job for job in jobs}
        self.workers: int = workers
        self.begun: Mapping[str, float] = begun or {}
        self.weights: dict[str, float] = {job.name: expected_seconds(study, job) for job in jobs}
        self.ended: dict[Kind, list[float]] = {}
        """Seconds of the jobs that ended, over what the preset expects of them."""
        self.before: Mapping[Kind, float] = dict.fromkeys(KINDS, 1.0)
        """What a kind takes as far as earlier commands tell, over what the preset expects."""
        for name, seconds in (taken or {}).items():
            self.learn(name, seconds)
        self.before, self.is_known_before = self._ratios({})
        # What this command measures counts for more: others may use the machine by now.
        self.ended = {}
        self._told: tuple[float, float, float, bool] = (-math.inf, 0.0, 0.0, False)

    def learn(self, name: str, seconds: float) -> None:
        """Learn what a job took from its beginning to its end."""
        self.ended.setdefault(self.jobs[name].kind, []).append(seconds / self.weights[name])

    def share(self, left: set[str], running: Mapping[str, Progress], done: set[str]) -> float:
        """Estimate the share of the work that is done."""
        # What failed is neither.
        total = sum(self.weights[name] for name in left | done)
        shares = {**self.begun, **{name: one.share for name, one in running.items()}}
        rest = sum(self.weights[name] * (1.0 - shares.get(name, 0.0)) for name in left)
        return 1.0 - rest / max(total, 1e-9)

    def seconds(self, left: set[str], running: Mapping[str, Progress]) -> float:
        """Estimate the time left; never less than what has not been started takes."""
        return self._forecast(left, running)[0]

    def words(self, left: set[str], running: Mapping[str, Progress]) -> str:
        """Say the time left; before anything is measured, an estimate that does not count down."""
        seconds, is_measured = self._forecast(left, running)
        if is_measured:
            return f"{clock(seconds)} left"
        return f"about {roughly(seconds)} on {self.study.measured_on}"

    def _forecast(self, left: set[str], running: Mapping[str, Progress]) -> tuple[float, bool]:
        now = time.monotonic()
        when, told, floor, is_measured = self._told
        # To plan a large study takes some hundredths of a second.
        if now - when >= SECONDS_BETWEEN_FORECASTS:
            when, (told, floor, is_measured) = now, self._planned(left, running)
            self._told = when, told, floor, is_measured
        return (max(floor, told - (now - when)) if is_measured else told), is_measured

    def _planned(
        self, left: set[str], running: Mapping[str, Progress]
    ) -> tuple[float, float, bool]:
        """Estimate seconds to go, those of what has not started, and whether any are measured."""
        ratios, is_measured = self._ratios(running)
        is_measured = is_measured or self.is_known_before
        whole = {name: self.weights[name] * ratios[self.jobs[name].kind] for name in left}
        to_go = {name: whole[name] * (1.0 - self.begun.get(name, 0.0)) for name in left}
        started = {
            name: one.to_go(whole[name]) if is_measured else to_go[name]
            for name, one in running.items()
            if name in left
        }
        floor = self._makespan({name: to_go[name] for name in left - started.keys()}, set())
        seconds = self._makespan({**to_go, **started}, set(started))
        return max(floor, seconds), floor, is_measured

    def _ratios(self, running: Mapping[str, Progress]) -> tuple[dict[Kind, float], bool]:
        """Estimate what each kind takes, over what the preset expects; whether any was measured."""
        found: dict[Kind, list[float]] = {
            kind: ratios[-RECENT:] for kind, ratios in self.ended.items()
        }
        for name, one in running.items():
            if one.whole is not None:
                found.setdefault(self.jobs[name].kind, []).append(one.whole / self.weights[name])
        measured: dict[Kind, float] = {
            kind: statistics.median(ratios) for kind, ratios in found.items()
        }
        # How long a text takes depends on the text, and tells nothing of the others.
        known: list[Kind] = [kind for kind in measured if kind != "data"]
        seconds = self.study.seconds
        slower = 1.0
        if known:
            took = sum(measured[kind] * seconds[kind] for kind in known)
            slower = took / sum(self.before[kind] * seconds[kind] for kind in known)
        ratios: dict[Kind, float] = {
            kind: measured.get(kind, self.before[kind] * (1.0 if kind == "data" else slower))
            for kind in KINDS
        }
        return ratios, bool(known)

    def _makespan(self, seconds: Mapping[str, float], running: set[str]) -> float:
        jobs = [job for name, job in self.jobs.items() if name in seconds]
        return makespan(
            self.study, jobs, self.workers, done=dict.fromkeys(running, 0.0), seconds=seconds
        )


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
        taken = {
            job.name: seconds for job in jobs if (seconds := seconds_taken(folder, job)) is not None
        }
        self.is_done: set[str] = set(taken)
        self.failed: dict[str, str] = {}
        left = [job for job in jobs if job.name not in self.is_done]
        self.begun: dict[str, float] = {job.name: share_done(study, folder, job) for job in left}
        self.forecast: Forecast = Forecast(study, jobs, workers, taken=taken, begun=self.begun)
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
                if self.is_stopping:
                    self._terminate(running)
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
                # Ctrl-C is for the scheduler, which stops the others.
                start_new_session=True,
            )
        begun = self.begun.get(job.name, 0.0)
        return Running(
            job,
            process,
            log,
            progress=Progress(begun),
            is_resumed=begun > 0.0,
            begins_at=begins_at(self.forecast.study, job),
            said_before=said_before,
        )

    def _ended(self, one: Running) -> None:
        job = one.job
        seconds = seconds_taken(self.folder, job)
        if one.process.returncode == 0 and seconds is not None:
            self.is_done.add(job.name)
            if not one.is_resumed:
                self.forecast.learn(job.name, seconds)
            logger.info(f"done  {job.name}, {clock(seconds)}")
            self.has_news = True
        elif not self.is_stopping:
            self.failed[job.name] = why_failed(one.process.returncode, one.log)
            logger.error(f"FAILED  {job.name}: {self.failed[job.name]}; all of it in {one.log}")

    def _show(self, running: Sequence[Running]) -> None:
        for one in running:
            one.look()
        left, progress = self._left(), {one.job.name: one.progress for one in running}
        share = self.forecast.share(left, progress, self.is_done)
        time_left = self.forecast.words(left, progress)
        words = "  ".join(f"[{one.job.name}: {one.words}]" for one in running)
        done = len(self.is_done)
        log_progress(logger, "job", done, len(self.jobs), f"{share:.0%}  {time_left}  {words}")

    def _left(self) -> set[str]:
        """List what will still be done: not what has failed, nor what needs that."""
        lost = set(self.failed)
        for job in self.jobs:
            if lost.intersection(job.needs):
                lost.add(job.name)
        return {job.name for job in self.jobs} - self.is_done - lost

    def _stop(self, number: int, frame: object) -> None:
        if self.stopped_by == "signal":
            raise KeyboardInterrupt
        self.is_stopping, self.stopped_by = True, "signal"
        logger.info("stopping: what runs is saved first; once more to stop at once")

    def _terminate(self, running: Sequence[Running]) -> None:
        for one in running:
            if not one.is_terminated:
                one.process.terminate()
                one.is_terminated = True


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
