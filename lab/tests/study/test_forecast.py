"""When a study will be done, as its line says while it runs."""

import re
import time

import pytest

from ssmax._progress import roughly
from ssmax_lab.study.plan import begins_at, can_start, makespan, plan
from ssmax_lab.study.presets import gpu, quick
from ssmax_lab.study.scheduler import SECONDS_BETWEEN_FORECASTS, Forecast, Progress


@pytest.fixture
def clock(monkeypatch):
    """The time, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def jobs_of(study, configurations=("a", "b")):
    jobs = plan(study, configurations=configurations, seeds=1)
    return [job for job in jobs if job.kind != "data"]


@pytest.fixture
def forecast(clock):
    study = gpu()
    return Forecast(study, jobs_of(study), 2)


def names(forecast):
    return set(forecast.jobs)


def planned(forecast):
    return makespan(forecast.study, list(forecast.jobs.values()), forecast.workers)


class Machine:
    """Does the jobs of a study, each kind `slower` times as slow as its preset says."""

    def __init__(self, clock, study, jobs, workers, slower):
        self.clock, self.study, self.slower = clock, study, slower
        self.forecast = Forecast(study, jobs, workers)
        self.running: dict[str, Progress] = {}
        self.done: set[str] = set()
        self.began = clock[0]

    def left(self):
        return set(self.forecast.jobs) - self.done

    def needs(self, name):
        return self.forecast.weights[name] * self.slower[self.forecast.jobs[name].kind]

    def run(self, seconds=float("inf"), step=1.0, each=lambda: None):
        """Until all is done, or for so long."""
        jobs, until = self.forecast.jobs, self.clock[0] + seconds
        while self.left() and self.clock[0] < until:
            for name in sorted(self.left() - self.running.keys(), key=list(jobs).index):
                beside = [jobs[other] for other in self.running]
                there = self.done | {need for job in jobs.values() for need in job.needs} - {*jobs}
                if len(beside) < self.forecast.workers and can_start(
                    jobs[name], done=there, running=beside, trains_alone=self.study.trains_alone
                ):
                    self.running[name] = Progress()
            each()
            self.clock[0] += step
            for name, progress in list(self.running.items()):
                taken = self.clock[0] - progress.started
                if taken >= self.needs(name):
                    del self.running[name]
                    self.done.add(name)
                    self.forecast.learn(name, taken)
                else:
                    progress.update(taken / self.needs(name))

    def told(self):
        return self.forecast.seconds(self.left(), self.running)


KINDS = ("pretrain", "finetune", "loss", "needle")


@pytest.mark.parametrize("slower", [0.25, 1, 5, 40])
@pytest.mark.parametrize(("preset", "workers"), [(quick, 2), (gpu, 1)])
def test_after_two_hundredths_of_the_first_job_all_is_forecast(clock, preset, workers, slower):
    study = preset()
    jobs = jobs_of(study, ("a", "b", "temperature", "e"))

    def machine():
        return Machine(clock, study, jobs, workers, dict.fromkeys(KINDS, slower))

    whole = machine()
    whole.run(step=0.1 * slower)
    takes = clock[0] - whole.began
    again = machine()
    # A share is told twice before there is a pace.
    again.run(0.02 * study.seconds["pretrain"] * slower, step=0.1 * slower)
    left = takes - (clock[0] - again.began)
    assert again.told() == pytest.approx(left, rel=0.2)
    assert again.forecast.words(again.left(), again.running).endswith(" left")


@pytest.mark.parametrize("seed", range(3))
def test_the_time_left_is_never_less_than_what_has_not_started_takes(clock, seed):
    """Each kind is as slow as it likes; what is not measured counts as the measured ones do."""
    slower = dict(zip(KINDS, [(3, 3, 3, 3), (9, 2, 1, 4), (0.5, 6, 2, 1)][seed], strict=True))
    study = quick()
    machine = Machine(clock, study, jobs_of(study), 2, slower)

    def look():
        told = machine.told()
        waiting = machine.left() - machine.running.keys()
        measured = {machine.forecast.jobs[name].kind for name in machine.done}
        known = [name for name in waiting if machine.forecast.jobs[name].kind in measured]
        # Two workers share them; an older forecast stands for a few seconds.
        if clock[0] % SECONDS_BETWEEN_FORECASTS == 0:
            assert told >= 0.98 * sum(machine.needs(name) for name in known) / 2

    machine.run(each=look)


def test_it_does_not_count_down_below_the_unstarted_when_a_job_hangs(forecast, clock):
    training = Progress()
    running = {"pretrain-a-0": training}
    for share in (0.01, 0.02):
        clock[0] += 5
        training.update(share)
    forecast.seconds(names(forecast), running)
    clock[0] += 10_000_000
    rest = [job for job in forecast.jobs.values() if job.name != "pretrain-a-0"]
    # Started up in 5 seconds, and 1 % in 5.
    ratio = 505 / forecast.weights["pretrain-a-0"]
    seconds = {job.name: forecast.weights[job.name] * ratio for job in rest}
    unstarted = makespan(forecast.study, rest, 2, seconds=seconds)
    assert forecast.seconds(names(forecast), running) == pytest.approx(unstarted)
    # Nor between two forecasts.
    clock[0] += 0.9 * SECONDS_BETWEEN_FORECASTS
    assert forecast.seconds(names(forecast), running) == pytest.approx(unstarted)


def test_before_anything_is_measured_it_is_an_estimate_and_stands_still(clock):
    study = quick()
    jobs = plan(study)
    forecast = Forecast(study, jobs, 2)
    words = forecast.words(names(forecast), {})
    assert re.fullmatch(r"about \d+ min on two idle cores of a server CPU", words)
    text = Progress()
    for _ in range(100):
        clock[0] += 1
        assert forecast.words(names(forecast), {"data": text}) == words
    # Preparing a text tells nothing of training on it.
    forecast.learn("data", 100.0)
    clock[0] += 100
    left = names(forecast) - {"data"}
    assert forecast.words(left, {"pretrain-a-0": Progress()}).startswith("about ")


def test_it_begins_with_the_plan(forecast):
    left = names(forecast)
    assert forecast.seconds(left, {}) == planned(forecast)
    assert forecast.share(left, {}, set()) == 0.0
    assert forecast.share(set(), {}, left) == pytest.approx(1.0)


def test_what_failed_is_neither_done_nor_left(forecast):
    half = {name for name, job in forecast.jobs.items() if job.configuration == "a"}
    assert forecast.share(names(forecast) - half, {}, set()) == 0.0
    assert forecast.share(names(forecast) - half, {}, half) == pytest.approx(0.5)


def test_a_shorter_training_is_planned_shorter():
    study, short = gpu(), gpu().with_settings({"run.steps": 763})
    steps = study.pretraining.run.steps
    assert short.seconds["pretrain"] == pytest.approx(study.seconds["pretrain"] * 763 / steps)
    assert short.seconds["finetune"] == study.seconds["finetune"]


def test_jobs_of_earlier_commands_are_measured_too(clock):
    study = gpu()
    jobs = jobs_of(study)
    taken = {"pretrain-a-0": 3 * study.seconds["pretrain"]}
    forecast = Forecast(study, jobs, 2, taken=taken)
    left = names(forecast) - {"pretrain-a-0"}
    rest = makespan(study, [job for job in jobs if job.name in left], 2)
    assert forecast.seconds(left, {}) == pytest.approx(3 * rest)
    # Now others use the machine: what was measured before is as much slower.
    training = Progress()
    for seconds, share in ((0, 0.0), (6 * study.seconds["pretrain"] / 10, 0.1)):
        clock[0] += seconds
        training.update(share)
    started = {"pretrain-b-0": training}
    measurements = left - started.keys()
    last = makespan(study, [job for job in jobs if job.name in measurements], 2)
    assert forecast.seconds(left, started) >= 6 * last * 0.99


def test_a_job_that_goes_on_is_counted_from_where_it_is(clock):
    """Killed, it had come further than what it had saved."""
    study = gpu()
    jobs = jobs_of(study, ("a",))
    forecast = Forecast(study, jobs, 1, begun={"pretrain-a-0": 0.9})
    whole, training = makespan(study, jobs, 1), study.seconds["pretrain"]
    assert forecast.seconds(names(forecast), {}) == pytest.approx(whole - 0.9 * training)
    progress = Progress(0.9)
    progress.update(0.5)
    clock[0] += 0.1 * training
    progress.update(0.6)
    to_go = forecast.seconds(names(forecast), {"pretrain-a-0": progress})
    assert to_go == pytest.approx(whole - 0.6 * training)


def test_what_continues_another_job_is_measured_by_its_own_part(clock):
    """(f) does an eighth of the steps."""
    study = quick()
    jobs = jobs_of(study, ("a", "f"))
    forecast = Forecast(study, jobs, 2)
    (f,) = (job for job in jobs if job.name == "pretrain-f-0")
    assert begins_at(study, f) == 7 / 8
    forecast.learn(f.name, 2 * study.seconds["pretrain"] / 8)
    left = {"pretrain-a-0"}
    assert forecast.seconds(left, {}) == pytest.approx(2 * study.seconds["pretrain"])


def test_between_two_forecasts_the_clock_goes_on(forecast, clock):
    training = Progress()
    running = {"pretrain-a-0": training}
    for share in (0.0, 0.5):
        clock[0] += 100
        training.update(share)
    first = forecast.seconds(names(forecast), running)
    clock[0] += 0.5 * SECONDS_BETWEEN_FORECASTS
    to_go = forecast.seconds(names(forecast), running)
    assert to_go == first - 0.5 * SECONDS_BETWEEN_FORECASTS
    clock[0] += SECONDS_BETWEEN_FORECASTS
    assert forecast.seconds(set(), {}) == 0.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "1 min"), (940, "16 min"), (9000, "2 hours"), (400_000, "4.6 days")],
)
def test_an_estimate_is_said_roughly(seconds, words):
    assert roughly(seconds) == words
