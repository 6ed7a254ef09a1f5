"""Where a measured loss breaks; the RoPE limit itself is tested in the library."""

import math

import numpy as np
import pytest

from ssmax_lab.analysis.formulas import breaks_at, rope_limit_of


def test_a_model_that_rotates_nothing_has_no_limit():
    assert rope_limit_of(64, 1e4, 0, 4.0) == math.inf
    assert rope_limit_of(64, 1e4, 16, 16.0) == pytest.approx(64 * 16 ** (3 / 8))


def test_a_loss_breaks_where_it_stays_above():
    losses = np.full(2000, 3.0)
    losses[300:320] += 5.0  # a hard passage
    losses[1200:] += 1.0
    assert breaks_at(losses, 100) == pytest.approx(1212, abs=3)
    assert breaks_at(losses[:1200], 100) is None
