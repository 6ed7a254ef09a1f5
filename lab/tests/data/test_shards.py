"""Shards: what was written is what is read, and what is not whole is refused by name."""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest

from ssmax_lab.data import shards as shards_module
from ssmax_lab.data.shards import (
    INDEX,
    SUFFIX,
    Shard,
    ShardSet,
    ShardWriter,
    Vocabulary,
    read_header,
    write_index,
)

BYTES = Vocabulary(name="bytes", hash="ab" * 32, size=257, end_of_document=256)
WIDE = Vocabulary(name="wide", hash="cd" * 32, size=100_000, end_of_document=7)
DOCUMENTS = [[1, 2, 3], [], [4], list(range(250)), [5, 5, 5, 5]]


def write(path, documents, vocabulary=BYTES, **options):
    with ShardWriter(path, vocabulary, **options) as writer:
        for document in documents:
            writer.add(document)
    return path


def make_set(folder, groups=(DOCUMENTS[:2], [], DOCUMENTS[2:4], DOCUMENTS[4:]), vocabulary=BYTES):
    folder.mkdir(exist_ok=True)
    for number, documents in enumerate(groups):
        write(folder / f"{number:03}{SUFFIX}", documents, vocabulary)
    write_index(folder, details={"source": "invented"})
    return folder


def flat(documents, vocabulary=BYTES):
    return [token for document in documents for token in [*document, vocabulary.end_of_document]]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(BYTES, "uint16"), (WIDE, "uint32")])
@pytest.mark.parametrize("documents", [DOCUMENTS, DOCUMENTS[:1], [[]], []], ids=len)
def test_what_was_written_is_what_is_read(tmp_path, documents, vocabulary, dtype):
    path = write(tmp_path / "a.shard", documents, vocabulary, origin={"part": 3})
    shard = Shard(path)
    assert shard.header == read_header(path)
    assert shard.header.vocabulary == vocabulary
    assert (shard.header.dtype, shard.tokens.dtype) == (dtype, dtype)
    assert shard.header.origin == {"part": 3}
    assert shard.tokens.tolist() == flat(documents, vocabulary)
    lengths = [len(document) + 1 for document in documents]
    assert shard.starts.tolist() == [0, *itertools.accumulate(lengths)][: len(documents)]
    assert (shard.header.num_tokens, shard.header.num_documents) == (sum(lengths), len(documents))
    shard.verify()


def test_the_last_tokens_of_each_width_survive(tmp_path):
    for size, width in ((2**16, 2), (2**16 + 1, 4), (2**32, 4)):
        vocabulary = Vocabulary(name="v", hash="", size=size, end_of_document=0)
        path = write(tmp_path / "a.shard", [[size - 1]], vocabulary)
        assert Shard(path).tokens.tolist() == [size - 1, 0]
        assert Shard(path).tokens.itemsize == width


def test_lists_and_arrays_of_any_integer_type_make_the_same_file(tmp_path):
    kinds = [list, tuple, lambda d: np.array(d, np.int32), lambda d: np.array(d, ">u8")]
    files = [
        write(tmp_path / "a.shard", [kind(document) for document in DOCUMENTS]).read_bytes()
        for kind in kinds
    ]
    assert len(set(files)) == 1


def test_tokens_start_on_a_page_however_long_the_origin_is(tmp_path):
    path = write(tmp_path / "a.shard", DOCUMENTS, origin={"names": ["x" * 50] * 300})
    place = path.read_bytes().find(np.array(flat(DOCUMENTS), "<u2").tobytes())
    assert place > 15_000 and place % 4096 == 0
    assert Shard(path).header.origin == {"names": ["x" * 50] * 300}


def test_a_mapped_shard_cannot_be_written_to(tmp_path):
    shard = Shard(write(tmp_path / "a.shard", DOCUMENTS))
    for part in (shard.tokens, shard.starts):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 1


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([0, 257], "a.shard.*'bytes' lie in 0..256, got 0..257"),
        ([-1], "a.shard.*got -1..-1"),
        ([2**70], "a.shard.*whole numbers.*object"),
        ([0.5], "a.shard.*whole numbers.*float64"),
        ([[1, 2]], r"a.shard.*one row.*\(1, 2\)"),
        ([True], "a.shard.*whole numbers.*bool"),
    ],
)
def test_what_is_no_token_is_refused_and_leaves_no_file(tmp_path, document, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "a.shard", [[1], document])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_an_older_shard_as_it_was(tmp_path):
    path = write(tmp_path / "a.shard", DOCUMENTS)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), ShardWriter(path, BYTES) as writer:
        writer.add([1])
        raise KeyboardInterrupt
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a.shard", DOCUMENTS)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_no_shard_and_in_nobodys_way(tmp_path):
    program = f"""if True:
        import os, signal
        from ssmax_lab.data.shards import ShardWriter, Vocabulary
        with ShardWriter({str(tmp_path / "a.shard")!r}, {BYTES!r}) as writer:
            writer.add(list(range(200)) * 50)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="holds no shards"):
        ShardSet.open(tmp_path)
    alone = write(tmp_path / "b.shard", DOCUMENTS).read_bytes()
    assert write(tmp_path / "a.shard", DOCUMENTS).read_bytes() == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.shard", "b.shard"]


def test_every_damaged_byte_is_noticed(tmp_path):
    path = write(tmp_path / "a.shard", DOCUMENTS, origin={"part": 3})
    whole = path.read_bytes()
    places = [*range(0, 400, 7), *range(400, len(whole), 41), *range(len(whole) - 60, len(whole))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="a.shard"):
            Shard(path).verify()


@pytest.mark.parametrize("size", [0, 5, 19, 20, 4095, 4096, 4097, -1])
def test_a_truncated_shard_is_refused_by_name(tmp_path, size):
    path = write(tmp_path / "a.shard", DOCUMENTS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="a.shard is (damaged|not a shard)"):
        read_header(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data + b"\0", "a.shard is damaged: too long, .* asks for 4664 .* has 4665"),
        (lambda data: data[:-8], "a.shard is damaged: truncated"),
        (lambda data: b"PAR1" + data, "a.shard is not a shard"),
        (lambda data: data[:8] + b"\2" + data[9:], "a.shard is of format 2, .* format 1"),
    ],
)
def test_a_foreign_or_overlong_file_is_refused_by_name(tmp_path, change, message):
    path = write(tmp_path / "a.shard", DOCUMENTS)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        Shard(path)


@pytest.mark.parametrize(("size", "end"), [(0, 0), (2**32 + 1, 0), (257, 257), (257, -1)], ids=str)
def test_an_impossible_vocabulary_is_refused(size, end):
    with pytest.raises(ValueError, match="'v'"):
        Vocabulary(name="v", hash="", size=size, end_of_document=end)


def test_a_shard_has_its_ending(tmp_path):
    with pytest.raises(ValueError, match="ends in .shard, got .*tokens.bin"):
        ShardWriter(tmp_path / "tokens.bin", BYTES)


@pytest.mark.parametrize("vocabulary", [BYTES, WIDE])
def test_a_set_reads_as_one_sequence_wherever_it_is_cut(tmp_path, vocabulary):
    opened = ShardSet.open(make_set(tmp_path, vocabulary=vocabulary))
    expected = flat(DOCUMENTS, vocabulary)
    assert (opened.num_tokens, opened.num_documents) == (len(expected), len(DOCUMENTS))
    assert (opened.vocabulary, opened.details) == (vocabulary, {"source": "invented"})
    edges = [0, 1, 3, 4, 5, 6, 7, 8, 100, 257, 258, 259, len(expected) - 1, len(expected)]
    for start, stop in itertools.combinations_with_replacement(edges, 2):
        piece = opened.slice(start, stop)
        assert piece.tolist() == expected[start:stop]
        assert piece.dtype == vocabulary.dtype
    for index, document in enumerate(DOCUMENTS):
        assert opened.document(index).tolist() == document
        start = opened.document_starts()[index]
        assert opened.slice(start, start + len(document)).tolist() == document
    assert opened.document_starts().dtype == np.int64
    opened.verify()


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 264), (264, 264)])
def test_a_slice_out_of_range_is_refused(tmp_path, start, stop):
    opened = ShardSet.open(make_set(tmp_path))
    assert opened.num_tokens == 263
    with pytest.raises(ValueError, match=f"tokens 0 to 263, got the slice {start}:{stop}"):
        opened.slice(start, stop)


@pytest.mark.parametrize("index", [-1, 5])
def test_a_document_out_of_range_is_refused(tmp_path, index):
    with pytest.raises(ValueError, match=f"documents 0 to 4, got {index}"):
        ShardSet.open(make_set(tmp_path)).document(index)


def test_the_fingerprint_is_the_data_and_nothing_else(tmp_path):
    first = ShardSet.open(make_set(tmp_path / "a"))
    again = tmp_path / "b"
    make_set(again)
    write_index(again, details={"source": "elsewhere"})
    assert ShardSet.open(again).fingerprint == first.fingerprint
    other = make_set(tmp_path / "c", (DOCUMENTS[:2], [], DOCUMENTS[3:1:-1], DOCUMENTS[4:]))
    assert ShardSet.open(other).fingerprint != first.fingerprint


def test_the_index_says_what_each_shard_holds(tmp_path):
    index = json.loads((make_set(tmp_path) / INDEX).read_text())
    assert [shard["name"] for shard in index["shards"]] == [f"00{i}.shard" for i in range(4)]
    assert [shard["num_tokens"] for shard in index["shards"]] == [5, 0, 253, 5]
    assert [shard["num_documents"] for shard in index["shards"]] == [2, 0, 2, 1]
    for shard in index["shards"]:
        assert shard["sha256"] == read_header(tmp_path / shard["name"]).sha256


def test_an_unfinished_folder_is_told_from_an_empty_one(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="holds no shards"):
            ShardSet.open(folder)
    with pytest.raises(ValueError, match="holds no shards"):
        write_index(tmp_path, details={})
    write(tmp_path / "a.shard", DOCUMENTS)
    with pytest.raises(ValueError, match="not finished; run it again to resume"):
        ShardSet.open(tmp_path)


def test_shards_of_two_vocabularies_make_no_set(tmp_path):
    write(tmp_path / "a.shard", DOCUMENTS)
    write(tmp_path / "b.shard", DOCUMENTS, WIDE)
    with pytest.raises(ValueError, match="b.shard holds tokens of .*wide.* a.shard .*bytes"):
        write_index(tmp_path, details={})
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "002.shard is missing"),
        (lambda path: os.truncate(path, 4200), "002.shard is damaged: truncated"),
        (lambda path: write(path, [[9], [4] * 250]), "002.shard is not the shard .* replaced"),
        (lambda path: write(path.with_name("9.shard"), []), "9.shard is not in the index.json"),
    ],
)
def test_a_set_that_changed_behind_its_index_is_refused_by_name(tmp_path, change, message):
    change(make_set(tmp_path) / "002.shard")
    with pytest.raises(ValueError, match=message):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize(
    "change", [lambda path: path.unlink(), lambda path: write(path, [[9], [4] * 250])]
)
def test_a_shard_that_changed_after_opening_is_refused_when_it_is_read(tmp_path, change):
    opened = ShardSet.open(make_set(tmp_path))
    change(tmp_path / "002.shard")
    opened.slice(0, 5)
    for read in (lambda: opened.slice(4, 6), lambda: opened.document(3), opened.verify):
        with pytest.raises(ValueError, match="002.shard is (missing|not the shard)"):
            read()


def test_a_shard_that_vanished_after_reading_fails_its_verification(tmp_path):
    opened = ShardSet.open(make_set(tmp_path))
    opened.document_starts()
    (tmp_path / "003.shard").unlink()
    with pytest.raises(ValueError, match="003.shard is missing"):
        opened.verify()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "parquet"}'])
def test_a_broken_index_is_refused_by_name(tmp_path, text):
    (make_set(tmp_path) / INDEX).write_text(text)
    with pytest.raises(ValueError, match="index.json is no index of shards"):
        ShardSet.open(tmp_path)


def test_verification_names_the_damaged_shard(tmp_path):
    ShardSet.open(make_set(tmp_path)).verify()
    with (tmp_path / "003.shard").open("r+b") as file:
        file.seek(4096)
        file.write(b"\6")
    with pytest.raises(ValueError, match="003.shard is damaged: its tokens"):
        ShardSet.open(tmp_path).verify()


def test_more_shards_than_file_descriptors_can_be_read(tmp_path, monkeypatch):
    folder = make_set(tmp_path, [[[i]] for i in range(60)])
    monkeypatch.setattr(shards_module, "_MAX_MAPPED", 8)
    opened = ShardSet.open(folder)
    used = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
        assert opened.slice(0, 120).tolist() == flat([[i] for i in range(60)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
