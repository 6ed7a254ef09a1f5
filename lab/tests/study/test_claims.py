"""A claim is a test with numbers: measurements support it, contradict it or leave it open."""

import dataclasses

import numpy as np
import pytest

from ssmax.nn import SSMaxScale
from ssmax_lab.analysis.findings import Findings, Replica
from ssmax_lab.analysis.statistics import overall
from ssmax_lab.cli.study import table
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, Provenance, Sharpness
from ssmax_lab.report.page import page
from ssmax_lab.report.payload import payload
from ssmax_lab.study.claims import judge
from ssmax_lab.study.presets import quick
from ssmax_lab.train import configured

HERE = Provenance(
    commit="test", config_hash="0", versions={}, device="cpu", seed=0, date="2026-11-15"
)
NAMES = ("a", "b", "c", "d", "e", "f", "temperature")
# As the paper has it, larger is better; the control is ours.
ORDER = {"b": 6, "c": 5, "d": 4, "f": 3, "e": 2, "temperature": 1, "a": 0}
LENGTH = quick().train_length
FIRST, SECOND = Replica(0), Replica(1)


def findings(*, better=ORDER, seeds=1):
    """Everything measured, better[name] telling how good a configuration is at length."""
    chance = np.random.default_rng(0)
    found = Findings(study=quick().to_dict())
    found.study["pretraining"] = quick().pretraining.to_dict()
    documents, trials = chance.normal(0, 0.3, 12), range(40)
    for seed in map(Replica, range(seeds)):
        noise = chance.normal(0, 0.01, 400)
        found.tables[seed] = (0.3 * np.log(np.arange(1, 65)) + 1 + noise[:64]).tolist()
        for name in NAMES:
            good = better[name]
            if name != "e":
                low = {"d": 4.0, "b": 4.1, "c": 4.1, "a": 4.3}.get(name, 4.2)
                losses = low + noise + chance.normal(0, 0.001, 400)
                found.curves.setdefault(name, {})[seed] = (list(range(1, 401)), losses.tolist())
            near = [3 + (name == "e") + document for document in documents]
            far = [6 - 0.3 * good + document for document in documents]
            binned = [list(row) for row in zip(near, far, strict=True)]
            found.position_losses.setdefault(name, {})[seed] = PositionLoss(
                run=name, mean=[3.0] * 4 * LENGTH, count=12,
                edges=[0, LENGTH, 4 * LENGTH], binned=binned, provenance=HERE,
            )  # fmt: skip
            far_weight = (0.1 + 0.05 * good + chance.normal(0, 0.01, (2, 4))).tolist()
            found.sharpness.setdefault(name, {})[seed] = Sharpness(
                run=name, num_keys=[1, LENGTH, 2 * LENGTH], entropy=[[[0.0] * 3] * 4] * 2,
                largest=[[[1.0, 0.5, weight] for weight in row] for row in far_weight],
                count=8, provenance=HERE,
            )  # fmt: skip
            found.trials.setdefault(name, {})[seed] = [
                NeedleTrial(
                    run=name, length=size, depth=depth, trial=trial, city="Oslo", number="1234",
                    said="", is_whole=trial < 6 * good, first_digit=trial < 8 * good,
                    digits_right=0, provenance=HERE,
                )
                for size in (LENGTH, 2 * LENGTH, 8 * LENGTH)
                for depth in (0.0, 1.0)
                for trial in trials
            ]  # fmt: skip
            for home in (found.scores, found.papers_needle):
                home.setdefault(name, {})[seed] = [
                    NeedleScore(
                        run=name, length=2 * LENGTH, depth=0.5, trial=trial, number="1234",
                        said="", is_whole=False, first_digit=False, provenance=HERE,
                        number_scores=[[0.1 * good + 0.001 * trial, 0.0]] * 2,
                    )
                    for trial in trials
                ]  # fmt: skip
    return found


def verdicts(found):
    return {one.text: one.verdict for one in judge(found, HERE)}


def test_what_looks_as_the_paper_says_supports_every_claim():
    found = judge(findings(), HERE)
    by_claim = {}
    for one in found:
        by_claim.setdefault(one.claim, []).append(one.verdict)
    assert set(by_claim) == {f"C{number}" for number in range(1, 9)}
    wrong = [one.text for one in found if one.verdict != "supported"]
    assert not wrong


def test_the_opposite_contradicts_and_is_shown_as_such():
    upside_down = {name: 6 - good for name, good in ORDER.items()}
    found = verdicts(findings(better=upside_down))
    for text in (
        "beyond the training length the largest weight of (b)'s heads falls less than (a)'s",
        "beyond the training length (b) loses less than (a)",
        "beyond the training length the needle retrieval accuracy of (b) is above that of (a)",
        "(b)'s top heads weigh the paper's needle more than (a)'s",
        "the top needle score of (b) is above that of (a)",
    ):
        assert found[text] == "contradicted", text


def test_no_difference_is_not_resolved():
    found = verdicts(findings(better=dict.fromkeys(ORDER, 3)))
    assert found["beyond the training length (b) loses less than (a)"] == "not resolved"
    assert found["the top needle score of (b) is above that of (c)"] == "not resolved"


def test_the_mathematics_holds_without_any_measurement():
    empty = Findings(study=findings().study)
    found = judge(empty, HERE)
    assert {one.claim for one in found} == {"C1", "C3"}
    assert {one.verdict for one in found} == {"supported"}
    assert {one.basis for one in found} == {"computed exactly"}


def test_sharpness_in_the_heads_is_ours_and_from_the_training_length_on():
    found = [one for one in judge(findings(), HERE) if "heads falls" in one.text]
    assert [one.is_ours for one in found] == [True, True]
    # 0.05 for every step of "better", whatever happens before the training length.
    assert found[0].effect == pytest.approx(0.3, abs=0.02)
    assert found[0].basis == "8 heads, one seed"


def test_rules_applied_at_test_time_are_compared_where_they_were_measured():
    found = findings()
    found.position_losses["clamp"] = found.position_losses["f"]
    after = [one for one in judge(found, HERE) if "applied at test time" in one.text]
    assert [(one.claim, one.is_ours, one.verdict) for one in after] == [
        ("C5", True, "supported"), ("C5", True, "supported"),
    ]  # fmt: skip
    # 0.3 nats a step: (f) is three from (a), and three from (b).
    assert [one.effect for one in after] == pytest.approx([-0.9, -0.9])
    assert "(a) with clamp applied at test time loses less than (a)" in after[0].text


def test_what_else_was_trained_is_compared_where_it_was_measured():
    found = findings()
    found.position_losses |= dict.fromkeys(("mean_log", "sqrt_log"), found.position_losses["f"])
    texts = {one.text: one for one in judge(found, HERE) if "model trained with" in one.text}
    far, constant = "beyond the training length", "a model trained with (c)'s mean factor"
    assert {text: round(one.effect, 1) for text, one in texts.items()} == {
        f"{far} (b) loses less than a model trained with sqrt_log": -0.9,
        f"{far} (c) loses less than {constant}": -0.6,
        f"{far} {constant} loses less than (a)": -0.9,
    }
    assert all(one.is_ours and one.claim == "C5" for one in texts.values())


def test_n_held_is_compared_with_what_it_was_held_in():
    found = findings()
    found.position_losses["b_held"] = found.position_losses["f"]
    held = [one for one in judge(found, HERE) if "with n held" in one.text]
    assert [(one.claim, one.is_ours, one.verdict) for one in held] == [("C5", True, "supported")]
    assert held[0].text.startswith("beyond the training length (b) loses less than")
    assert held[0].effect == pytest.approx(-0.9)


@pytest.mark.parametrize(
    ("seeds", "basis"),
    [(1, "12 documents, one seed"), (2, "the hull of 2 seeds"), (3, "3 seeds")],
)
def test_the_interval_says_what_it_is_over(seeds, basis):
    found = judge(findings(seeds=seeds), HERE)
    assert basis in next(one.basis for one in found if one.claim == "C5")


def test_the_page_gets_the_losses_of_both_thetas():
    found = findings()
    assert "same_theta" not in payload(found, static={})["figures"]["5"]
    found.same_theta_losses = found.position_losses
    figure = payload(found, static={})["figures"]["5"]
    assert figure["same_theta"]["curves"] == figure["curves"]
    assert figure["theta"] == quick().theta_factor * figure["same_theta"]["theta"]


def test_only_seeds_that_both_have_are_compared():
    found = findings(seeds=2)
    del found.position_losses["c"][SECOND]
    one = next(one for one in judge(found, HERE) if "(c) loses less than (a)" in one.text)
    assert one.basis.endswith("one seed")


def test_the_control_has_no_part_in_a_claims_verdict():
    better = {**ORDER, "temperature": 9}
    found = [one for one in judge(findings(better=better), HERE) if one.claim == "C5"]
    assert [one.verdict for one in found if one.is_ours] == ["contradicted"]
    assert overall([one.verdict for one in found if not one.is_ours]) == "supported"


def test_about_equal_is_a_margin():
    found = findings()
    steps, losses = found.curves["c"][FIRST]
    found.curves["c"][FIRST] = (steps, [loss + 0.1 for loss in losses])
    assert verdicts(found)["(c) is equal to (b) within 0.02 nats"] == "contradicted"


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([], "not measured"),
        (["supported", "not measured"], "not resolved"),
        (["supported", "supported"], "supported"),
        (["supported", "not resolved"], "not resolved"),
        (["supported", "contradicted", "not resolved"], "contradicted"),
    ],
)
def test_a_claim_is_as_strong_as_its_weakest_comparison(words, verdict):
    assert overall(words) == verdict


def test_the_page_is_told_everything_that_was_measured():
    found = findings(seeds=2)
    found.comparisons = judge(found, HERE)
    found.scales = {"b": {FIRST: {"blocks.0.ssmax.s": [0.1, 0.2]}}}
    values = payload(found, static={})
    assert set(values["figures"]) == {"2", "4", "5", "6", "7", "8"}
    assert values["figures"]["6"]["maps"]["b"]["trials"] == 80
    assert values["scales"]["b"]["s"] == [[0.1, 0.2]]
    assert [claim["id"] for claim in values["claims"]] == [f"C{n}" for n in range(1, 9)]
    nothing = payload(dataclasses.replace(Findings(study=found.study)), static={})
    assert nothing["figures"] == {} and nothing["claims"][4]["verdict"] == "not measured"


@pytest.mark.parametrize("name", ["b", "d", "temperature", "sqrt_log"])
def test_the_learned_s_is_shown_against_where_it_began(name):
    found = findings()
    found.scales = {name: {FIRST: {"blocks.0.ssmax.s": [0.1, 0.2]}}}
    rule = configured(quick().pretraining, name).model.rule
    began = SSMaxScale(2, rule, train_length=LENGTH).s[0].item()
    assert payload(found, static={})["scales"][name]["start"] == pytest.approx(began, rel=1e-6)


def test_a_table_that_never_moved_is_shown_too():
    """No shape explains the variance of a constant: there is no R^2 to show."""
    found = findings()
    found.tables[FIRST] = [1.0] * 64
    values = payload(found, static={})
    assert [fit["r2"] for fit in values["figures"]["2"]["fits"]["seed 0"]] == [None] * 4
    assert "R<sup>2</sup>" in page(values)


def test_two_seeds_that_disagree_decide_nothing():
    found = findings(seeds=2)
    for score in found.scores["b"], found.scores["a"]:
        score[SECOND] = [
            dataclasses.replace(one, number_scores=[[1.0 - one.number_scores[0][0], 0.0]] * 2)
            for one in score[SECOND]
        ]
    text = "the top needle score of (b) is above that of (a)"
    assert verdicts(findings(seeds=2))[text] == "supported"
    assert verdicts(found)[text] == "not resolved"


def test_the_first_value_of_the_probe_has_no_part_in_its_shape():
    """n = 1 has no gradient: p_1 stays where it began, far off any curve."""
    found = findings()
    found.tables[FIRST][0] = 50.0
    assert verdicts(found)["log n fits the learned p_n better than n does"] == "supported"


def test_a_claim_is_not_supported_by_what_was_not_measured():
    found = findings()
    for name in NAMES[2:]:
        found.curves.pop(name, None)
        found.position_losses.pop(name)
    found.comparisons = judge(found, HERE)
    c4 = [one for one in found.comparisons if one.claim == "C4"]
    assert [one.verdict for one in c4 if "(b) learns below (a)" in one.text] == ["supported"]
    (missing,) = [one for one in c4 if one.text == "(d) learns below (a)"]
    assert (missing.effect, missing.low, missing.high) == (None, None, None)  # 0 was not measured
    assert missing.basis == "(d) was not measured"
    assert any("(d) was not measured: not measured" in line for line in table(found.comparisons))
    told = {claim["id"]: claim for claim in payload(found, static={})["claims"]}
    assert told["C4"]["verdict"] == told["C5"]["verdict"] == "not resolved"
    assert told["C4"]["comparisons"][2]["effect"] is None


@pytest.mark.parametrize("broken", ["nan", "seeds", "short"])
def test_one_pair_that_cannot_be_compared_leaves_the_others(broken):
    found = findings()
    if broken == "nan":
        found.position_losses["b"][FIRST].binned[0][1] = float("nan")
    elif broken == "seeds":
        found.position_losses["b"] = {SECOND: found.position_losses["b"][FIRST]}
    else:
        record = found.position_losses["b"][FIRST]
        found.position_losses["b"][FIRST] = dataclasses.replace(
            record, edges=record.edges[:2], binned=[row[:1] for row in record.binned]
        )
    told = verdicts(found)
    assert told["beyond the training length (b) loses less than (a)"] == "not measured"
    assert told["beyond the training length (c) loses less than (a)"] == "supported"


def test_a_table_that_falls_or_is_a_power_is_no_logarithm():
    found = findings()
    n = np.arange(1, 65)
    found.tables[FIRST] = (5 - np.log(n)).tolist()
    assert verdicts(found)["the learned p_n rises with log n"] == "contradicted"
    found.tables[FIRST] = (n**0.6).tolist()
    told = verdicts(found)
    text = next(text for text in told if "best power" in text)
    assert told[text] == "contradicted"


def in_parts(found, parts):
    """The same measurements, as if run `number` of each configuration came from parts[number]."""
    for home in (found.curves, found.position_losses, found.trials, found.scores):
        for name, by_seed in home.items():
            home[name] = {
                Replica(seed.seed, parts(name)[seed.seed]): record
                for seed, record in by_seed.items()
            }
    return found


def test_what_was_not_made_side_by_side_is_not_compared():
    found = in_parts(findings(seeds=2), lambda name: ["p", "q"] if name != "b" else ["q", "p"])
    one = next(one for one in judge(found, HERE) if "(b) loses less than (a)" in one.text)
    assert (one.verdict, one.basis) == (
        "not measured", "no seed was measured of both, side by side"
    )  # fmt: skip
    assert verdicts(found)["beyond the training length (c) loses less than (a)"] == "supported"


def test_what_machines_differ_by_does_not_enter_a_comparison():
    """A machine that shifts both of a pair by 5 nats changes nothing."""
    plain, shifted = findings(seeds=3), findings(seeds=3)
    for name in ("a", "b"):
        for seed, (steps, losses) in shifted.curves[name].items():
            shifted.curves[name][seed] = (steps, [loss + 5.0 * seed.seed for loss in losses])
    shifted = in_parts(shifted, lambda name: ["p", "q", "r"])
    one, other = (
        next(one for one in judge(found, HERE) if one.text == "(b) learns below (a)")
        for found in (plain, shifted)
    )
    assert other.effect == pytest.approx(one.effect) and other.low == pytest.approx(one.low)
    assert other.basis == "3 seeds within 3 parts"


def test_a_seed_that_two_parts_have_counts_once():
    found = findings(seeds=2)
    for home in (found.curves, found.position_losses):
        for name, by_seed in home.items():
            home[name] = by_seed | {
                Replica(seed.seed, "again"): record for seed, record in by_seed.items()
            }
    one = next(one for one in judge(found, HERE) if "(b) loses less than (a)" in one.text)
    assert "the hull of 4 runs side by side" in one.basis
