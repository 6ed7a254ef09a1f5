"""How far rotary positions carry: arithmetic against angles, and a loss that breaks."""

import math

import numpy as np
import pytest

from ssmax_lab.report.reach import breaks_at, carries_to


@pytest.mark.parametrize("pairs", [8, 32])
@pytest.mark.parametrize("train_length", [64, 512, 1024])
@pytest.mark.parametrize("theta", [1e3, 1e4, 1e5])
@pytest.mark.parametrize("factor", [1, 4, 50])
def test_no_pair_is_shown_an_angle_that_it_was_not_trained_at(pairs, train_length, theta, factor):
    until = carries_to(train_length, pairs=pairs, theta=theta, factor=factor)

    def is_known(position):
        speeds = theta ** (-np.arange(pairs) / pairs)
        seen = train_length * speeds
        shown = position * (theta * factor) ** (-np.arange(pairs) / pairs)
        return bool(np.all((seen >= math.tau) | (shown <= seen)))

    assert is_known(0.999 * until) and not is_known(1.001 * until)


def test_where_every_pair_has_seen_all_angles_nothing_bounds_positions():
    assert carries_to(8192, pairs=8, theta=100.0, factor=4) == math.inf
    assert carries_to(64, pairs=0, theta=1e4, factor=4) == math.inf  # no rotation at all
    assert carries_to(4, pairs=8, theta=1e4, factor=4) == 4  # not even the fastest turns


def test_a_loss_breaks_where_it_stays_above():
    losses = np.full(2000, 3.0)
    losses[300:320] += 5.0  # a hard passage
    losses[1200:] += 1.0
    assert breaks_at(losses, 100) == pytest.approx(1212, abs=3)
    assert breaks_at(losses[:1200], 100) is None
