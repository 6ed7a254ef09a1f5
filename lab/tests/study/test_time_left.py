"""When a study will be done, as its line says while it runs."""

import re
import time

import pytest

from ssmax._progress import roughly
from ssmax_lab.study.plan import expected_time, plan
from ssmax_lab.study.presets import gpu, quick
from ssmax_lab.study.scheduler import TimeLeft


@pytest.fixture
def now(monkeypatch):
    """The time, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def seconds(words):
    """Read m:ss or h:mm:ss."""
    assert words.endswith(" left")
    parts = words.removesuffix(" left").split(":")
    return sum(int(part) * 60**power for power, part in enumerate(reversed(parts)))


def without_data(jobs):
    return [job for job in jobs if job.kind != "data"]


@pytest.mark.parametrize("slower", [0.25, 1, 5, 40])
def test_what_is_left_takes_as_much_longer_as_what_was_done(now, slower):
    jobs = without_data(plan(gpu(), configurations=["a", "b"], seeds=1))
    whole = slower * expected_time(gpu(), jobs, 1)
    left = TimeLeft(gpu(), jobs, 1)
    training = jobs[0]
    left.update(training, 0.0)
    now[0] += 0.02 * slower * gpu().seconds["pretrain"]
    left.update(training, 0.02)
    passed = now[0] - 1000.0
    assert seconds(left.words(jobs)) == pytest.approx(whole - passed, abs=1)
    now[0] = 1000.0 + slower * gpu().seconds["pretrain"]
    left.update(training, 1.0)
    passed = now[0] - 1000.0
    assert seconds(left.words(jobs[1:])) == pytest.approx(whole - passed, abs=1)


def test_before_anything_is_measured_it_is_an_estimate_and_stands_still(now):
    jobs = plan(quick())
    left = TimeLeft(quick(), jobs, 2)
    words = left.words(jobs)
    assert re.fullmatch(r"about \d+ min on two idle cores of a server CPU", words)
    now[0] += 100
    assert left.words(jobs) == words
    # A first report tells where it is, and no pace.
    left.update(jobs[1], 0.3)
    assert left.words(jobs).startswith("about ")


def test_what_an_earlier_command_did_is_not_the_work_of_this_one(now):
    (training,) = plan(gpu(), configurations=["a"], seeds=1, figures=[4], has_text=True)
    left = TimeLeft(gpu(), [training], 1)
    left.update(training, 0.5)
    now[0] += 100
    left.update(training, 0.6)
    assert seconds(left.words([training])) == pytest.approx(400, abs=1)


def test_a_measurement_that_ends_before_anything_reports_tells_the_pace(now):
    jobs = [job for job in plan(gpu(), configurations=["a", "b"], seeds=1) if job.kind == "loss"]
    left = TimeLeft(gpu(), jobs, 1)
    left.update(jobs[0], 1.0, taken=3 * gpu().seconds["loss"])
    assert seconds(left.words(jobs[1:])) == pytest.approx(3 * gpu().seconds["loss"], abs=1)


def test_what_continues_another_job_counts_with_its_own_part(now):
    """(f) does an eighth of the steps."""
    study = quick()
    jobs = plan(study, configurations=["a", "f"], seeds=1, figures=[4], has_text=True)
    left = TimeLeft(study, jobs, 1)
    assert sum(left.work.values()) == pytest.approx(study.seconds["pretrain"] * 9 / 8)
    (f,) = (job for job in jobs if job.configuration == "f")
    left.update(f, 7 / 8)
    assert left.work[f.name] == pytest.approx(study.seconds["pretrain"] / 8)


def test_what_failed_is_not_left(now):
    jobs = without_data(plan(gpu(), configurations=["a", "b"], seeds=1))
    half = [job for job in jobs if job.configuration == "b"]
    left = TimeLeft(gpu(), jobs, 1)
    left.update(jobs[0], 0.0)
    now[0] += gpu().seconds["pretrain"]
    left.update(jobs[0], 1.0)
    assert seconds(left.words(half)) == pytest.approx(expected_time(gpu(), half, 1), abs=1)


def test_a_shorter_training_is_planned_shorter():
    study, short = gpu(), gpu().with_settings({"run.steps": 763})
    steps = study.pretraining.run.steps
    assert short.seconds["pretrain"] == pytest.approx(study.seconds["pretrain"] * 763 / steps)
    assert short.seconds["finetune"] == study.seconds["finetune"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "1 min"), (940, "16 min"), (9000, "2 hours"), (400_000, "4.6 days")],
)
def test_an_estimate_is_said_roughly(seconds, words):
    assert roughly(seconds) == words
