"""A plan holds what is asked for and what that needs, in an order in which it can be done."""

import pytest

from ssmax_lab.study.plan import Job, plan, read_figures, side_by_side
from ssmax_lab.study.presets import CONFIGURATIONS, PRESETS, quick, small


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_plan_that_can_be_done(preset):
    study = PRESETS[preset]()
    assert set(study.seeds) == set(CONFIGURATIONS)
    done = set()
    for job in plan(study):
        assert set(job.needs) <= done, job.name
        assert job.seconds > 0
        named = Job.named(job.name)
        assert (named.kind, named.run) == (job.kind, job.run)
        done.add(job.name)


def test_quick_has_softmax_ssmax_and_the_control_and_fits_fifteen_minutes():
    jobs = plan(quick())
    assert {job.configuration for job in jobs} == {"", "a", "b", "temperature"}
    assert {job.kind for job in jobs} == {"data", "pretrain", "loss", "needle"}
    assert side_by_side((job.expected for job in jobs), 2) < 15 * 60
    assert "pretrain-probe-0" in {
        job.name for job in plan(quick(), configurations=["probe"], seeds=1)
    }


def test_where_retrieval_is_taught_in_pretraining_nothing_is_fine_tuned():
    jobs = plan(quick(), figures=[6])
    assert {job.kind for job in jobs} == {"data", "pretrain", "needle"}
    assert not [
        job for job in plan(quick(), configurations=["a", "e"], seeds=1) if job.run == "e-0"
    ]


@pytest.mark.parametrize(
    ("figures", "kinds"),
    [
        ([1, 3], set()),
        ([2], {"data", "pretrain"}),
        ([4], {"data", "pretrain"}),
        ([5], {"data", "pretrain", "loss"}),
        ([6], {"data", "pretrain", "finetune", "needle"}),
        ([5, 8], {"data", "pretrain", "finetune", "loss", "needle"}),
    ],
)
def test_a_figure_needs_no_more_than_it_is_drawn_from(figures, kinds):
    assert {job.kind for job in plan(small(), figures=figures)} == kinds


def test_figure_2_needs_the_probe_and_figure_4_all_but_it():
    probe = {job.run for job in plan(small(), figures=[2]) if job.kind == "pretrain"}
    others = {job.run for job in plan(small(), figures=[4]) if job.kind == "pretrain"}
    assert probe == {"probe-0"} and "probe-0" not in others and "a-1" in others


def test_e_is_made_of_a():
    jobs = {job.name: job for job in plan(small(), configurations=["e"], seeds=1)}
    assert jobs["finetune-e-0"].needs == ("pretrain-a-0",)
    assert jobs["loss-e-0"].needs == ("pretrain-a-0",)
    assert "needle-a-0" not in jobs


def test_f_goes_on_from_a_where_both_are_wanted():
    def pretraining_of_f(configurations, **options):
        jobs = plan(small(), configurations=configurations, seeds=1, **options)
        return next(job for job in jobs if job.name.startswith("pretrain-f"))

    both, alone = pretraining_of_f(["f", "a"], first_seed=3), pretraining_of_f(["f"])
    assert both.needs == ("data", "pretrain-a-3") and alone.needs == ("data",)
    whole = small().seconds["pretrain"]
    assert both.expected == whole / 8 and alone.expected == whole


def test_workers_share_the_time():
    assert side_by_side([10, 10, 20], 1) == 40 and side_by_side([10, 10, 20], 2) == 20
    assert side_by_side([], 2) == 0


def test_a_run_is_measured_before_the_next_is_trained():
    names = [job.name for job in plan(small(), configurations=["b", "a"], seeds=2)]
    assert names[:5] == ["data", "pretrain-b-0", "loss-b-0", "finetune-b-0", "needle-b-0"]
    assert names[5:6] == ["pretrain-a-0"] and names[9:10] == ["pretrain-b-1"]


def test_figures_are_read_as_people_write_them():
    assert read_figures([]) is None
    assert read_figures(["figure5", "C6", "fig 6", "2"]) == [2, 5, 6]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan(small(), configurations=["g"]), "no configuration 'g'; known: a, b, c"),
        (lambda: plan(small(), configurations=["temprature"]), "did you mean 'temperature'"),
        (lambda: plan(small(), configurations=["a"], figures=[2]), "nothing to do"),
        (lambda: read_figures(["figure9"]), "figure1 to figure8"),
    ],
)
def test_bad_input_gets_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
