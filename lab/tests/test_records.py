"""Records: a line that can defend itself."""

import csv
import dataclasses
import re
import subprocess

import pytest

from ssmax_lab import records


def row(**changes):
    provenance = records.Provenance.here(config={"a": 1}, device="a CPU", seed=3)
    values = {
        "benchmark": "b", "competitor": "ours", "shape": "B1", "mode": "forward",
        "milliseconds": 1.5, "ratio": 1.0, "peak_mib": 2.0, "memory_ratio": 1.0, "error": 1e-3,
        "provenance": provenance,
    }  # fmt: skip
    return records.BenchmarkRow(**{**values, **changes})


def test_provenance_says_where_a_number_comes_from(monkeypatch):
    monkeypatch.delenv("SSMAX_COMMIT", raising=False)
    here = records.Provenance.here(config={"a": 1}, device="a CPU", seed=3)
    assert re.fullmatch(r"[0-9a-f]{12}\+?|unknown", here.commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", here.date)
    assert here.versions["torch"] != "none" and here.versions["python"].startswith("3.")
    monkeypatch.setenv("SSMAX_COMMIT", "abc")
    assert records.Provenance.here(config={}, device="", seed=0).commit == "abc"


def test_the_commit_is_that_of_the_code_or_unknown(monkeypatch, tmp_path):
    """Outside git, and where the package is installed within someone else's repository."""
    monkeypatch.delenv("SSMAX_COMMIT", raising=False)
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))
    (tmp_path / "records.py").touch()

    def commit():
        return records.Provenance.here(config={}, device="", seed=0).commit

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit() == "unknown"
    git("init")
    git("commit", "--allow-empty", "--message", "theirs")
    assert commit() == "unknown"
    git("add", "records.py")
    git("commit", "--message", "ours")
    assert commit() == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "records.py").write_text("changed")
    assert commit() == git("rev-parse", "--short=12", "HEAD") + "+"


def test_records_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    other = dataclasses.replace(row().provenance, seed=4)
    rows = [row(milliseconds=0.1 + 0.2), row(error=float("inf")), row(provenance=other), row()]
    whole = records.to_jsonl(rows)
    path.write_text(whole + whole[:50])
    assert records.read_jsonl(path, records.BenchmarkRow) == rows, "but for the line cut short"
    # What is appended begins with its own provenance.
    path.write_text(whole + records.to_jsonl(rows[:1]))
    assert records.read_jsonl(path, records.BenchmarkRow) == [*rows, rows[0]]


def test_a_provenance_stands_once_before_the_records_that_share_it(tmp_path):
    lines = records.to_jsonl([row(), row(mode="backward")]).splitlines()
    assert [("provenance" in line) for line in lines] == [True, False, False]


@pytest.mark.parametrize("damaged", ["{}", "[]", "5", '{"provenance": {}}', '{"provenance": 5}'])
def test_a_line_that_is_no_record_is_named(tmp_path, damaged):
    path = tmp_path / "rows.jsonl"
    path.write_text(records.to_jsonl([row()]) + damaged + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:3 is no BenchmarkRow"):
        records.read_jsonl(path, records.BenchmarkRow)


def test_a_record_without_provenance_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(records.to_jsonl([row()]).partition("\n")[2])
    with pytest.raises(ValueError, match=r"rows.jsonl:1 is no BenchmarkRow: .*provenance"):
        records.read_jsonl(path, records.BenchmarkRow)


@pytest.mark.parametrize("damaged", [b'{"kind": "st', b"\xff\x00", b"3", b'{"step": 2}', b""])
@pytest.mark.parametrize("kind", [None, "step"])
def test_a_damaged_line_of_metrics_is_named(tmp_path, damaged, kind):
    path, whole = tmp_path / "metrics.jsonl", b'{"kind": "step", "step": 1}'
    path.write_bytes(whole + b"\n" + damaged)
    assert records.read_metrics(path, kind) == [{"kind": "step", "step": 1}], "one cut short is not"
    path.write_bytes(b"\n".join([whole, damaged, whole, b""]))
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is no line of metrics: "):
        records.read_metrics(path, kind)


def test_any_change_of_a_configuration_changes_its_hash():
    assert records.config_hash({"a": 1, "b": 2}) == records.config_hash({"b": 2, "a": 1})
    assert records.config_hash({"a": 1}) != records.config_hash({"a": 2})


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "new" / "results.csv"
    records.append_csv(path, [row()])
    records.append_csv(path, [row(competitor="theirs"), row()])
    records.append_csv(path, [])
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["competitor"] for line in lines] == ["ours", "theirs", "ours"]
    assert lines[0]["device"] == "a CPU" and lines[0]["torch"] != ""


def test_a_table_of_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("other\n1\n")
    with pytest.raises(ValueError, match="other columns"):
        records.append_csv(path, [row()])
    assert path.read_text() == "other\n1\n"
