"""Retrieval taught in short documents during pretraining, and asked for at every length."""

import dataclasses

import numpy as np
import pytest

from ssmax_lab.analysis.findings import Findings, Replica, read_findings
from ssmax_lab.configurations import PILOT_SEED
from ssmax_lab.records import Provenance, RetrievalGrid
from ssmax_lab.study.claims import judge, unsaturated_cells
from ssmax_lab.study.plan import plan
from ssmax_lab.study.presets import million, small
from ssmax_lab.study.reproduction import reproduce


@pytest.fixture
def taught(tiny):
    """The tiny study, which teaches retrieval in documents of 112 bytes."""
    pretraining = tiny.pretraining.with_overrides(
        {"data.needle_length": 112, "data.needles_per_row": 2}
    )
    return dataclasses.replace(
        tiny,
        pretraining=pretraining,
        base_factors=(1.0, 4.0),
        needle_lengths=(128, 512),
        cells=(),
    )


@pytest.mark.usefixtures("undrawn")
def test_a_study_that_teaches_in_pretraining_measures_every_base_and_length(
    taught, tokens, tmp_path
):
    done = reproduce(
        taught, tmp_path / "s", configurations=["b", "clamp", "b_held"], seeds=1, first_seed=1,
        figures=[6], data=tokens,
    )  # fmt: skip
    assert done.is_whole, done.failed
    found = read_findings(tmp_path / "s")
    assert {name: set(grids) for name, grids in found.grids.items()} == {
        name: {Replica(1)} for name in ("b", "clamp", "b_held")
    }
    grid = found.grids["b"][Replica(1)]
    assert grid.lengths == [112, 128, 256, 512] and grid.base_factors == [1.0, 4.0]
    assert np.shape(grid.accuracy) == (2, 4) and np.shape(grid.weights) == (2, 4, 1, 2)
    assert grid.count == 4 and grid.taught_length == 112
    held, clamp = (found.grids[name][Replica(1)] for name in ("b_held", "clamp"))
    # Up to where it was taught the factor is the same; at the first cells so are the weights.
    assert held.weights[0][0] == pytest.approx(np.array(grid.weights[0][0]), abs=1e-4)
    assert clamp.run == "a-1+clamp" and held.run == "b-1+ssmax_held"


def test_of_the_pilot_seed_only_softmax_is_trained():
    jobs = plan(million())
    runs = {job.run for job in jobs if job.configuration}
    assert f"a-{PILOT_SEED}" in runs and f"b-{PILOT_SEED}" not in runs
    assert {f"{name}-{seed}" for name in ("a", "b", "b_held") for seed in range(1, 7)} <= runs
    assert not any(job.kind == "finetune" or job.configuration == "e" for job in jobs)
    assert "finetune" in {job.kind for job in plan(small())}


HERE = Provenance(commit="c", config_hash="h", versions={}, device="cpu", seed=0, date="2026-01-01")


def grid(*accuracy: float, taught: float = 1.0) -> RetrievalGrid:
    return RetrievalGrid(
        run="r", taught_length=64, base_factors=[1.0, 4.0], lengths=[64, 128, 256], count=10,
        accuracy=[[taught, *accuracy[:2]], [taught, *accuracy[2:]]],
        weights=[[[[0.5]]] * 3] * 2, provenance=HERE,
    )  # fmt: skip


def findings(**grids: dict[int, RetrievalGrid]) -> Findings:
    study = {**million().to_dict(), "preset": "million"}
    by_replica = {
        name: {Replica(seed): one for seed, one in found.items()} for name, found in grids.items()
    }
    return Findings(study=study, grids=by_replica)


def claim_6(found: Findings):
    return [one for one in judge(found, HERE) if one.claim == "C6"]


def test_cells_are_those_where_softmax_of_the_pilot_seed_is_unsaturated():
    pilot = grid(0.95, 0.5, 0.2, 0.05)
    assert unsaturated_cells(findings(a={0: pilot})) == [(1.0, 256), (4.0, 128)]
    assert unsaturated_cells(findings(a={1: pilot})) == []
    assert unsaturated_cells(findings(a={0: grid(0.5, 0.5, 0.5, 0.5, taught=0.9)})) == []


def test_the_verdict_is_over_the_seeds_that_are_counted():
    softmax, better = grid(1.0, 0.5, 0.5, 0.0), grid(1.0, 0.8, 0.9, 1.0)
    lucky = grid(1.0, 0.0, 0.0, 0.0)
    found = findings(
        a={0: softmax, 1: softmax, 2: softmax, 3: grid(1.0, 0.45, 0.5, 0.0)},
        b={0: lucky, 1: better, 2: better, 3: better},
    )
    first = claim_6(found)[0]
    assert first.verdict == "supported" and first.basis == "3 seeds"
    assert first.effect == pytest.approx((0.35 + 0.35 + 0.375) / 3)


def test_a_model_that_did_not_learn_the_task_says_nothing():
    softmax, better = grid(1.0, 0.5, 0.5, 0.0), grid(1.0, 0.8, 0.9, 1.0)
    failed = grid(1.0, 0.5, 0.5, 0.0, taught=0.94)
    found = findings(
        a={0: softmax, 1: failed, 2: softmax}, b={1: better, 2: better}, constant={1: better}
    )
    comparisons = claim_6(found)
    assert "(b) retrieves more than (a) with a constant" in comparisons[4].text
    assert comparisons[0].verdict == "too few seeds" and comparisons[0].basis == "1 seed"
    assert "did not learn the task" in next(
        one.basis for one in comparisons if "a constant applied" in one.text
    )
    told = next(one for one in comparisons if "did not learn" in one.text)
    assert told.effect is None and told.basis.startswith("1 of 2 seeds")
