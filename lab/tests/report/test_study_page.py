"""The page tells what a study was, and puts its values beside the paper's."""

import dataclasses

import pytest

from ssmax_lab.analysis.findings import Findings, Replica
from ssmax_lab.model import LM
from ssmax_lab.report.figures import study_figures
from ssmax_lab.report.study_page import about
from ssmax_lab.study.presets import VARIANTS, Study, gpu, paper, quick, small, study_named


def findings(study: Study | None = None) -> Findings:
    return Findings(study=(study or quick()).to_dict())


def told(study: Study) -> dict[str, str]:
    return {what: value for what, value, _ in about(findings(study)).rows}


def changed(study: Study, **changes: object) -> Study:
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return dataclasses.replace(study, pretraining=study.pretraining.with_overrides(values))


@pytest.mark.parametrize(
    ("study", "parameters"),
    [
        (quick(), "249 thousand"),
        (study_named("quick:larger"), "591 thousand"),
        (study_named("quick:smaller"), "129 thousand"),
        (changed(quick(), model__num_kv_heads=2), "237 thousand"),
        (changed(quick(), model__head_dim=32), "298 thousand"),
    ],
)
def test_the_page_has_the_parameters_of_the_studys_own_model(study, parameters):
    assert told(study)["parameters"] == parameters
    count = LM(study.pretraining.model).num_parameters
    assert f"{count / 1000:.0f} thousand" == parameters


def test_the_papers_own_study_is_as_the_paper_says():
    rows = about(findings(paper())).rows
    differ = {what for what, ours, papers in rows if ours != papers}
    assert differ == {"training", "questions of fine-tuning"}
    assert "steps of 2,097,152" in told(paper())["training"]
    assert told(gpu())["training"] == "250 million tokens: 3,815 steps of 65,536"


def test_the_page_has_the_tokens_of_the_studys_own_training():
    assert told(quick())["training"] == "922 thousand tokens: 900 steps of 1,024"
    shorter = changed(quick(), run__steps=200)
    assert told(shorter)["training"] == "205 thousand tokens: 200 steps of 1,024"


@pytest.mark.parametrize(
    ("variant", "what", "value"),
    [
        ("theta-1k", "RoPE base, in tests", "1,000, 16,000"),
        ("half-rotary", "channels of a head that rotate", "8 of 16"),
        ("no-rotary", "channels of a head that rotate", "0 of 16"),
        ("windows", "window", "64 keys, but for one layer in 2"),
        ("smaller", "layers, heads, hidden size", "2, 3, 48"),
    ],
)
def test_the_page_tells_what_a_variant_is(variant, what, value):
    assert variant in VARIANTS["quick"]
    assert told(study_named(f"quick:{variant}"))[what] == value
    assert told(quick()).get(what) != value


def test_the_page_counts_the_runs_that_there_are():
    found = findings(small())
    for name, many in {"a": 4, "b": 5, "yarn": 1}.items():
        found.curves[name] = {Replica(seed): ([1, 2], [3.0, 2.0]) for seed in range(many)}
    rows = dict(row[:2] for row in about(found).rows)
    assert rows["runs"] == "(a) 4, (b) 5, (a) with yarn applied at test time 1"
    found.curves = {"a": found.curves["a"]}
    assert dict(row[:2] for row in about(found).rows)["runs"] == "4 of each configuration"


def test_the_rope_limit_is_told_where_positions_turn():
    assert findings().rope_limit == pytest.approx(256 * 16 ** (4 / 8))
    half = findings(changed(quick(), model__rotary_dim=8))
    assert half.rope_limit == pytest.approx(256 * 16 ** (2 / 4))
    assert findings(changed(quick(), model__rotary_dim=0)).rope_limit is None


def test_a_single_run_is_named_by_its_seed():
    found = findings()
    s = {"blocks.0.ssmax.s": [0.1, 0.2]}
    found.scales = {"b": {Replica(2): s, Replica(1): s}, "d": {Replica(3, "x"): s}}
    panels = study_figures(found)["_s"].panels
    assert {panel.tables[0].caption for panel in panels} == {
        "s of (b) SSMax, seed 1, start 0.219",
        "s of (d) SSMax + bias, seed 3, part x, start 0.219",
    }
