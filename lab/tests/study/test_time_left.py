"""When a study will be done, as its line says while it runs."""

import re
import time

import pytest

from ssmax._progress import roughly
from ssmax_lab.study.plan import plan
from ssmax_lab.study.presets import gpu
from ssmax_lab.study.scheduler import Running, Scheduler


@pytest.fixture
def now(monkeypatch):
    """The time, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def running(tmp_path):
    """Starts a training that says what a test lets it say."""

    def start(job):
        log = tmp_path / f"{job.name}.log"
        log.touch()
        return Running(job, None, log, said_before=0)

    return start


def reports(one, done, total=1000):
    with one.log.open("a") as log:
        log.write(f"step {done:,}/{total:,}  loss 3.1\n")
    one.look()


def seconds(words):
    """Read m:ss or h:mm:ss."""
    assert words.endswith(" left")
    parts = words.removesuffix(" left").split(":")
    return sum(int(part) * 60**power for power, part in enumerate(reversed(parts)))


def scheduler(jobs, tmp_path):
    return Scheduler(
        tmp_path, jobs, command=lambda job: [], workers=1, measured_on=gpu().measured_on
    )


JOBS = plan(gpu(), configurations=["a", "f"], seeds=1, has_text=True)
ALL = sum(job.expected for job in JOBS)


@pytest.mark.parametrize("slower", [0.25, 1, 5, 40])
def test_what_is_left_takes_as_much_longer_as_what_was_done(now, running, tmp_path, slower):
    here, training = scheduler(JOBS, tmp_path), running(JOBS[0])
    reports(training, 0)
    now[0] += 0.02 * slower * JOBS[0].seconds
    reports(training, 20)
    left = slower * (ALL - 0.02 * JOBS[0].seconds)
    assert seconds(here.time_left(JOBS, [training])) == pytest.approx(left, abs=1)
    here.took, here.planned = slower * JOBS[0].seconds, JOBS[0].seconds
    left = slower * (ALL - JOBS[0].seconds)
    assert seconds(here.time_left(JOBS[1:], [])) == pytest.approx(left, abs=1)


def test_before_anything_is_measured_it_is_an_estimate_and_stands_still(now, running, tmp_path):
    here, training = scheduler(JOBS, tmp_path), running(JOBS[0])
    words = here.time_left(JOBS, [training])
    assert re.fullmatch(r"about \d+ min on one H200", words)
    now[0] += 100
    assert here.time_left(JOBS, [training]) == words
    # A first report tells where it is, and no pace.
    reports(training, 300)
    assert here.time_left(JOBS, [training]).startswith("about ")


def test_what_an_earlier_command_did_is_not_the_work_of_this_one(now, running, tmp_path):
    here, training = scheduler(JOBS[:1], tmp_path), running(JOBS[0])
    reports(training, 500)
    now[0] += 100
    reports(training, 600)
    assert seconds(here.time_left(JOBS[:1], [training])) == pytest.approx(400, abs=1)


def test_what_continues_another_job_counts_with_its_own_part(now, running, tmp_path):
    """(f) does an eighth of the steps."""
    (f,) = (job for job in JOBS if job.name == "pretrain-f-0")
    here, training = scheduler([f], tmp_path), running(f)
    assert f.expected == f.seconds / 8
    reports(training, 875)
    now[0] += f.seconds / 16
    reports(training, 938)
    assert seconds(here.time_left([f], [training])) == pytest.approx(f.seconds / 16, abs=1)


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
