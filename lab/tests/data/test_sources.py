"""Sources: what is read, what is skipped and why, and that nothing broken is fatal."""

import gzip
import json
import lzma
import os
import sys
import types

import pytest

from ssmax.errors import MachineError
from ssmax_lab.data.sources import Document, Skipped, open_source

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def pack(content, suffix):
    if suffix == ".zst":
        return pytest.importorskip("pyarrow").compress(content, "zstd", asbytes=True)
    return PACK[suffix](content)


def read(source, **options):
    """Everything of every part."""
    return [document for part in open_source(str(source), **options) for document in part.read()]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
def test_text_and_lines_read_the_same_packed_or_not(tmp_path, packed):
    (tmp_path / f"b.txt{packed}").write_bytes(pack(b"one\ntwo\n", packed))
    rows = lines({"text": "first"}, {"text": "second"})
    (tmp_path / f"a.jsonl{packed}").write_bytes(pack(rows, packed))
    assert read(tmp_path) == [
        Document(f"a.jsonl{packed}:1", "first"),
        Document(f"a.jsonl{packed}:2", "second"),
        Document(f"b.txt{packed}", "one\ntwo\n"),
    ]
    assert read(tmp_path / f"b.txt{packed}") == [Document(f"b.txt{packed}", "one\ntwo\n")]


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
def test_archives_laid_end_to_end_are_one(tmp_path, packed):
    path = tmp_path / f"a.jsonl{packed}"
    path.write_bytes(pack(lines({"text": "x"}), packed) + pack(lines({"text": "y"}), packed))
    assert [document.text for document in read(path)] == ["x", "y"]


def test_folders_are_read_in_order_without_what_is_hidden(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "a.txt", ".hidden/x.txt", "b/.x.txt", "c.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "around").symlink_to(tmp_path)
    (tmp_path / "b" / "linked").symlink_to(tmp_path / "b" / "2.txt")
    found = read(tmp_path)
    assert [item.name for item in found] == ["a.txt", "b/10.txt", "b/2.txt", "b/linked", "c.TXT"]
    assert [type(item) for item in found] == [Document, Document, Document, Skipped, Document]


def test_what_is_no_document_is_skipped_with_its_place_and_reason(tmp_path):
    rows = [
        b'{"text": "good"}',
        b"{not json",
        b"",
        b'{"title": "no text"}',
        b'["a list"]',
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": " \\n"}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    (tmp_path / "b.txt").write_bytes(b"latin \xe9")
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.csv").write_bytes(b"a,b")
    (tmp_path / "e.txt").symlink_to(tmp_path / "nowhere.txt")
    os.mkfifo(tmp_path / "f.txt")
    assert read(tmp_path) == [
        Document("a.jsonl:1", "good"),
        Skipped("a.jsonl:2", "not JSON"),
        Skipped("a.jsonl:4", "no field 'text'"),
        Skipped("a.jsonl:5", "no field 'text'"),
        Skipped("a.jsonl:6", "not a string"),
        Skipped("a.jsonl:7", "not a string"),
        Skipped("a.jsonl:8", "empty"),
        Skipped("a.jsonl:9", "not UTF-8"),
        Skipped("a.jsonl:10", "not UTF-8"),
        Skipped("a.jsonl:11", "not JSON"),
        Document("a.jsonl:12", "last"),
        Skipped("b.txt", "not UTF-8"),
        Skipped("c.txt", "empty"),
        Skipped("d.csv", "not a kind of file that is read"),
        Skipped("e.txt", "not a kind of file that is read"),
        Skipped("f.txt", "not a kind of file that is read"),
    ]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines({"text": "hello"}))
    assert [document.text for document in read(tmp_path)] == ["hello", "hello"]


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("cut", [3, 0.5, -1])
def test_a_broken_archive_keeps_what_came_before(tmp_path, packed, cut):
    rows = [{"text": os.urandom(50).hex()} for _ in range(4_000)]
    whole = pack(lines(*rows), packed)
    cut = int(len(whole) * cut) if isinstance(cut, float) else cut
    (tmp_path / f"a.jsonl{packed}").write_bytes(whole[:cut])
    (tmp_path / f"b.txt{packed}").write_bytes(whole[:cut])
    *found, last = [item for item in read(tmp_path) if item.name.startswith("a")]
    assert last == Skipped(f"a.jsonl{packed}", "broken file")
    assert [document.text for document in found] == [row["text"] for row in rows[: len(found)]]
    if cut > 3:
        assert found
    assert Skipped(f"b.txt{packed}", "broken file") in read(tmp_path)


def test_a_file_that_vanished_is_skipped(tmp_path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    parts = open_source(str(tmp_path))
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).unlink()
    found = [item for part in parts for item in part.read()]
    reason = "cannot be read: No such file or directory"
    assert found == [Skipped("a.txt", reason), Skipped("b.jsonl", reason)]


def test_parquet_is_read_by_row_groups(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs the extra 'lab'")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = ["one", None, "three", "", "five"]
    table = arrow.table({"text": texts, "other": [1, 2, 3, 4, 5]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    wrong = arrow.array([b"ok", b"\xff"], arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"text": wrong}), tmp_path / "b.parquet")
    parquet.write_table(arrow.table({"body": ["x"]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-5])
    assert read(tmp_path) == [
        Document("a.parquet:1", "one"),
        Skipped("a.parquet:2", "not a string"),
        Document("a.parquet:3", "three"),
        Skipped("a.parquet:4", "empty"),
        Document("a.parquet:5", "five"),
        Document("b.parquet:1", "ok"),
        Skipped("b.parquet:2", "not UTF-8"),
        Skipped("c.parquet", "no field 'text'"),
        Skipped("d.parquet", "broken file"),
    ]
    assert read(tmp_path / "c.parquet", text_field="body") == [Document("c.parquet:1", "x")]


def test_another_field_can_be_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "no", "body": "yes"}))
    assert read(tmp_path, text_field="body") == [Document("a.jsonl:1", "yes")]


def test_what_holds_nothing_says_what_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("a")
    for source in (tmp_path, tmp_path / "a.csv"):
        with pytest.raises(ValueError, match=r"nothing to read; what is read: \.txt, \.jsonl"):
            open_source(str(source))
    with pytest.raises(ValueError, match="no file or folder 'nowhere'.*'embedded'"):
        open_source("nowhere")


class Shards:
    """A stand-in for a streamed dataset of two shards."""

    num_shards = 2

    def __init__(self, rows):
        self.rows = rows

    def shard(self, num_shards, index):
        return self.rows[index::num_shards]


def test_a_dataset_of_the_hub_is_read_shard_by_shard(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return Shards([{"text": "a"}, {"text": "b"}, {"text": 3}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read("hf:some/name") == [
        Document("hf:some/name#0:1", "a"),
        Skipped("hf:some/name#0:2", "not a string"),
        Document("hf:some/name#1:1", "b"),
    ]
    read("hf:some/name:config:test")
    assert asked[0] == ("some/name", None, "train", True)
    assert asked[-1] == ("some/name", "config", "test", True)
    for wrong in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match="a dataset is written hf:NAME"):
            open_source(wrong)


def test_the_hub_failing_is_no_skipped_document(monkeypatch):
    def rows():
        yield {"text": "a"}
        raise ConnectionError("gone")

    stand_in = types.SimpleNamespace(
        load_dataset=lambda *_, **__: types.SimpleNamespace(num_shards=1, shard=lambda **_: rows())
    )
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    with pytest.raises(MachineError, match="hf:x#0 stopped: gone; run the same command"):
        read("hf:x")

    def unreachable(*_, **__):
        raise ConnectionError("no such host")

    monkeypatch.setattr(stand_in, "load_dataset", unreachable)
    with pytest.raises(ValueError, match="hf:x cannot be opened: no such host"):
        open_source("hf:x")


def test_the_real_library_reads_a_folder(tmp_path):
    import subprocess

    pytest.importorskip("datasets", reason="needs the extra 'hub'")
    (tmp_path / "data").mkdir()
    for number in range(3):
        row = lines({"text": f"document {number}"})
        (tmp_path / "data" / f"train-{number}.jsonl").write_bytes(row)
    # In a process of its own: the library reads its settings when it is imported.
    code = (
        "import sys\n"
        "from ssmax_lab.data.sources import open_source\n"
        "parts = open_source('hf:' + sys.argv[1])\n"
        "print([[item.text for item in part.read()] for part in parts])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "data")],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[['document 0'], ['document 1'], ['document 2']]\n", done.stderr
