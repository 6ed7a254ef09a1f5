"""The page tells what a study was, and puts its values beside the paper's."""

import dataclasses

import pytest

from ssmax_lab.analysis.findings import Findings, Replica
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.report.figures import study_figures
from ssmax_lab.report.study_page import PAPERS_MODEL, PAPERS_TOKENS_A_STEP
from ssmax_lab.report.study_page import note as told_of
from ssmax_lab.study.presets import VARIANTS, Study, gpu, paper, quick, small, study_named
from ssmax_lab.train.config import TrainConfig


def findings(study: Study | None = None, *commands: str) -> Findings:
    made = (study or quick()).to_dict()
    return Findings(study=made, commands=list(commands))


def note(study: Study, *commands: str) -> str:
    return told_of(findings(study, *commands))


def changed(study: Study, **changes: object) -> Study:
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return dataclasses.replace(study, pretraining=study.pretraining.with_overrides(values))


@pytest.mark.parametrize(
    ("study", "parameters"),
    [
        (quick(), "A model of 249 thousand parameters"),
        (study_named("quick:larger"), "A model of 591 thousand parameters"),
        (study_named("quick:smaller"), "A model of 129 thousand parameters"),
        (changed(quick(), model__num_kv_heads=2), "A model of 237 thousand parameters"),
        (changed(quick(), model__head_dim=32), "A model of 298 thousand parameters"),
    ],
)
def test_the_note_has_the_parameters_of_the_studys_own_model(study, parameters):
    assert parameters in note(study)
    count = LM(study.pretraining.model).num_parameters
    assert f"{count / 1000:.0f} thousand" in parameters


def test_the_papers_model_is_called_so_where_it_is():
    assert PAPERS_MODEL.items() <= LMConfig().to_dict().items()
    assert TrainConfig().run.batch_size * LMConfig().train_length == PAPERS_TOKENS_A_STEP
    told = note(gpu())
    assert told.startswith("The paper's model of 162 million parameters")
    assert "250 million tokens, 3,815 steps of 65,536, where the paper's have 2,097,152" in told
    assert "where the paper's have" not in note(paper())
    assert note(changed(gpu(), model__hidden_size=384)).startswith("A model of")
    assert note(changed(gpu(), model__window=128)).startswith("A model of")


def test_the_note_has_the_tokens_of_the_studys_own_training():
    assert "922 thousand tokens, 900 steps of 1,024." in note(quick())
    told = note(changed(quick(), run__steps=200), "ssmax-lab reproduce --set run.steps=200")
    assert "205 thousand tokens, 200 steps of 1,024." in told
    assert told.startswith("Changed with --set: run.steps=200. ")
    assert "million" not in told


def test_the_note_names_what_was_set_once():
    told = note(
        quick(),
        "ssmax-lab reproduce --set run.steps=9 --set=optim.lr=3e-4 --out there",
        "ssmax-lab reproduce --set run.steps=9 --set 'data.folder=my texts'",
    )
    assert "Changed with --set: run.steps=9, optim.lr=3e-4, data.folder=my texts." in told
    assert "--set" not in note(quick(), "ssmax-lab reproduce --preset quick")


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("theta-1k", "rotary base 1,000 (16,000 in tests)."),
        ("half-rotary", "rotary base 10,000 (160,000 in tests) on 8 of a head's 16 channels."),
        ("no-rotary", "no rotary positions."),
        ("windows", "windows of 64 keys but for one layer in 2."),
        ("smaller", "2 layers of 3 heads, hidden size 48"),
    ],
)
def test_the_note_tells_what_a_variant_is(variant, words):
    assert variant in VARIANTS["quick"]
    told = note(study_named(f"quick:{variant}"))
    assert told.startswith(f"The variant {variant} of the quick preset. ")
    assert words in told
    assert words not in note(quick())


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"a": 3, "b": 3}, "3 runs of each configuration."),
        ({"a": 1}, "1 run of each configuration."),
        ({"a": 2, "b": 2, "c": 1, "d": 1}, "Runs: 2 of (a), (b); 1 of each other configuration."),
        (
            {"a": 4, "b": 5, "yarn": 1},
            "4 of (a); 1 of (a) with yarn applied at test time.",
        ),
    ],
)
def test_the_note_counts_the_runs_that_there_are(runs, words):
    found = findings(small())
    for name, many in runs.items():
        found.curves[name] = {Replica(seed): ([1, 2], [3.0, 2.0]) for seed in range(many)}
    told = told_of(found)
    assert words in told
    assert "three seeds" not in told


def test_the_note_tells_what_was_added_to_the_recipe():
    assert "every digit is a token, and fine-tuning asks for numbers hidden" in note(gpu())
    only = note(dataclasses.replace(gpu(), questions="squad.json.xz"))
    assert "every digit is a token." in only and "numbers hidden" not in only
    assert "Added" not in note(paper())


def test_the_rope_limit_is_told_where_positions_turn():
    assert findings().rope_limit == pytest.approx(256 * 16 ** (4 / 8))
    half = findings(changed(quick(), model__rotary_dim=8))
    assert half.rope_limit == pytest.approx(256 * 16 ** (2 / 4))
    assert findings(changed(quick(), model__rotary_dim=0)).rope_limit is None


def test_a_single_run_is_named_by_its_seed():
    found = findings()
    s = {"blocks.0.ssmax.s": [0.1, 0.2]}
    found.scales = {"b": {Replica(2): s, Replica(1): s}, "d": {Replica(3, "x"): s}}
    titles = {row["parameter"] for row in study_figures(found)["_s"].panels[0].rows}
    assert titles == {
        "s of (b) SSMax, seed 1, start 0.219",
        "s of (d) SSMax + bias, seed 3, part x, start 0.219",
    }
