"""Shards: what was written is what is read, and what is not whole is refused by name."""

import itertools
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest

from ssmax.errors import UsageError
from ssmax_lab.data import shards as shards_module
from ssmax_lab.data.shards import INDEX, ShardSet, Vocabulary, write_index, write_shard

BYTES = Vocabulary(name="bytes", hash="ab" * 32, size=257, end_of_document=256)
WIDE = Vocabulary(name="wide", hash="cd" * 32, size=100_000, end_of_document=7)
DOCUMENTS = [[1, 2, 3], [], [4], list(range(250)), [5, 5, 5, 5]]


def write(path, documents, vocabulary=BYTES):
    with write_shard(path, vocabulary) as writer:
        for document in documents:
            writer.add(document)
    return writer.info()


def make_set(folder, groups=(DOCUMENTS[:2], [], DOCUMENTS[2:4], DOCUMENTS[4:]), vocabulary=BYTES):
    folder.mkdir(exist_ok=True)
    shards = [
        write(folder / f"{number:03}.shard", documents, vocabulary)
        for number, documents in enumerate(groups)
    ]
    write_index(folder, vocabulary, shards, details={"source": "invented"})
    return folder


def flat(documents, vocabulary=BYTES):
    return [token for document in documents for token in [*document, vocabulary.end_of_document]]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(BYTES, "uint16"), (WIDE, "uint32")])
def test_a_set_reads_as_one_sequence_wherever_it_is_cut(tmp_path, vocabulary, dtype):
    opened = ShardSet.open(make_set(tmp_path, vocabulary=vocabulary))
    expected = flat(DOCUMENTS, vocabulary)
    assert (opened.num_tokens, opened.num_documents) == (len(expected), len(DOCUMENTS))
    assert (opened.vocabulary, opened.details) == (vocabulary, {"source": "invented"})
    edges = [0, 1, 3, 4, 5, 6, 7, 8, 100, 257, 258, 259, len(expected) - 1, len(expected)]
    for start, stop in itertools.combinations_with_replacement(edges, 2):
        piece = opened.slice(start, stop)
        assert piece.tolist() == expected[start:stop]
        assert piece.dtype == dtype
    for index, document in enumerate(DOCUMENTS):
        assert opened.document(index).tolist() == document
        start = opened.document_starts()[index]
        assert opened.slice(start, start + len(document)).tolist() == document
    assert opened.document_starts().dtype == np.int64
    opened.verify()


def test_the_last_tokens_of_each_width_survive(tmp_path):
    for size, dtype in ((2**16, "uint16"), (2**16 + 1, "uint32"), (2**32, "uint32")):
        vocabulary = Vocabulary(name="v", hash="", size=size, end_of_document=0)
        opened = ShardSet.open(make_set(tmp_path / f"{size}", [[[size - 1]]], vocabulary))
        assert opened.slice(0, 2).tolist() == [size - 1, 0]
        assert opened.slice(0, 2).dtype == dtype


def test_lists_and_arrays_of_any_integer_type_make_the_same_file(tmp_path):
    kinds = [list, tuple, lambda d: np.array(d, np.int32), lambda d: np.array(d, ">u8")]
    made = [write(tmp_path / "a.shard", [kind(one) for one in DOCUMENTS]) for kind in kinds]
    assert len({info.sha256 for info in made}) == 1


def test_an_interrupted_writer_leaves_an_older_shard_as_it_was(tmp_path):
    path = tmp_path / "a.shard"
    write(path, DOCUMENTS)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), write_shard(path, BYTES) as writer:
        writer.add([1])
        raise KeyboardInterrupt
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_no_shard_and_in_nobodys_way(tmp_path):
    program = f"""if True:
        import os, pathlib, signal
        from ssmax_lab.data.shards import Vocabulary, write_shard
        with write_shard(pathlib.Path({str(tmp_path / "a.shard")!r}), {BYTES!r}) as writer:
            writer.add(list(range(200)) * 50)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UsageError, match="holds no shards"):
        ShardSet.open(tmp_path)
    assert (
        write(tmp_path / "a.shard", DOCUMENTS).sha256
        == write(tmp_path / "b.shard", DOCUMENTS).sha256
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.shard", "b.shard"]


def test_every_damaged_byte_is_noticed(tmp_path):
    make_set(tmp_path)
    for name in ("000.shard", "002.shard", "003.shard"):
        whole = (tmp_path / name).read_bytes()
        for place in range(0, len(whole), 5):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(UsageError, match=f"{name} is damaged"):
                ShardSet.open(tmp_path).verify()
        (tmp_path / name).write_bytes(whole)
    ShardSet.open(tmp_path).verify()


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 264), (264, 264)])
def test_a_slice_out_of_range_is_refused(tmp_path, start, stop):
    with pytest.raises(UsageError, match=f"0 to 263.*{start}:{stop}"):
        ShardSet.open(make_set(tmp_path)).slice(start, stop)


@pytest.mark.parametrize("index", [-1, 5])
def test_a_document_out_of_range_is_refused(tmp_path, index):
    with pytest.raises(IndexError):
        ShardSet.open(make_set(tmp_path)).document(index)


def test_the_fingerprint_is_the_data_and_nothing_else(tmp_path):
    first = ShardSet.open(make_set(tmp_path / "a"))
    # As studies of version 0.1.0 have recorded it for these tokens.
    assert first.fingerprint == "8b6dd629c5a740c0d1b833e551c5ea1ef82a7375242701e82edf4e8d54fbdb71"
    shards = [write(tmp_path / "a" / "000.shard", DOCUMENTS)]
    write_index(tmp_path / "a", BYTES, shards, details={"source": "elsewhere"})
    again = ShardSet.open(tmp_path / "a").fingerprint
    write_index(tmp_path / "a", BYTES, shards, details={})
    assert ShardSet.open(tmp_path / "a").fingerprint == again != first.fingerprint
    other = make_set(tmp_path / "c", (DOCUMENTS[:2], [], DOCUMENTS[3:1:-1], DOCUMENTS[4:]))
    assert ShardSet.open(other).fingerprint != first.fingerprint


def test_an_unfinished_folder_is_told_from_an_empty_one(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="holds no shards"):
            ShardSet.open(folder)
    write(tmp_path / "a.shard", DOCUMENTS)
    with pytest.raises(UsageError, match="not finished"):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "002.shard is missing"),
        (lambda path: os.truncate(path, 300), "002.shard is damaged"),
        (lambda path: write(path, [[9], [4] * 250, []]), "002.shard is damaged"),
    ],
)
def test_a_shard_of_another_size_is_refused_by_name(tmp_path, change, message):
    opened = ShardSet.open(make_set(tmp_path))
    change(tmp_path / "002.shard")
    for read in (
        lambda: ShardSet.open(tmp_path),
        lambda: opened.slice(4, 6),
        lambda: opened.document(3),
        opened.verify,
    ):
        with pytest.raises(UsageError, match=message):
            read()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "parquet"}'])
def test_a_broken_index_is_refused_by_name(tmp_path, text):
    (make_set(tmp_path) / INDEX).write_text(text)
    with pytest.raises(UsageError, match="index.json is no index"):
        ShardSet.open(tmp_path)


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
