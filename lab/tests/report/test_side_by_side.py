"""What `ssmax-lab evaluate` left in a folder of results, one model beside another."""

import dataclasses

import pytest

from ssmax_lab.records import NeedleTrial, Provenance, to_jsonl
from ssmax_lab.report.side_by_side import SideBySide, text_table


def trial(length, *, config, is_whole):
    here = Provenance(commit="", config_hash=config, versions={}, device="", seed=0, date="")
    return NeedleTrial(
        run="b-0", length=length, depth=0.5, trial=0, city="", number="1234", said="",
        is_whole=is_whole, first_digit=is_whole, digits_right=0, provenance=here,
    )  # fmt: skip


def test_contexts_measured_one_by_one_are_all_there_each_as_it_was_last(tmp_path):
    trials = [
        trial(96, config="x", is_whole=False),
        trial(128, config="y", is_whole=False),
        trial(96, config="z", is_whole=True),
    ]
    (tmp_path / "needle.jsonl").write_text(to_jsonl(trials))
    found = {row.what: row.values for row in SideBySide.of(tmp_path).rows()}
    assert found["retrieval accuracy, whole number, context 96"] == (1.0,)
    assert found["retrieval accuracy, whole number, context 128"] == (0.0,)


def test_a_difference_has_an_interval_over_trials_of_the_same_questions(tmp_path):
    def trials(run, found):
        made = [trial(96, config=run, is_whole=is_whole) for is_whole in found]
        return [dataclasses.replace(one, run=run, trial=i) for i, one in enumerate(made)]

    every = [*trials("first", [1, 0, 0, 0]), *trials("other", [1, 1, 1, 0]), *trials("few", [1])]
    (tmp_path / "needle.jsonl").write_text(to_jsonl(every))
    found = SideBySide.of(tmp_path)
    row = found.rows()[0]
    assert row.values == (0.25, 0.75, 1.0)
    none, (effect, low, high), other_questions = row.less_first
    assert none is other_questions is None
    assert (effect, low, high) == pytest.approx((0.5, -0.4187, 1.4187), abs=1e-3)
    line = next(line for line in text_table(found) if "whole number" in line)
    assert "0.7500 (+0.5000 [-0.4187, +1.4187])" in line
