"""The RoPE extrapolation limit, by arithmetic alone."""

import math
import subprocess
import sys

import pytest

from ssmax import rope_limit


def first_unseen(train_length: int, base: float, head_dim: int, base_factor: float) -> float:
    """Search every pair for the position where its angle exceeds the largest one in training."""
    limits = []
    for pair in range(head_dim // 2):
        trained = train_length * base ** (-2 * pair / head_dim)
        if trained < math.tau:
            limits.append(trained / (base * base_factor) ** (-2 * pair / head_dim))
    return min(limits, default=math.inf)


@pytest.mark.parametrize("base", [100.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize("base_factor", [1.0, 4.0, 50.0])
@pytest.mark.parametrize(("train_length", "head_dim"), [(64, 16), (512, 64), (1024, 128)])
def test_it_is_the_first_position_of_any_pair_at_an_unseen_angle(
    train_length, head_dim, base, base_factor
):
    limit = rope_limit(train_length, base, head_dim, base_factor=base_factor)
    expected = first_unseen(train_length, base, head_dim, base_factor)
    assert limit == pytest.approx(expected)
    assert limit >= train_length


def test_the_limit_of_an_unchanged_base_is_the_training_length():
    assert rope_limit(1024, 10_000.0, 64) == 1024


def test_a_base_whose_pairs_all_turn_has_no_limit():
    assert rope_limit(1024, 2.0, 64, base_factor=8) == math.inf


def test_the_numbers_of_the_study():
    # 49 M parameters at 512 tokens, the base times 50 at test time (docs/long-contexts.md)
    for base, reported in ((1_000, 6_671), (10_000, 3_620), (100_000, 2_509)):
        assert round(rope_limit(512, base, 64, base_factor=50)) == reported


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"train_length": 1}, "train_length"),
        ({"base": 0}, "base"),
        ({"base": math.nan}, "base"),
        ({"head_dim": 63}, "even"),
        ({"head_dim": 64.0}, "whole"),
        ({"base_factor": 0.5}, "base_factor"),
    ],
)
def test_what_is_no_model_is_an_error(change, word):
    options = {"train_length": 1024, "base": 10_000.0, "head_dim": 64, **change}
    with pytest.raises(ValueError, match=word):
        rope_limit(**options)


def test_it_needs_no_torch():
    code = "import sys, ssmax; ssmax.rope_limit(64, 1e4, 16); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
