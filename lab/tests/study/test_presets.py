"""Presets and their variants: what they change, and what needs no training."""

import dataclasses
import math

import pytest

from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.study.plan import plan
from ssmax_lab.study.presets import VARIANTS, gpu, study_named


def test_two_runs_of_the_gpu_preset_with_all_measurements_fit_half_an_hour():
    study = gpu()
    jobs = plan(study, configurations=["a", "b"], seeds=1, has_text=True)
    assert sum(job.expected for job in jobs) < 29 * 60


@pytest.mark.parametrize(
    ("preset", "variant"), [(base, variant) for base in VARIANTS for variant in VARIANTS[base]]
)
def test_a_variant_is_the_preset_but_for_what_it_is_called_after(preset, variant):
    base, study = study_named(preset), study_named(f"{preset}:{variant}")
    changes = VARIANTS[preset][variant]
    assert study.preset == f"{preset}:{variant}"
    assert study.pretraining == base.pretraining.with_overrides(changes) != base.pretraining
    same = {"preset": preset, "pretraining": base.pretraining, "seconds": base.seconds}
    assert dataclasses.replace(study, **same) == base


def test_twice_the_training_length_is_as_many_tokens_in_a_step():
    base, longer = study_named("small"), study_named("small:length-1k")
    assert longer.train_length == 2 * base.train_length
    assert longer.pretraining.tokens_per_step == base.pretraining.tokens_per_step
    assert longer.seconds == base.seconds


def test_the_small_study_has_three_seeds():
    assert min(study_named("small").seeds[name] for name in "abcdef") == 3


AT_TEST_TIME = {name: one for name, one in CONFIGURATIONS.items() if one.applied == "test time"}


@pytest.mark.parametrize("base", "abc")
def test_what_is_applied_at_test_time_needs_no_training_of_its_own(base):
    names = [name for name, one in AT_TEST_TIME.items() if one.base == base]
    jobs = plan(gpu(), configurations=names, seeds=1)
    assert {job.run for job in jobs if job.kind in ("pretrain", "finetune")} == {f"{base}-0"}
    assert {job.run for job in jobs if job.kind == "needle"} == {f"{name}-0" for name in names}


def test_the_constant_is_yarns_for_as_far_as_positions_carry():
    """Theta x 50 carries the paper's model to 9,246 tokens, nine times its training length."""
    assert gpu().test_constant == pytest.approx((0.1 * math.log(9246 / 1024) + 1) ** 2, rel=1e-4)
    # Nothing turns: as far as anything is measured.
    assert study_named("small:no-rotary").test_constant == (0.1 * math.log(20) + 1) ** 2


@pytest.mark.parametrize(
    ("questions", "digits"), [("hidden:7", 7), ("q.json+hidden:5", 5), ("q.json", 4)]
)
def test_numbers_are_as_long_in_the_test_as_those_that_were_taught(questions, digits):
    assert study_named("small").with_questions(questions).digits == digits
