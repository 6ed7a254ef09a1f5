"""What the README and the docs say was measured is what the records in lab/results say."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from ssmax_lab.analysis.findings import read_findings
from ssmax_lab.analysis.formulas import breaks_at
from ssmax_lab.analysis.statistics import EXACT, SECONDARY
from ssmax_lab.cli.study import table
from ssmax_lab.configurations import look
from ssmax_lab.report.results_figures import GROUPS, MORE_THAN_SOFTMAX, every
from ssmax_lab.report.results_tables import (
    HEADLINES,
    LARGEST_FIRST,
    SHORT,
    base_scaling,
    claims,
    headlines,
    read_results,
    recorded,
    retrieval,
    tables,
    written,
)
from ssmax_lab.report.study_page import claims as page_claims
from ssmax_lab.report.study_tables import heads, numbers, probe, stretches
from ssmax_lab.report.style import as_svg
from ssmax_lab.report.tables import said
from ssmax_lab.study.claims import judge
from ssmax_lab.study.partial import merge
from ssmax_lab.study.presets import PRESETS

ROOT = Path(__file__).parents[2]
RECORDS, PICTURES = ROOT / "lab/results", ROOT / "docs/pictures"
PAGES = sorted((ROOT / "docs").glob("results*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES]
QUICK = "2026-11-15_quick"
"""The study that `make test` reads; `make test-all` reads all of them."""


@pytest.fixture(scope="module")
def quick():
    return read_findings(RECORDS / QUICK)


@pytest.fixture(scope="module")
def results():
    return read_results(RECORDS)


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_table_of_results_is_made_of_the_records(results, document):
    text = document.read_text()
    assert "<!-- results: " in text
    assert written(text, tables(results)) == text


@pytest.mark.slow
def test_the_figures_of_the_results_page_are_those_of_the_records(results, is_same_drawing):
    for name, figure in every(results).items():
        kept = (PICTURES / f"{name}.svg").read_text()
        assert is_same_drawing(kept, as_svg(figure)), f"{name}: draw it anew: make results"


@pytest.mark.slow
def test_the_forest_has_twelve_interventions_and_its_title_holds(results):
    unchanged, larger = every(results)["results-forest"].panels
    assert sum(map(len, GROUPS.values())) == len(unchanged.rows) == len(larger.rows) == 12
    lower = {row["configuration"] for row in unchanged.rows if row["high"] < 0}
    growing = {look(name).label for name in ("b", "d", "sqrt_log")}
    assert lower == growing
    assert sum(row["high"] < 0 for row in larger.rows) >= 9


@pytest.mark.slow
def test_pages_of_smaller_studies_show_the_recorded_ones(results):
    kept = (ROOT / "lab/src/ssmax_lab/report/recorded.json").read_text()
    assert kept == recorded(results), "write it anew: make results"
    assert [study["what"].split(":")[0] for study in json.loads(kept)] == ["gpu", "small"]


@pytest.mark.slow
def test_headlines_begin_with_the_largest_model(results):
    header = headlines(results).splitlines()[0]
    assert header == "| claim | primary comparison, (b) SSMax less (a) softmax | gpu | small |"
    assert set(LARGEST_FIRST) == set(PRESETS)


@pytest.mark.slow
def test_the_newest_study_of_a_preset_speaks_for_it(results):
    old, new = results["2026-11-16_small-theta16"], results["2026-11-17_small"]
    assert old.study["preset"] == new.study["preset"]
    assert claims({"2026-11-16_x": old, "2026-11-17_y": new}) == claims({"2026-11-17_y": new})


@pytest.mark.slow
def test_everything_the_paper_says_is_told_once_by_claim(results):
    _, _, *rows = (row.strip("| ").split(" | ") for row in claims(results).splitlines())
    found = results["2026-11-17_small"].comparisons
    shown = [one for one in found if one.verdict != SECONDARY or not one.is_ours]
    assert {row[1] for row in rows} >= {said(one) for one in shown if one.basis != EXACT}
    assert len({row[1] for row in rows}) == len(rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    (gpu,) = (row[3] for row in rows if "(c)'s loss is about equal to (b)'s" in row[1])
    assert gpu.endswith(", 1 seed")


STUDIES = [
    pytest.param(path.parent.name, marks=() if path.parent.name == QUICK else pytest.mark.slow)
    for path in sorted(RECORDS.glob("*/study.json"))
]


@pytest.mark.parametrize("name", STUDIES)
def test_the_verdicts_are_those_of_the_claims_on_the_records(name):
    findings = read_findings(RECORDS / name)
    stored = findings.comparisons
    judged = judge(findings, stored[0].provenance)
    assert [words(one) for one in judged] == [words(one) for one in stored]
    for one, other in zip(judged, stored, strict=True):
        assert measured(one) == pytest.approx(measured(other), rel=1e-9, abs=1e-12), one.text
    # A variant, or a study of which parts are still to come, need not have all that the
    # headlines are of; one whose time ended before its needles has no retrieval accuracy.
    primary = [one for one in stored if one.verdict != SECONDARY and one.basis != EXACT]
    assert {one.text for one in primary} <= {*HEADLINES, MORE_THAN_SOFTMAX["b"]}
    assert ("C6" if findings.grids else "C5") in {one.claim for one in primary}
    if findings.tables:
        assert {one.text for one in stored} >= set(HEADLINES)
    if name.partition("_")[2].startswith("quick"):
        assert {one.verdict for one in primary} <= {"model too small", "not measured"}


@pytest.mark.parametrize("name", ["2026-11-19_million", "2026-11-19_small-needles"])
def test_retrieval_where_it_can_fail_is_what_its_raw_records_say(name):
    """Computed anew with numpy and scipy alone."""
    findings = read_findings(RECORDS / name)
    found = {
        (rule, run.seed): np.array(grid.accuracy)
        for rule, grids in findings.grids.items()
        for run, grid in grids.items()
    }
    pilot = found.pop(("a", 0))
    assert pilot[0, 0] >= 0.95
    cells = (pilot >= 0.1) & (pilot <= 0.9)
    cells[:, 0] = False
    seeds = sorted(seed for rule, seed in found if rule == "b")
    assert all(found[rule, seed][0, 0] >= 0.95 for rule in "ab" for seed in seeds)
    told = {one.text: one for one in findings.comparisons}
    for rule, text in MORE_THAN_SOFTMAX.items():
        less = [found[rule, seed][cells].mean() - found["a", seed][cells].mean() for seed in seeds]
        expected = scipy.stats.ttest_1samp(less, 0.0)
        interval = expected.confidence_interval(0.95)
        one = told[text]
        assert (one.effect, one.low, one.high) == pytest.approx((np.mean(less), *interval))
    primary = told[MORE_THAN_SOFTMAX["b"]]
    assert primary.low < 0 < primary.high and primary.verdict == "inconclusive"
    row = next(line for line in retrieval({name: findings}).splitlines() if "seeds" in line)
    assert f"{primary.interval(3)} inconclusive" in row


def test_a_larger_initial_logit_scale_does_what_the_page_says():
    """Computed anew with numpy and scipy alone."""
    one = read_findings(RECORDS / "2026-11-20_small-scales")

    def less_softmax(home, value):
        values = [value(home["gain_5"][run]) - value(home["a"][run]) for run in home["a"]]
        assert len(values) == 3
        found = scipy.stats.ttest_1samp(values, 0.0)
        return np.mean(values), *found.confidence_interval(0.95)

    page = " ".join((ROOT / "docs/results.md").read_text().split())
    more, low, high = less_softmax(one.curves, lambda curve: np.mean(curve[1][-130:]))
    assert f"W_q x 5.25 adds {more:.3f} [{low:.3f}, {high:.3f}]" in page
    less, low, high = less_softmax(one.same_theta_losses, lambda x: np.mean(x.mean[512:2048]))
    assert f"with W_q x 5.25 gives {-less:.3f} [{-high:.3f}, {-low:.3f}]" in page


def test_a_claim_has_one_verdict_in_readme_docs_page_and_terminal(quick):
    """What the README's table says of a study is what its page and the terminal say."""
    rows = [row.strip("| ").split(" | ") for row in headlines({QUICK: quick}).splitlines()[2:]]
    told = {claim["id"]: claim["verdict"] for claim in page_claims(quick)}
    lines = table(quick.comparisons)
    for claim, _, cell in rows[:-1]:
        assert cell.endswith(told[claim])
        (line,) = (place for place, one in enumerate(lines) if one.startswith(f"{claim}  "))
        assert lines[line + 1].strip() == told[claim].upper()


def words(one):
    return one.claim, one.text, one.unit, one.basis, one.verdict, one.is_ours


def measured(one):
    """What there is of it: fewer than three seeds have an effect alone."""
    return [x for x in (one.effect, one.low, one.high, one.p_holm) if x is not None]


def test_a_number_that_is_changed_by_hand_is_noticed(quick):
    made = tables({QUICK: quick})
    text = f"<!-- results: headlines -->\n{made['headlines']}\n<!-- end of results -->"
    forged = text.replace("[-0.", "[-9.", 1)
    assert forged != text
    assert written(forged, made) == text


def test_what_no_commit_holds_makes_no_headline(quick):
    findings = quick
    _, here = findings.provenances[0]

    def titled(commit):
        made = [("loss", dataclasses.replace(here, commit=commit))]
        return SHORT[HEADLINES[0]] in headlines(
            {"x": dataclasses.replace(findings, provenances=made)}
        )

    assert titled("0123456789ab") and not titled("0123456789ab+")


def test_the_first_values_of_p_n_can_be_left_out(quick):
    bent = [1.0, 3.0, 2.5, *(0.1 * np.log(np.arange(4, 129)))]
    one = quick
    header, _, *rows = probe(dataclasses.replace(one, tables={0: bent})).splitlines()
    assert "log n" in header
    from_2, from_8, from_32 = (row.strip("| ").split(" | ") for row in rows)
    assert [row[0] for row in (from_2, from_8, from_32)] == ["2", "8", "32"]
    assert float(from_2[1]) < 0.2
    assert float(from_8[1]) == float(from_32[1]) == 1.0
    assert probe(dataclasses.replace(one, tables={})) == "Not measured yet."


def test_a_head_fades_that_loses_half_of_its_largest_weight(quick):
    one = quick
    (replica, record), *_ = one.sharpness["a"].items()
    there = record.num_keys.index(one.train_length)
    weights = np.ones((1, 4, len(record.num_keys)))
    weights[0, :, there] = 0.8
    weights[0, :, -1] = 0.1, 0.4, 0.41, 0.9
    made = dataclasses.replace(record, largest=weights.tolist(), entropy=weights.tolist())
    told = heads(dataclasses.replace(one, sharpness={"a": {replica: made}})).splitlines()
    row = dict(zip(told[0].split(" | "), told[2].split(" | "), strict=True))
    assert row["heads that lose sharpness by n = 1,025"] == "0.500"
    # Arithmetic carries positions to 181.
    assert row["heads that lose sharpness by n = 128"] == "0.000"


def test_a_loss_is_split_where_positions_give_out(quick):
    one = quick
    (replica, record), *_ = one.position_losses["a"].items()
    shifted = np.array(record.mean)
    shifted[32:64] -= 0.1
    shifted[64:181] -= 0.2
    shifted[181:] += 0.3
    made = dataclasses.replace(record, mean=shifted.tolist())
    losses = {"a": {replica: record}, "b": {replica: made}}
    told = stretches(dataclasses.replace(one, position_losses=losses, same_theta_losses=losses))
    header, _, row = told.splitlines()
    assert "32 to 64 | 64 to 181 | past 181" in header
    assert row == "| (b) SSMax | 1 | -0.100 | -0.100 | -0.200 | +0.300 |"
    assert "no RoPE limit" in stretches(read_findings(RECORDS / f"{QUICK}-no-rotary"))


def test_what_raising_theta_costs_is_told_run_by_run(quick):
    one = quick
    (first, record), (second, _), *_ = one.position_losses["a"].items()

    def lifted(by):
        # Far more where it is not looked at.
        mean = np.array(record.mean)
        mean[32:64] += by
        mean[:32] += 9.0
        mean[64:] += 9.0
        return dataclasses.replace(record, mean=mean.tolist())

    after = {"a": {first: lifted(0.1), second: lifted(0.3)}, "b": {first: lifted(0.05)}}
    before = {"a": {first: record, second: record}}
    made = dataclasses.replace(one, position_losses=after, same_theta_losses=before)
    _, _, row = base_scaling({"2026-11-15_quick": made}).splitlines()
    # (b) was not measured with theta unchanged.
    assert row.endswith("| 181 | +0.200 (+0.100 to +0.300) | - | - | - | - |")


@pytest.mark.slow
def test_the_bases_of_theta_to_choose_from_are_as_measured(results):
    _, _, table = (ROOT / "docs/long-contexts.md").read_text().partition("| base in training |")
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:5]]
    for base, until, breaks, *prices in rows:
        name = {"1,000": "small-theta-1k", "10,000": "small", "100,000": "small-theta-100k"}[base]
        one = results[f"2026-11-17_{name}"]
        places = [
            breaks_at(one.position_losses[rule][run].mean, 512)
            for rule in "ab"
            for run in one.position_losses[rule]
        ]
        if None in places:
            assert places == [None] * 6 and breaks == "not within 10,240"
        else:
            assert breaks == f"{min(places):,} to {max(places):,}"
        assert until == f"{one.rope_limit:,.0f}"
        (row,) = base_scaling({name: one}).splitlines()[2:]
        measured = [cell.split()[0] for cell in row.split(" | ")[4:6]]
        assert [price.split()[0] for price in prices] == [f"{float(x):.2f}" for x in measured]


def test_a_mean_over_fewer_runs_than_the_row_says_so(quick):
    one = quick
    _, *rest = one.trials["a"]
    fewer = {**one.trials, "a": {replica: one.trials["a"][replica] for replica in rest}}
    row = numbers(dataclasses.replace(one, trials=fewer)).splitlines()[2].split(" | ")
    assert row[:2] == ["| (a) softmax", "3"]
    assert [cell.partition(", ")[2].strip("| ") for cell in row[2:]] == [""] * 4 + ["2 of them"] * 2


def test_a_table_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="there is no table 'hedlines'"):
        written("<!-- results: hedlines -->\n<!-- end of results -->", {"headlines": "| a |"})


def test_variants_stand_below_the_preset_that_they_vary(quick):
    assert "Not measured" in tables({"quick": quick})["variants of quick"]
    small, changed = (
        dataclasses.replace(quick, study={**quick.study, "preset": preset})
        for preset in ("small", "small:no-rotary")
    )
    told = tables({"1": small, "2": changed})["variants of small"].splitlines()
    assert [line.split(" | ")[0] for line in told[2:]] == ["| as it is", "| no-rotary"]


def test_results_hold_records_alone_and_few_bytes():
    files = [path for path in RECORDS.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".xz"}
    assert sum(path.stat().st_size for path in files) < 12_000_000


def test_parts_in_results_can_be_merged(tmp_path):
    """Another part of a study may be made one day: its settings are still understood."""
    archives = sorted((RECORDS / f"{QUICK}-windows" / "parts").iterdir())
    assert len(merge(archives, tmp_path)) == len(archives) == 2


def test_no_record_tells_of_the_machine_that_it_was_made_on():
    for study in RECORDS.glob("*/study.json"):
        values = json.loads(study.read_text())
        # The oldest tell of neither.
        told = [values.get("data", ""), values.get("test", ""), *values.get("commands", [])]
        assert not [word for words in told for word in words.split() if word.startswith("/")], study
