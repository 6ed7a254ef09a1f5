"""Intervals cover what they should, and a verdict is only as sure as they are."""

import numpy as np
import pytest
from scipy import stats

from ssmax_lab.analysis.statistics import Interval, exact, holm, over_seeds


def verdict(interval, expected, **others):
    return interval.verdict(expected, **{"p": interval.p, **others})


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


def test_what_the_pairs_share_does_not_widen_the_interval():
    generator = np.random.default_rng(1)
    shared = 100 * generator.normal(size=5)
    interval = over_seeds(shared - 0.1 + 0.01 * generator.normal(size=5), shared)
    assert interval.high < 0 and verdict(interval, "below") == "supported"
    assert verdict(interval, "above") == "contradicted"


@pytest.mark.parametrize(
    ("seeds", "margin", "word"),
    [
        ([1.0, -1.0, 0.1], 0.05, "inconclusive"),
        ([0.01, -0.01, 0.001], 0.05, "no difference larger than 0.05"),
        ([0.01, -0.01, 0.001], 0.02, "inconclusive"),
        ([-0.30, -0.31, -0.32], 0.05, "supported"),
        ([-0.030, -0.031, -0.032], 0.05, "supported"),
        ([0.30, 0.31, 0.32], 0.05, "contradicted"),
        ([0.3, 0.3], 0.05, "too few seeds"),
        ([0.3], 0.05, "too few seeds"),
        ([0.3, 0.3, 0.3], 0.05, "contradicted"),
        ([0.0, 0.0, 0.0], 0.05, "no difference larger than 0.05"),
    ],
)
def test_a_verdict_is_off_zero_within_the_margin_or_open(seeds, margin, word):
    assert verdict(over_seeds(seeds, [0.0] * len(seeds)), "below", margin=margin) == word


def test_what_is_off_zero_alone_need_not_be_among_others():
    interval = over_seeds([-0.3, -0.5, -0.4], [0.0] * 3)
    assert interval.high < 0 and verdict(interval, "below") == "supported"
    assert verdict(interval, "below", p=4 * interval.p) == "inconclusive"


def test_a_sure_difference_that_nobody_would_see_decides_nothing():
    interval = Interval(effect=5e-5, low=4e-5, high=6e-5, p=1e-9, basis="3 seeds")
    for side in ("below", "above"):
        assert verdict(interval, side, margin=1e-5) == "inconclusive"
        assert verdict(interval, side, margin=0.05) == "no difference larger than 0.05"


def test_what_no_chance_is_in_needs_no_seeds():
    assert verdict(exact(-0.1), "below") == "supported"
    assert verdict(exact(-0.1), "above") == "contradicted"


def test_no_verdict_is_wrong_more_often_than_one_study_in_twenty():
    """Six comparisons without any effect, read together."""
    chance, wrong = np.random.default_rng(0), 0
    for _ in range(500):
        read = [over_seeds(chance.normal(size=4), np.zeros(4)) for _ in range(6)]
        adjusted = holm([one.p for one in read])
        found = [one.verdict("below", p=p) for one, p in zip(read, adjusted, strict=True)]
        wrong += any(word != "inconclusive" for word in found)
    assert wrong / 500 < 0.075


def test_holm_multiplies_the_least_most_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_the_sign_is_first_minus_second():
    interval = over_seeds([1.0, 2.0, 3.0], [2.0, 3.0, 4.1])
    assert interval.effect == pytest.approx(-1.0333, abs=1e-4)
    assert interval.basis == "3 seeds"


@pytest.mark.parametrize("seeds", [3, 31, 200])
def test_interval_and_p_are_scipys(seeds):
    values = np.random.default_rng(seeds).normal(0.2, 1.0, seeds)
    interval, there = over_seeds(values, np.zeros(seeds)), stats.ttest_1samp(values, 0.0)
    assert interval.p == pytest.approx(there.pvalue)
    assert (interval.low, interval.high) == pytest.approx(tuple(there.confidence_interval()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: over_seeds([], []), "in pairs"),
        (lambda: over_seeds([1.0, 2.0, 3.0], [1.0, 2.0]), "in pairs"),
        (lambda: over_seeds([1.0, 2.0, np.nan], [1.0, 2.0, 3.0]), "must be finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
