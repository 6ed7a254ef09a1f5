"""Intervals cover what they should, and a verdict is only as sure as they are."""

import numpy as np
import pytest

from ssmax_lab.analysis import statistics
from ssmax_lab.analysis.statistics import Interval, over_items, over_seeds


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr(statistics, "BOOTSTRAP_DRAWS", 400)


@pytest.mark.parametrize("seeds", [3, 5, 40])
def test_intervals_over_seeds_cover_the_truth_about_19_times_of_20(seeds):
    generator = np.random.default_rng(seeds)
    covered = 0
    for _ in range(1000):
        noise = generator.normal(size=seeds)
        first = generator.normal(0.3, 1.0, seeds) + noise
        interval = over_seeds(first, noise)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.925 < covered / 1000 < 0.975


def test_intervals_over_items_cover_the_truth_about_19_times_of_20(few_draws):
    generator = np.random.default_rng(0)
    covered = 0
    for number in range(400):
        first = generator.normal(-0.2, 1.0, 60)
        interval = over_items(first, np.zeros(60), what="documents", seed=number)
        covered += interval.low <= -0.2 <= interval.high
    assert 0.90 < covered / 400 < 0.98


def test_what_the_pairs_share_does_not_widen_the_interval():
    generator = np.random.default_rng(1)
    shared = 100 * generator.normal(size=5)
    interval = over_seeds(shared - 0.1 + 0.01 * generator.normal(size=5), shared)
    assert interval.high < 0 and interval.verdict("below") == "supported"
    assert interval.verdict("above") == "contradicted"


def test_an_interval_around_zero_decides_nothing():
    interval = over_seeds([1.0, -1.0, 0.1], [0.0, 0.0, 0.0])
    assert interval.verdict("below") == interval.verdict("above") == "not resolved"


def test_a_sure_difference_that_nobody_would_see_decides_nothing():
    interval = Interval(effect=5e-5, low=4e-5, high=6e-5, basis="100 trials")
    assert interval.verdict("below") == interval.verdict("above") == "not resolved"


def test_the_sign_is_first_minus_second():
    interval = over_seeds([1.0, 2.0, 3.0], [2.0, 3.0, 4.1])
    assert interval.effect == pytest.approx(-1.0333, abs=1e-4)
    assert interval.basis == "3 seeds"


def test_the_same_seed_gives_the_same_interval(few_draws):
    values = np.arange(40.0)
    once, again = (over_items(values, values[::-1] * 0.9, what="trials", seed=3) for _ in range(2))
    assert once == again
    assert once.basis == "bootstrap over 40 trials, one seed"


def test_how_many_draws_are_made_at_once_changes_nothing(few_draws, monkeypatch):
    values = np.arange(40.0)
    once = over_items(values, 0.9 * values[::-1], what="trials")
    monkeypatch.setattr(statistics, "_MOST_AT_ONCE", 70)
    assert over_items(values, 0.9 * values[::-1], what="trials") == once


def test_an_interval_over_five_holds_the_truth_as_often_as_it_says():
    chance = np.random.default_rng(0)
    nothing = np.zeros(5)
    found = [over_items(chance.normal(size=5), nothing, what="stretches") for _ in range(2000)]
    held = np.mean([one.low <= 0.0 <= one.high for one in found])
    assert held == pytest.approx(0.95, abs=0.02)
    assert found[0].basis == "5 stretches, one seed"


@pytest.mark.parametrize(("seeds", "t"), [(3, 4.303), (31, 2.042), (32, 2.040), (200, 1.972)])
def test_an_interval_over_seeds_is_students_however_many_there_are(seeds, t):
    values = np.arange(float(seeds))
    interval = over_seeds(values, np.zeros(seeds))
    half = (interval.high - interval.low) / 2
    assert half / (values.std(ddof=1) / seeds**0.5) == pytest.approx(t)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: over_seeds([1.0, 2.0], [1.0, 2.0]), "at least 3 of them, got 2"),
        (lambda: over_items([1.0], [1.0], what="trials"), "at least 2 trials, got 1"),
        (lambda: over_seeds([1.0, 2.0, 3.0], [1.0, 2.0]), "in pairs"),
        (lambda: over_seeds([1.0, 2.0, np.nan], [1.0, 2.0, 3.0]), "must be finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
