"""The page compares what may be compared, counts what it draws, and tells what the study was."""

import dataclasses

import numpy as np
import pytest

from ssmax_lab.analysis.findings import Findings, Replica
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, Provenance, Sharpness
from ssmax_lab.report.page import page
from ssmax_lab.report.payload import PAPERS_MODEL, PAPERS_TOKENS_A_STEP, payload
from ssmax_lab.study.presets import VARIANTS, Study, gpu, paper, quick, small, study_named
from ssmax_lab.train.config import TrainConfig

HERE = Provenance(
    commit="test", config_hash="0", versions={}, device="cpu", seed=0, date="2026-11-15"
)
STEPS = list(range(1, 101))
ZERO, ONE, TWO = Replica(0, "x"), Replica(1, "y"), Replica(2, "y")


def findings(study: Study | None = None, *commands: str) -> Findings:
    made = (study or quick()).to_dict()
    return Findings(study=made, commands=list(commands))


def loss(level: float) -> PositionLoss:
    mean = (level + np.linspace(5, 3, 400)).tolist()
    return PositionLoss(run="r", mean=mean, count=4, edges=[0], binned=[], provenance=HERE)


def learned(level: float) -> tuple[list[int], list[float]]:
    return STEPS, (level + np.geomspace(8, 3, 100)).tolist()


# Seeds differ by 1, configurations by a tenth of that at most: (b) is 0.1 above (a) of its own
# seed, and its mean over all of its seeds is 0.6 above that of all of (a)'s.
LEVELS = {
    "a": {ZERO: 0.0, ONE: 1.0},
    "b": {ZERO: 0.1, ONE: 1.1, TWO: 2.1},
    "c": {TWO: 2.0},
    # The seed alone is not enough: another part is another machine.
    "d": {Replica(0, "y"): 0.0},
}


def uneven() -> Findings:
    found = findings()
    for name, levels in LEVELS.items():
        found.curves[name] = {replica: learned(level) for replica, level in levels.items()}
        found.position_losses[name] = {one: loss(level) for one, level in levels.items()}
        found.same_theta_losses[name] = {one: loss(2 * level) for one, level in levels.items()}
    return found


def test_a_loss_less_softmaxs_is_over_the_replicas_that_both_have():
    figures = payload(uneven(), static={})["figures"]
    for figure, gap in (
        (figures["4"], 0.1),
        (figures["5"], 0.1),
        (figures["5"]["same_theta"], 0.2),
    ):
        less = figure["less"]
        assert list(less["curves"]) == ["a", "b"]
        assert set(less["curves"]["a"]["y"]) == {0.0}
        assert less["curves"]["b"]["y"] == pytest.approx([gap] * len(less["curves"]["b"]["y"]))
        assert less["curves"]["b"]["x"] == figure["curves"]["b"]["x"]
        assert less["note"] == (
            "means over the runs that share seed and part with a run of (a); "
            "left out, as none of theirs does: (c), (d)"
        )


def test_the_differences_are_in_the_tables_too():
    text = page(payload(uneven(), static={}))
    note = "less (a): means over the runs that share seed and part with a run of (a)"
    assert text.count(f"<caption>{note}") == 1
    assert text.count(f"rotary base 160,000, {note}") == 1
    assert text.count(f"rotary base 10,000, {note}") == 1


def test_what_is_softmax_until_late_is_no_different_until_then():
    """(f) is (a) until its switch, one run of several: it must not show how seeds differ."""
    found = uneven()
    steps, losses = found.curves["a"][ONE]
    found.curves["f"] = {ONE: (steps, losses[:88] + [value - 0.5 for value in losses[88:]])}
    less = payload(found, static={})["figures"]["4"]["less"]["curves"]["f"]
    assert set(less["y"][:86]) == {0.0}
    assert less["y"][-1] == pytest.approx(-0.5)


def test_runs_that_stopped_early_are_compared_as_far_as_both_are():
    found = uneven()
    steps, losses = found.curves["b"][ONE]
    found.curves["b"][ONE] = steps[:60], losses[:60]
    found.position_losses["b"] = {
        replica: dataclasses.replace(record, mean=record.mean[:200])
        for replica, record in found.position_losses["b"].items()
    }
    figures = payload(found, static={})["figures"]
    for key, last in (("4", 60), ("5", 199)):
        less = figures[key]["less"]["curves"]["b"]
        assert less["x"][-1] == last
        assert less["y"] == pytest.approx([0.1] * len(less["y"]))


@pytest.mark.parametrize("kept", ["bcd", "a", "acd"])
def test_where_nothing_is_shared_nothing_is_subtracted(kept):
    found = uneven()
    for kind in (found.curves, found.position_losses, found.same_theta_losses):
        for name in set(kind) - set(kept):
            del kind[name]
    figures = payload(found, static={})["figures"]
    assert not any("less" in one for one in (figures["4"], figures["5"]))


def trials(many: int) -> list[NeedleTrial]:
    return [
        NeedleTrial(
            run="r", length=length, depth=0.5, trial=trial, city="Oslo", number="1234",
            said="", is_whole=False, first_digit=False, digits_right=0, provenance=HERE,
        )
        for length in (32, 64)
        for trial in range(many)
    ]  # fmt: skip


def scores(many: int) -> list[NeedleScore]:
    return [
        NeedleScore(
            run="r", length=64, depth=0.5, trial=trial, number="1234", said="", is_whole=False,
            first_digit=False, number_scores=[[0.1, 0.2]],
            provenance=HERE,
        )
        for trial in range(many)
    ]  # fmt: skip


def test_every_label_counts_the_runs_that_are_drawn():
    """(a) has two runs and (b) three; needles were hidden for one less of (b), and none of (d)."""
    found = uneven()
    needles = {"a": (ZERO,), "b": (ZERO, ONE), "c": (TWO,)}
    for name, replicas in needles.items():
        found.trials[name] = {replica: trials(20) for replica in replicas}
        found.scores[name] = {replica: scores(5) for replica in replicas}
        found.papers_needle[name] = {replica: scores(5) for replica in replicas}
    values = payload(found, static={})
    figures = values["figures"]
    assert figures["4"]["curves"]["b"]["label"] == "(b) SSMax, 3 runs"
    assert figures["4"]["less"]["curves"]["b"]["label"] == "(b) SSMax"  # two, as of (a)
    for key, kind in (("6", "maps"), ("7", "heads"), ("8", "trials")):
        called = {name: one["label"] for name, one in figures[key][kind].items()}
        assert called == {
            "a": "(a) softmax, 1 run",
            "b": "(b) SSMax, 2 runs",
            "c": "(c) SSMax, no s, 1 run",
        }
    assert [one["trials"] for one in figures["6"]["maps"].values()] == [20, 40, 20]
    assert values["looks"]["b"]["label"] == "(b) SSMax"


def test_a_single_run_is_named_by_its_seed():
    found = uneven()
    sharpness = Sharpness(
        run="r", num_keys=[1, 256, 512], entropy=[[[0.0] * 3]], largest=[[[1.0, 0.5, 0.2]]],
        count=1, provenance=HERE,
    )  # fmt: skip
    scale = {"blocks.0.ssmax.s": [0.1, 0.2]}
    found.sharpness = {"a": {ONE: sharpness}, "b": {ONE: sharpness, TWO: sharpness}}
    found.scales = {"b": {TWO: scale, ONE: scale}, "d": {Replica(3, "x"): scale}}
    found.scales["temperature"] = {Replica(0, "y"): scale, ZERO: scale}
    values = payload(found, static={})
    assert {name: one["label"] for name, one in values["scales"].items()} == {
        "b": "(b) SSMax, seed 1",
        "d": "(d) SSMax + bias, seed 3",
        # Two parts have this seed.
        "temperature": "control: learned temperature, seed 0, part x",
    }
    assert values["sharpness"]["b"]["label"] == "(b) SSMax, 2 runs"
    assert values["sharpness"]["b"]["heads"]["label"] == "(b) SSMax, seed 1"
    text = page(values)
    assert "(b) SSMax, seed 1: s, start" in text
    assert "(b) SSMax, seed 1: largest weight, n = 512" in text


def note(study: Study, *commands: str) -> str:
    return payload(findings(study, *commands), static={})["note"]


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
        found.curves[name] = {Replica(seed): learned(0.0) for seed in range(many)}
    told = payload(found, static={})["note"]
    assert words in told
    assert "three seeds" not in told


def test_the_note_tells_what_was_added_to_the_recipe():
    assert "every digit is a token, and fine-tuning asks for numbers hidden" in note(gpu())
    only = note(dataclasses.replace(gpu(), questions="squad.json.xz"))
    assert "every digit is a token." in only and "numbers hidden" not in only
    assert "Added" not in note(paper())


def test_a_study_that_tells_little_of_itself_has_a_page_all_the_same():
    found = findings()
    found.study["pretraining"] = {"model": {"train_length": 64, "theta": 10_000.0}}
    assert "parameters" not in payload(found, static={})["note"]
    assert found.rope_limit is None


def test_the_rope_limit_is_told_where_positions_turn():
    assert findings().rope_limit == pytest.approx(256 * 16 ** (4 / 8))
    half = findings(changed(quick(), model__rotary_dim=8))
    assert half.rope_limit == pytest.approx(256 * 16 ** (2 / 4))
    assert findings(changed(quick(), model__rotary_dim=0)).rope_limit is None
    figure = payload(uneven(), static={})["figures"]["5"]
    assert figure["rope_limit"] == 1024 and "rope_limit" not in figure["same_theta"]
