"""A claim is a test with numbers: seeds support it, contradict it, bound it or leave it open."""

import dataclasses

import numpy as np
import pytest

from ssmax.nn import SSMaxScale
from ssmax_lab.analysis.findings import Findings, Replica
from ssmax_lab.analysis.statistics import overall
from ssmax_lab.cli.study import table
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, Provenance, Sharpness
from ssmax_lab.report.figures import study_figures
from ssmax_lab.report.study_page import claims, study_page
from ssmax_lab.study.claims import MARGINS, judge
from ssmax_lab.study.presets import quick
from ssmax_lab.train.recipes import PRETRAINING, configured

HERE = Provenance(
    commit="test", config_hash="0", versions={}, device="cpu", seed=0, date="2026-11-15"
)
NAMES = ("a", "b", "c", "d", "e", "f", "temperature")
# As the paper has it, larger is better; the control is ours.
ORDER = {"b": 6, "c": 5, "d": 4, "f": 3, "e": 2, "temperature": 1, "a": 0}
# A study that fine-tunes; quick itself teaches retrieval in pretraining.
STUDY = dataclasses.replace(quick(), pretraining=PRETRAINING["quick"]())
LENGTH = STUDY.train_length
FIRST, SECOND = Replica(0), Replica(1)


def findings(*, better=ORDER, seeds=3, preset="small"):
    """Everything measured, better[name] telling how good a configuration is at length."""
    chance = np.random.default_rng(0)
    found = Findings(study=STUDY.to_dict())
    found.study |= {"preset": preset, "pretraining": STUDY.pretraining.to_dict()}
    trials = range(40)
    for seed in map(Replica, range(seeds)):
        noise = chance.normal(0, 0.01, 400)
        found.tables[seed] = (0.3 * np.log(np.arange(1, 65)) + 1 + noise[:64]).tolist()
        for name in NAMES:
            good = better[name]
            if name != "e":
                low = {"d": 4.0, "b": 4.1, "c": 4.1, "a": 4.3}.get(name, 4.2)
                losses = low + noise + chance.normal(0, 0.001, 400)
                found.curves.setdefault(name, {})[seed] = (list(range(1, 401)), losses.tolist())
            near, far = 3.0 + (name == "e"), 6 - 0.3 * good + chance.normal(0, 0.001)
            losses = PositionLoss(
                run=name, mean=[near] * LENGTH + [far] * 3 * LENGTH, count=12,
                edges=[0, 4 * LENGTH], binned=[[3.0]], provenance=HERE,
            )  # fmt: skip
            for home in (found.position_losses, found.same_theta_losses):
                home.setdefault(name, {})[seed] = losses
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


def page_of(found):
    return study_page(found, {}, {})


def verdicts(found):
    return {one.text: one.verdict for one in judge(found, HERE)}


def claimed(found):
    """The verdict of every claim."""
    return {claim["id"]: claim["verdict"] for claim in told_claims(found)}


def told_claims(found):
    found.comparisons = judge(found, HERE)
    return claims(found)


PRIMARY = {
    "C1": ["softmax's largest output falls between n = 2 and n = 65,536",
           "SSMax's (s = 0.43) stays above 0.8 for every n between"],
    "C2": ["log n fits the learned p_n better than n does"],
    "C3": ["the z_max that softmax needs grows with every tenfold n to 100,000",
           "the z_max that SSMax needs never exceeds 1 + 1/s"],
    "C4": ["in the last tenth of training (b)'s loss is below (a)'s"],
    "C5": ["from the training length T to 4T, at the unchanged RoPE base, (b) loses less than (a)",
           "from T to the RoPE limit, at the larger RoPE base, (b) loses less than (a)"],
    "C6": ["beyond the training length the needle retrieval accuracy of (b) is above that of (a)"],
    "C7": ["(b)'s top heads weigh the paper's needle more than (a)'s"],
    "C8": ["the top needle score of (b) is above that of (a)"],
}  # fmt: skip
UNCHANGED, LARGER = PRIMARY["C5"]


def test_what_looks_as_the_paper_says_supports_every_claim():
    found = findings()
    assert claimed(found) == dict.fromkeys(PRIMARY, "supported")
    primary = {}
    for one in found.comparisons:
        if one.verdict != "secondary":
            primary.setdefault(one.claim, []).append(one.text)
    assert primary == PRIMARY


def test_the_opposite_contradicts_but_not_what_is_mathematics_nor_the_training():
    upside_down = {name: 6 - good for name, good in ORDER.items()}
    told = claimed(findings(better=upside_down))
    open_ones = ("C1", "C2", "C3", "C4")
    assert told == {name: "supported" if name in open_ones else "contradicted" for name in PRIMARY}


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("better", [ORDER, {name: 6 - good for name, good in ORDER.items()}])
def test_fewer_than_three_seeds_give_an_effect_and_no_verdict(seeds, better):
    found = findings(seeds=seeds, better=better)
    told = claimed(found)
    assert told == {
        name: "supported" if name in ("C1", "C3") else "too few seeds" for name in PRIMARY
    }
    measured = [one for one in found.comparisons if one.basis != "computed exactly"]
    assert all(one.effect is not None and one.low is one.high is None for one in measured)
    assert {one.basis for one in measured} == {f"{seeds} seed{'s' * (seeds - 1)}"}


@pytest.mark.parametrize("preset", ["quick", "quick:windows"])
@pytest.mark.parametrize("better", [ORDER, {name: 6 - good for name, good in ORDER.items()}])
def test_the_smallest_model_gives_no_verdict_on_the_paper(preset, better):
    found = findings(preset=preset, better=better)
    told = claimed(found)
    assert told == {
        name: "supported" if name in ("C1", "C3") else "model too small" for name in PRIMARY
    }
    assert all(one.low is not None for one in found.comparisons)
    assert "contradicted" not in "".join(table(found.comparisons)).lower()
    assert (
        "contradicted"
        not in page_of(found)
        .partition("<main>")[2]
        .partition('<section id="provenance">')[0]
        .partition("<script")[0]
    )


def test_no_difference_is_one_that_is_smaller_than_what_the_claim_names():
    found = findings(better=dict.fromkeys(ORDER, 3))
    told = claimed(found)
    assert told["C5"] == f"no difference larger than {MARGINS['C5']:g}"
    assert told["C8"] == f"no difference larger than {MARGINS['C8']:g}"
    text = page_of(found)
    assert f"no difference larger than {MARGINS['C5']:g}" in text and "badge no-difference" in text


def test_a_wide_interval_around_zero_is_inconclusive():
    found = findings(better=dict.fromkeys(ORDER, 3))
    for seed, scores in found.scores["b"].items():
        found.scores["b"][seed] = [
            dataclasses.replace(one, number_scores=[[0.3 + 0.2 * (seed.seed - 1), 0.0]] * 2)
            for one in scores
        ]
    assert claimed(found)["C8"] == "inconclusive"


def test_a_claim_is_judged_with_the_others_by_holm():
    """What would do alone does not where six are read together."""
    found = findings(better=dict.fromkeys(ORDER, 3))
    for seed, scores in found.papers_needle["b"].items():
        shift = 0.45 + 0.04 * (seed.seed - 1)
        found.papers_needle["b"][seed] = [
            dataclasses.replace(one, number_scores=[[shift, 0.0]] * 2) for one in scores
        ]
    told = claimed(found)
    (one,) = [one for one in found.comparisons if one.text == PRIMARY["C7"][0]]
    assert one.low > 0 and one.p_holm > 0.05 and told["C7"] == "inconclusive"
    assert f"p = {one.p_holm:.2g}" in one.over


def test_secondary_comparisons_turn_no_claim():
    """(d) above all, the control and (c) to (f) however they fall: (b) against (a) decides."""
    better = {**ORDER, "d": 9, "temperature": 9, "c": 8, "f": 8, "e": 8}
    found = findings(better=better)
    assert claimed(found) == dict.fromkeys(PRIMARY, "supported")
    wrong = [one for one in found.comparisons if "(b) loses less than the control" in one.text]
    assert {one.verdict for one in wrong} == {"secondary"} and wrong[0].low > 0


def test_page_terminal_and_records_tell_the_same_verdict():
    found = findings(better={**ORDER, "b": 0, "a": 6})
    told = claimed(found)
    lines = table(found.comparisons)
    shown = {line.split()[0]: lines[place + 1].strip() for place, line in enumerate(lines)
             if line.split()[:1] and line.split()[0] in PRIMARY}  # fmt: skip
    assert shown == {name: verdict.upper() for name, verdict in told.items()}
    for name, verdict in told.items():
        assert overall([one.verdict for one in found.comparisons if one.claim == name]) == verdict


def test_the_loss_is_judged_at_both_bases_each_where_its_statistic_is():
    found = findings()
    limit = round(found.rope_limit)
    assert LENGTH < limit < 4 * LENGTH
    for home, start in ((found.same_theta_losses, 4 * LENGTH), (found.position_losses, limit)):
        for seed, record in home["b"].items():
            far = [*record.mean[:start], *[50.0] * (20 * LENGTH - start)]
            home["b"][seed] = dataclasses.replace(record, mean=far)
        for seed, record in home["a"].items():
            far = [*record.mean, *[1.0] * (16 * LENGTH)]
            home["a"][seed] = dataclasses.replace(record, mean=far)
    told = verdicts(found)
    assert told[UNCHANGED] == told[LARGER] == "supported"
    (mean,) = [one for one in judge(found, HERE)
               if one.text == "beyond the training length (b) loses less than (a)"]  # fmt: skip
    assert mean.effect > 0 and mean.verdict == "secondary"


def test_training_is_judged_by_its_last_tenth():
    found = findings()
    for seed, (steps, losses) in found.curves["b"].items():
        found.curves["b"][seed] = (steps, [loss + 1 for loss in losses[:360]] + losses[360:])
    assert claimed(found)["C4"] == "supported"


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
    assert [(one.basis, one.verdict) for one in found] == [("3 seeds", "secondary")] * 2


def test_rules_applied_at_test_time_are_compared_where_they_were_measured():
    found = findings()
    found.position_losses["clamp"] = found.position_losses["f"]
    after = [one for one in judge(found, HERE) if "applied at test time" in one.text]
    assert [(one.claim, one.is_ours, one.verdict) for one in after] == [
        ("C5", True, "secondary"), ("C5", True, "secondary"),
    ]  # fmt: skip
    # 0.3 nats a step: (f) is three from (a), and three from (b).
    assert [one.effect for one in after] == pytest.approx([-0.9, -0.9], abs=0.01)
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
    assert [(one.claim, one.is_ours, one.verdict) for one in held] == [("C5", True, "secondary")]
    assert held[0].text.startswith("beyond the training length (b) loses less than")
    assert held[0].effect == pytest.approx(-0.9, abs=0.01)


def test_figure_5_has_a_panel_for_each_base_that_was_measured():
    found = findings()
    found.same_theta_losses = {}
    assert len(study_figures(found)["5"].panels) == 1
    found.same_theta_losses = found.position_losses
    larger, unchanged = study_figures(found)["5"].panels
    assert larger.rows == unchanged.rows
    assert larger.chart.title == f"RoPE base x {STUDY.theta_factor:g} at test time"


def test_only_seeds_that_both_have_are_compared():
    found = findings()
    del found.position_losses["b"][SECOND]
    told = {one.text: one for one in judge(found, HERE)}
    assert (told[LARGER].basis, told[LARGER].verdict) == ("2 seeds", "too few seeds")
    assert (told[UNCHANGED].basis, told[UNCHANGED].verdict) == ("3 seeds", "supported")


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([], "not measured"),
        (["secondary", "secondary"], "not measured"),
        (["supported", "not measured"], "inconclusive"),
        (["supported", "secondary", "supported"], "supported"),
        (["supported", "no difference larger than 0.05"], "inconclusive"),
        (["too few seeds", "inconclusive"], "too few seeds"),
        (["supported", "contradicted", "inconclusive"], "contradicted"),
    ],
)
def test_a_claim_has_the_verdict_that_its_primary_comparisons_share(words, verdict):
    assert overall(words) == verdict


def test_everything_that_was_measured_has_a_figure():
    found = findings(seeds=2)
    found.scales = {"b": {FIRST: {"blocks.0.ssmax.s": [0.1, 0.2]}}}
    figures = study_figures(found)
    assert set(figures) == {*"12345678", "1_in_heads", "_retrieval", "_s"}
    (maps,) = [panel for panel in figures["6"].panels if panel.chart.title.startswith("(b)")]
    assert {row["trials"] for row in maps.rows} == {80}
    assert [row["text"] for row in figures["_s"].panels[0].rows] == ["0.10", "0.20"]
    assert set(study_figures(Findings(study=found.study))) == {"1", "3"}


@pytest.mark.parametrize("name", ["b", "d", "temperature", "sqrt_log"])
def test_the_learned_s_is_shown_against_where_it_began(name):
    found = findings()
    found.scales = {name: {FIRST: {"blocks.0.ssmax.s": [0.1, 0.2]}}}
    rule = configured(STUDY.pretraining, name).model.rule
    began = SSMaxScale(2, rule, train_length=LENGTH).s[0].item()
    panel = study_figures(found)["_s"].panels[0]
    assert panel.chart.title.endswith(f"start {began:.3g}")


def test_a_table_that_never_moved_is_shown_too():
    """No shape explains the variance of a constant: there is no R^2 to show."""
    found = findings()
    found.tables = {FIRST: [1.0] * 64}
    figure = study_figures(found)["2"]
    assert figure.title == "The learned p_n is the same for every n"
    assert "best power of n" in study_page(found, {"2": figure}, {})


def test_seeds_that_disagree_decide_nothing():
    found = findings()
    for score in found.scores["b"], found.scores["a"]:
        score[SECOND] = [
            dataclasses.replace(one, number_scores=[[1.0 - one.number_scores[0][0], 0.0]] * 2)
            for one in score[SECOND]
        ]
    assert claimed(found)["C8"] == "inconclusive"


def test_the_first_value_of_the_probe_has_no_part_in_its_shape():
    """n = 1 has no gradient: p_1 stays where it began, far off any curve."""
    found = findings()
    for learned in found.tables.values():
        learned[0] = 50.0
    assert verdicts(found)["log n fits the learned p_n better than n does"] == "supported"


def test_a_claim_is_not_supported_by_what_was_not_measured():
    found = findings()
    for name in NAMES[2:]:
        found.curves.pop(name, None)
        found.position_losses.pop(name)
    found.comparisons = judge(found, HERE)
    (missing,) = [one for one in found.comparisons if "(d)'s loss is below (a)'s" in one.text]
    assert (missing.effect, missing.low, missing.high) == (None, None, None)  # 0 was not measured
    assert (missing.basis, missing.verdict) == ("(d) was not measured", "secondary")
    assert any("(d) was not measured: secondary" in line for line in table(found.comparisons))
    told = {claim["id"]: claim for claim in claims(found)}
    assert told["C4"]["verdict"] == told["C5"]["verdict"] == "supported"
    assert told["C4"]["table"].rows[2][1:3] == ["-", "(d) was not measured"]
    found.same_theta_losses = {}
    assert verdicts(found)[UNCHANGED] == "not measured"
    assert claimed(found)["C5"] == "inconclusive"


@pytest.mark.parametrize("broken", ["nan", "seeds", "short"])
def test_one_pair_that_cannot_be_compared_leaves_the_others(broken):
    found = findings()
    record = found.position_losses["b"][FIRST]
    if broken == "seeds":
        found.position_losses["b"] = {Replica(7): record}
    else:
        mean = [float("nan")] * 4 * LENGTH if broken == "nan" else record.mean[:LENGTH]
        found.position_losses["b"][FIRST] = dataclasses.replace(record, mean=mean)
    told = {one.text: one for one in judge(found, HERE)}
    assert (told[LARGER].effect, told[LARGER].verdict) == (None, "not measured")
    assert told["beyond the training length (c) loses less than (a)"].effect < 0


def test_a_table_that_falls_or_is_a_power_is_no_logarithm():
    found = findings()
    n = np.arange(1, 65)
    chance = np.random.default_rng(0)
    for seed in found.tables:
        found.tables[seed] = (5 - np.log(n) + chance.normal(0, 0.01, 64)).tolist()
    told = {one.text: one for one in judge(found, HERE)}
    assert told["the learned p_n rises with log n"].high < 0
    for seed in found.tables:
        found.tables[seed] = (n**1.2 + chance.normal(0, 0.01, 64)).tolist()
    assert claimed(found)["C2"] == "contradicted"


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
    found = in_parts(findings(), lambda name: ["p", "q", "q"] if name != "b" else ["q", "p", "p"])
    told = {one.text: one for one in judge(found, HERE)}
    one = told[LARGER]
    assert (one.verdict, one.basis) == (
        "not measured", "no seed was measured of both, side by side"
    )  # fmt: skip
    assert told["beyond the training length (c) loses less than (a)"].effect < 0


def test_what_machines_differ_by_does_not_enter_a_comparison():
    """A machine that shifts both of a pair by 5 nats changes nothing."""
    plain, shifted = findings(seeds=3), findings(seeds=3)
    for name in ("a", "b"):
        for seed, (steps, losses) in shifted.curves[name].items():
            shifted.curves[name][seed] = (steps, [loss + 5.0 * seed.seed for loss in losses])
    shifted = in_parts(shifted, lambda name: ["p", "q", "r"])
    one, other = (
        next(one for one in judge(found, HERE) if one.text == PRIMARY["C4"][0])
        for found in (plain, shifted)
    )
    assert other.effect == pytest.approx(one.effect) and other.low == pytest.approx(one.low)
    assert other.basis == "3 seeds within 3 parts"


def test_a_seed_that_two_parts_have_counts_once():
    found = findings()
    for home in (found.curves, found.position_losses):
        for name, by_seed in home.items():
            home[name] = by_seed | {
                Replica(seed.seed, "again"): record for seed, record in by_seed.items()
            }
    one = next(one for one in judge(found, HERE) if one.text == LARGER)
    assert one.basis == "3 seeds within 2 parts"
