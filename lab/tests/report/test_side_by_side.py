"""What `ssmax-lab evaluate` left in a folder of results, one model beside another."""

from ssmax_lab.records import NeedleTrial, Provenance, to_jsonl
from ssmax_lab.report.side_by_side import SideBySide


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
    found = {row.what: row.values for row in SideBySide(tmp_path).rows()}
    assert found["retrieval accuracy, whole number, context 96"] == (1.0,)
    assert found["retrieval accuracy, whole number, context 128"] == (0.0,)
