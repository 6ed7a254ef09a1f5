"""When a study will be done, as its line says while it runs."""

import time

import pytest

from ssmax.study.conductor import SECONDS_BETWEEN_FORECASTS, Forecast
from ssmax.study.plan import makespan, plan
from ssmax.study.presets import gpu


@pytest.fixture
def clock(monkeypatch):
    """The time, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def forecast(clock):
    study = gpu()
    jobs = [job for job in plan(study, configurations=["a", "b"], seeds=1) if job.kind != "data"]
    return Forecast(study, jobs, 2, {job.name for job in jobs})


def names(forecast):
    return {job.name for job in forecast.jobs}


def test_it_begins_with_the_plan(forecast):
    left = names(forecast)
    assert forecast.seconds(left, {}) == makespan(forecast.study, forecast.jobs, 2)
    assert forecast.share(left, {}, set()) == 0.0 and forecast.share(
        set(), {}, left
    ) == pytest.approx(1.0)


def test_what_failed_is_neither_done_nor_left(forecast):
    half = {job.name for job in forecast.jobs if job.configuration == "a"}
    assert forecast.share(names(forecast) - half, {}, set()) == 0.0
    assert forecast.share(names(forecast) - half, {}, half) == pytest.approx(0.5)


def test_a_shorter_training_is_planned_shorter():
    study, short = gpu(), gpu().with_settings({"run.steps": 763})
    steps = study.pretraining.run.steps
    assert short.seconds["pretrain"] == pytest.approx(study.seconds["pretrain"] * 763 / steps)
    assert short.seconds["finetune"] == study.seconds["finetune"]


def test_two_side_by_side_are_not_waited_for_one_after_the_other(forecast, clock):
    # The first training runs alone, and exactly as long as it should.
    forecast.seconds(names(forecast), {"pretrain-a-0": 0.0})
    clock[0] += 0.5 * forecast.study.seconds["pretrain"]
    to_go = forecast.seconds(names(forecast), {"pretrain-a-0": 0.5})
    assert to_go == pytest.approx(forecast.planned - 0.5 * forecast.study.seconds["pretrain"])


def test_a_slower_machine_is_noticed(forecast, clock):
    clock[0] += 3 * forecast.study.seconds["pretrain"]
    left = names(forecast) - {"pretrain-a-0"}
    rest = forecast.planned - forecast.study.seconds["pretrain"]
    assert forecast.seconds(left, {}) == pytest.approx(3 * rest)


def test_what_an_earlier_command_did_is_no_progress_of_this_one(forecast, clock):
    """Its log still says how far it came."""
    left, training = names(forecast), forecast.study.seconds["pretrain"]
    whole = makespan(forecast.study, forecast.jobs, 2)
    rest = whole - 0.5 * training
    assert forecast.seconds(left, {"pretrain-a-0": 0.5}) == pytest.approx(rest)
    clock[0] += SECONDS_BETWEEN_FORECASTS
    to_go = forecast.seconds(left, {"pretrain-a-0": 0.5})
    assert to_go == pytest.approx(rest - SECONDS_BETWEEN_FORECASTS)
    # The other half of it takes all the time of a training: so will everything, twice its own.
    clock[0] = forecast.started + training
    to_go = forecast.seconds(left - {"pretrain-a-0"}, {})
    assert to_go == pytest.approx(2 * (whole - training))


def test_a_job_that_fell_back_to_its_checkpoint_is_counted_from_there(forecast, clock):
    """Killed, it had come further than what it had saved."""
    left = names(forecast)
    forecast.seconds(left, {"pretrain-a-0": 0.9})
    clock[0] += SECONDS_BETWEEN_FORECASTS
    forecast.seconds(left, {"pretrain-a-0": 0.1})
    clock[0] = forecast.started + 0.8 * forecast.study.seconds["pretrain"]
    to_go = forecast.seconds(left, {"pretrain-a-0": 0.9})
    whole = makespan(forecast.study, forecast.jobs, 2)
    assert to_go == pytest.approx(whole - 0.9 * forecast.study.seconds["pretrain"])


def test_between_two_forecasts_the_clock_goes_on(forecast, clock):
    first = forecast.seconds(names(forecast), {})
    clock[0] += 0.5 * SECONDS_BETWEEN_FORECASTS
    assert forecast.seconds(set(), {}) == first - 0.5 * SECONDS_BETWEEN_FORECASTS
    clock[0] += SECONDS_BETWEEN_FORECASTS
    assert forecast.seconds(set(), {}) == 0.0
