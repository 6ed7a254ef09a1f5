"""Preparation: the same files however it was run, interrupted or divided among workers."""

import hashlib
import json
import lzma
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ssmax.errors import UsageError
from ssmax_lab.data import preparation as module
from ssmax_lab.data.documents import Document, Part, SourceStoppedError
from ssmax_lab.data.preparation import prepare, text_to_measure
from ssmax_lab.data.shards import ShardSet, Task, read_header
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.data.workers import run_all


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """Many tasks from little text."""
    monkeypatch.setattr(module, "TASK_BYTES", 2_000)


def write_texts(folder, number=40, seed=0):
    folder.mkdir()
    rng = random.Random(seed)
    for index in range(number):
        words = " ".join(rng.choices(["alpha", "beta", "gamma", "delta"], k=rng.randint(5, 120)))
        (folder / f"{index:03}.txt").write_text(f"{index} {words}")
    (folder / "bad.jsonl").write_text('{"text": "good"}\n{"text": 3}\nnothing\n')
    (folder / "image.png").write_bytes(b"\x89PNG")
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def texts_of(folder):
    shards, tokenizer = ShardSet.open(folder), load_tokenizer("bytes")
    return [tokenizer.decode(shards.document(index)) for index in range(shards.num_documents)]


def run(source, out, **options):
    return prepare(str(source), out, **{"tokenizer": "bytes", "workers": 1, **options})


def test_every_document_is_on_one_side_and_every_other_thing_is_listed(tmp_path):
    source = write_texts(tmp_path / "texts")
    prepared = run(source, tmp_path / "out", validation_fraction=0.2)
    train, validation = (texts_of(tmp_path / "out" / side) for side in ("train", "validation"))
    expected = [path.read_text() for path in sorted(source.glob("*.txt"))] + ["good"]
    assert sorted(train + validation) == sorted(expected)
    # Each side keeps the order of the source.
    assert [text for text in expected if text in set(train)] == train
    assert 0 < len(validation) < len(train)
    assert (prepared.num_documents, prepared.validation_documents) == (len(train), len(validation))
    assert prepared.num_tokens == sum(len(text) + 1 for text in train)
    assert prepared.validation_tokens == sum(len(text) + 1 for text in validation)
    listed = (tmp_path / "out" / "skipped.jsonl").read_text()
    skipped = [json.loads(line) for line in listed.splitlines()]
    assert skipped == [
        {"name": "bad.jsonl:2", "reason": "not a string"},
        {"name": "bad.jsonl:3", "reason": "not JSON"},
        {"name": "image.png", "reason": "not a kind of file that is read"},
    ]
    assert prepared.skipped == 3
    details = ShardSet.open(tmp_path / "out" / "train").details
    assert details["skipped"] == prepared.reasons == {item["reason"]: 1 for item in skipped}


def test_small_files_share_a_shard_and_large_ones_do_not(tmp_path):
    (tmp_path / "texts").mkdir()
    for name, size in {"a": 900, "b": 900, "c": 5_000, "d": 10, "e": 10}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text("x" * size)
    run(tmp_path / "texts", tmp_path / "out", validation_fraction=0)
    shards = sorted((tmp_path / "out" / "train").glob("*.shard"))
    assert [read_header(path).num_documents for path in shards] == [2, 1, 2]


def test_the_number_of_workers_changes_nothing(tmp_path):
    source = write_texts(tmp_path / "texts", 12)
    one = run(source, tmp_path / "one", validation_fraction=0.1)
    three = run(source, tmp_path / "three", validation_fraction=0.1, workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert one.num_tokens == three.num_tokens
    assert len(list((tmp_path / "one" / "train").glob("*.shard"))) > 1


def test_by_default_there_is_a_worker_for_each_core_that_may_be_used(tmp_path, monkeypatch):
    asked = []

    def watched(job, tasks, *, workers, on_result):
        asked.append(workers)
        run_all(job, tasks, workers=1, on_result=on_result)

    monkeypatch.setattr(module, "run_all", watched)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    run(write_texts(tmp_path / "texts", 3), tmp_path / "out", workers=None)
    assert set(asked) == {3}


def test_the_side_of_a_text_depends_on_nothing_else(tmp_path):
    source = write_texts(tmp_path / "texts")
    run(source, tmp_path / "first", validation_fraction=0.3)
    held_out = set(texts_of(tmp_path / "first" / "validation"))
    for path in source.glob("*.txt"):
        text = path.read_text()
        path.rename(path.with_name(f"{len(text)}-{path.name}"))
        (source / f"again-{path.name}").write_text(text)
    run(source, tmp_path / "second", validation_fraction=0.3)
    assert set(texts_of(tmp_path / "second" / "validation")) == held_out
    assert not held_out & set(texts_of(tmp_path / "second" / "train"))


@pytest.mark.parametrize("fraction", [1e-12, 1 - 1e-12])
def test_no_side_is_empty_if_there_are_two_texts(tmp_path, fraction):
    source = write_texts(tmp_path / "texts", 12)
    prepared = run(source, tmp_path / "out", validation_fraction=fraction)
    fewer = min(prepared.num_documents, prepared.validation_documents)
    assert (fewer, prepared.num_documents + prepared.validation_documents) == (1, 13)
    moved = texts_of(tmp_path / "out" / ("validation" if fraction < 0.5 else "train"))
    keys = {
        hashlib.sha256(text.encode()).digest()[:8]: text
        for side in ("train", "validation")
        for text in texts_of(tmp_path / "out" / side)
    }
    assert moved == [keys[min(keys) if fraction < 0.5 else max(keys)]]
    before = contents(tmp_path / "out")
    run(source, tmp_path / "out", validation_fraction=fraction)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("fraction", [0, 0.005, 1 - 1e-12])
def test_a_single_text_is_trained_on(tmp_path, copies, fraction):
    (tmp_path / "texts").mkdir()
    for number in range(copies):
        (tmp_path / "texts" / f"{number}.txt").write_text("the only text")
    prepared = run(tmp_path / "texts", tmp_path / "out", validation_fraction=fraction)
    assert (prepared.num_documents, prepared.validation_documents) == (copies, 0)
    assert not (tmp_path / "out" / "validation").exists()


@pytest.mark.parametrize("task_bytes", [1, 10_000])
@pytest.mark.parametrize(("copies", "held_out"), [(1, 1), (2, 0)])
def test_the_rule_of_two_sides_holds_out_no_text_that_is_most_of_all(
    tmp_path, monkeypatch, copies, held_out, task_bytes
):
    monkeypatch.setattr(module, "TASK_BYTES", task_bytes)
    (tmp_path / "texts").mkdir()
    other = "o" * 900
    key = hashlib.sha256(other.encode()).digest()
    texts = (f"{number:03}" + "x" * 697 for number in range(999))
    moved = next(text for text in texts if hashlib.sha256(text.encode()).digest() < key)
    (tmp_path / "texts" / "other.txt").write_text(other)
    for number in range(copies):
        (tmp_path / "texts" / f"{number}.txt").write_text(moved)
    prepared = run(tmp_path / "texts", tmp_path / "out", validation_fraction=1e-12)
    assert prepared.validation_documents == held_out
    assert prepared.num_documents == copies + 1 - held_out
    assert (tmp_path / "out" / "validation").exists() == bool(held_out)
    before = contents(tmp_path / "out")
    assert run(tmp_path / "texts", tmp_path / "out", validation_fraction=1e-12) == prepared
    assert contents(tmp_path / "out") == before


KILLED = """
import sys
from pathlib import Path
from ssmax_lab.data import preparation as module
module.TASK_BYTES = 2_000
if __name__ == "__main__":
    module.prepare(sys.argv[1], Path(sys.argv[2]), tokenizer="bytes", workers=int(sys.argv[3]),
                   validation_fraction=float(sys.argv[4]))
"""


@pytest.mark.parametrize(("workers", "fraction"), [(1, 0.1), (2, 1e-12)])
def test_killed_at_any_moment_the_same_command_ends_with_the_same_files(
    tmp_path, workers, fraction
):
    source, out = write_texts(tmp_path / "texts", 80), tmp_path / "out"
    run(source, tmp_path / "whole", validation_fraction=fraction)
    whole = contents(tmp_path / "whole")
    (tmp_path / "main.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "main.py"), str(source), str(out)]
    command += [str(workers), str(fraction)]
    rng, kills = random.Random(workers), 0
    for wanted in (0, 2, 9, 18):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.glob("tasks/*.json"))) < wanted:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        # The end of the pipe is the end of the workers, who notice the death of their parent.
        process.communicate(timeout=10)
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 3
    subprocess.run(command, check=True)
    assert contents(out) == whole


@pytest.mark.parametrize("fraction", [0.2, 1e-12])
def test_only_what_is_missing_is_done_again(tmp_path, monkeypatch, fraction):
    source, out = write_texts(tmp_path / "texts"), tmp_path / "out"
    run(source, out, validation_fraction=fraction)
    whole = contents(out)
    done = set()
    original = module.run_task

    def watched(task, **options):
        done.add(task.number)
        return original(task, **options)

    monkeypatch.setattr(module, "run_task", watched)
    run(source, out, validation_fraction=fraction)
    assert done == set()
    (out / "train" / "000001.shard").unlink()
    damaged = out / "train" / "000002.shard"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (out / "tasks" / "000003.json").write_text("{")
    shutil.copy(out / "train" / "000006.shard", out / "train" / "000004.shard")
    shutil.copy(out / "tasks" / "000006.json", out / "tasks" / "000005.json")
    run(source, out, validation_fraction=fraction)
    assert done == {1, 2, 3, 4, 5}
    assert contents(out) == whole


def test_an_unfinished_folder_has_no_index(tmp_path):
    source, out = write_texts(tmp_path / "texts"), tmp_path / "out"

    def stop_after(number):
        def stop(progress):
            if progress.done_tasks == number:
                raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        run(source, out, on_progress=stop_after(3))
    with pytest.raises(ValueError, match="not finished"):
        ShardSet.open(out / "train")
    run(source, out)
    (out / "train" / "000000.shard").unlink()
    (out / "train" / "000005.shard").unlink()
    total = len(list((out / "tasks").iterdir()))
    with pytest.raises(KeyboardInterrupt):
        run(source, out, on_progress=stop_after(total - 1))
    with pytest.raises(ValueError, match="not finished"):
        ShardSet.open(out / "train")


def test_another_preparation_is_refused_with_what_differs(tmp_path):
    source, out = write_texts(tmp_path / "texts"), tmp_path / "out"
    run(source, out)
    before = contents(out)
    other = write_texts(tmp_path / "others", seed=1)
    for changes, message in (
        ({"source": other}, "source was '.*texts' and is '.*others'"),
        ({"tokenizer": "gpt2"}, "tokenizer was 'bytes .*' and is 'gpt2 "),
        ({"validation_fraction": 0.1}, r"validation_fraction was 0\.005 and is 0\.1"),
        ({"text_field": "body"}, "text_field was 'text' and is 'body'"),
    ):
        with pytest.raises(ValueError, match=f"another preparation.*{message}.*another folder"):
            run(**{"source": source, "out": out, **changes})
    (source / "new.txt").write_text("new")
    with pytest.raises(ValueError, match="parts was '42 from .*' and is '43 from"):
        run(source, out)
    assert contents(out) == before
    (tmp_path / "foreign" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="no preparation.json"):
        run(source, tmp_path / "foreign")


@pytest.mark.parametrize("first", ["texts", "texts/", "./texts", ".//texts/."])
@pytest.mark.parametrize("prefix", ["", "tokens:"])
def test_a_source_is_the_same_with_whatever_slashes_it_is_typed(
    tmp_path, monkeypatch, prefix, first
):
    write_texts(tmp_path / "texts", 12)
    np.save(tmp_path / "texts" / "ready.npy", np.arange(97, 123, dtype=np.uint16))
    monkeypatch.chdir(tmp_path)
    run(prefix + first, "out")
    before = contents(tmp_path / "out")
    done = []
    monkeypatch.setattr(module, "run_task", lambda task, **_: done.append(task))
    for again in ("texts", "texts/", "./texts", "texts/./"):
        run(prefix + again, "out")
        assert not done and contents(tmp_path / "out") == before
    for other in ("texts" if prefix else "tokens:texts", "embedded"):
        with pytest.raises(ValueError, match="holds another preparation: source was"):
            run(other, "out")


def test_a_folder_that_is_called_as_a_word_is_not_the_word(tmp_path, monkeypatch):
    write_texts(tmp_path / "embedded", 3)
    monkeypatch.chdir(tmp_path)
    run("./embedded", "out")
    with pytest.raises(ValueError, match="source was './embedded' and is 'embedded'"):
        run("embedded", "out")


def test_a_second_process_is_kept_out_while_the_first_one_lives(tmp_path):
    source, out = write_texts(tmp_path / "texts", 3), tmp_path / "out"

    def second(progress):
        with pytest.raises(ValueError, match="is in use by another process"):
            run(source, out)

    run(source, out, on_progress=second)
    run(source, out)


def test_a_full_disk_is_one_clear_error_and_leaves_what_was_finished(tmp_path):
    source, out = write_texts(tmp_path / "texts", 20), tmp_path / "out"
    (source / "050.txt").write_text("x" * 200_000)
    run(source, tmp_path / "whole")
    limited = KILLED.replace(
        "import sys\n",
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (99_999,) * 2)\n",
    )
    (tmp_path / "main.py").write_text(limited)
    for workers in ("1", "2"):
        command = [sys.executable, str(tmp_path / "main.py"), str(source), str(out)]
        done = subprocess.run([*command, workers, "0.005"], capture_output=True, text=True)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(f"OSError: {out} cannot be written: [Errno 27] File too large")
        assert len(list((out / "tasks").glob("*.json"))) >= 5
        assert not list(out.glob("*/*.partial"))
    run(source, out)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="file/out must be a folder, but .*file is a file"):
        run("embedded", tmp_path / "file" / "out")


def test_a_worker_that_dies_is_one_clear_error(tmp_path, monkeypatch):
    source = write_texts(tmp_path / "texts", 12)
    monkeypatch.setattr(module, "run_task", die)
    with pytest.raises(OSError, match="a worker was killed.*fewer workers"):
        run(source, tmp_path / "out", workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_stops_is_not_taken_for_a_folder_that_cannot_be_written(
    tmp_path, monkeypatch, workers
):
    parts = [StoppingPart(name=f"hf:x#{number}", size=None) for number in range(3)]
    monkeypatch.setattr(module, "open_source", lambda *_, **__: parts)
    with pytest.raises(OSError, match=r"^hf:x#. stopped: gone$"):
        run("hf:x", tmp_path / "out", workers=workers)


class StoppingPart(Part):
    __slots__ = ()

    def documents(self):
        yield Document("first", "text")
        raise SourceStoppedError(f"{self.name} stopped: gone")


UNGUARDED = """
import sys
from ssmax_lab.data import preparation as module
module.TASK_BYTES = 2_000
module.prepare(sys.argv[1], sys.argv[2], tokenizer="bytes", workers=2)
"""


def test_a_script_without_its_guard_is_told_of_it(tmp_path):
    source = write_texts(tmp_path / "texts", 12)
    (tmp_path / "main.py").write_text(UNGUARDED)
    command = [sys.executable, str(tmp_path / "main.py"), str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr
    assert "in use by another process" not in done.stderr


def test_a_process_of_multiprocessing_may_prepare_with_one_worker(tmp_path):
    source = write_texts(tmp_path / "texts", 3)
    spawned = multiprocessing.get_context("spawn")
    child = spawned.Process(target=run, args=(source, tmp_path / "out"), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert ShardSet.open(tmp_path / "out" / "train").num_documents == 3


def die(task, **_):
    os._exit(9)


def test_progress_counts_up_to_everything(tmp_path):
    source, heard = write_texts(tmp_path / "texts"), []
    prepared = run(source, tmp_path / "out", validation_fraction=0.2, on_progress=heard.append)
    assert heard[0].done_tasks == heard[0].done_bytes == heard[0].num_tokens == 0
    assert [progress.done_tasks for progress in heard] == list(range(heard[-1].total_tasks + 1))
    last = heard[-1]
    assert last.done_bytes == last.total_bytes > 0
    assert last.num_tokens == prepared.num_tokens + prepared.validation_tokens
    assert last.num_documents == prepared.num_documents + prepared.validation_documents
    assert last.skipped == prepared.skipped == 3


def test_progress_costs_the_same_for_every_task(tmp_path, monkeypatch):
    source, asked, heard = write_texts(tmp_path / "texts"), [], []
    size = Task.size.fget
    monkeypatch.setattr(Task, "size", property(lambda task: asked.append(task) or size(task)))
    run(source, tmp_path / "out", on_progress=heard.append)
    # Once for the total, once when it is done.
    assert len(asked) == 2 * heard[-1].total_tasks


def test_a_source_without_documents_is_refused_and_says_why(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" ")
    with pytest.raises(ValueError, match="holds no documents: all 1 were skipped"):
        run(tmp_path / "texts", tmp_path / "out")
    assert "empty" in (tmp_path / "out" / "skipped.jsonl").read_text()
    # What is mended may be prepared into the same folder.
    (tmp_path / "texts" / "a.txt").write_text("bottles of beer")
    assert run(tmp_path / "texts", tmp_path / "out").num_documents == 1


def test_a_folder_that_held_something_keeps_it_where_a_preparation_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("bottles of beer")
    run(tmp_path / "texts", tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "texts" / "a.txt").write_text(" ")
    with pytest.raises(UsageError, match="holds another preparation"):
        run(tmp_path / "texts", tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_text_without_tokens_is_skipped(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
    made.save(str(tmp_path / "mine.json"))
    (tmp_path / "texts").mkdir()
    for name, text in {"a": "aaa", "b": "bbb", "c": "ab"}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    options = {"tokenizer": str(tmp_path / "mine.json"), "validation_fraction": 0}
    prepared = run(tmp_path / "texts", tmp_path / "out", **options)
    assert (prepared.num_documents, prepared.reasons) == (2, {"no tokens": 1})
    listed = (tmp_path / "out" / "skipped.jsonl").read_text()
    assert json.loads(listed) == {"name": "b.txt", "reason": "no tokens"}


def test_bad_settings_get_one_clear_error(tmp_path):
    source = write_texts(tmp_path / "texts", 3)
    for changes, message in (
        ({"workers": 0}, "workers must be at least 1"),
        ({"validation_fraction": 1.0}, "validation_fraction must be"),
        ({"validation_fraction": -0.1}, "validation_fraction must be"),
        ({"tokenizer": "gtp2"}, "none of gpt2, gpt2-digits, bytes and small"),
        ({"source": "nowhere"}, "no file or folder"),
        ({"out": source / "out"}, "lies inside the source"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**{"source": source, "out": tmp_path / "out", **changes})
    assert not (tmp_path / "out").exists()


def test_the_embedded_corpus_is_prepared_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TASK_BYTES", 64_000_000)
    prepared = run("embedded", tmp_path / "out")
    assert prepared.num_tokens > 5_000_000
    assert prepared.validation_documents > 0
    assert "embedded 3." in ShardSet.open(tmp_path / "out" / "train").details["parts"]


@pytest.mark.parametrize("name", ["a.bin", "a.bin.xz", "a.npy"])
def test_ready_tokens_become_the_documents_between_the_ends(tmp_path, monkeypatch, name):
    from ssmax_lab.data import token_files

    monkeypatch.setattr(token_files, "_PIECE", 6)
    documents = [[1, 2, 3], [4], list(range(20)), [7, 7]]
    end = load_tokenizer("bytes").vocabulary.end_of_document
    row = [token for document in documents for token in (*document, end)]
    (tmp_path / "tokens").mkdir()
    path = tmp_path / "tokens" / name
    tokens = np.array([end, *row, 9], "<u2")
    if name == "a.npy":
        np.save(path, tokens)
        np.save(tmp_path / "tokens" / "a.offsets.npy", np.array([0, 4]))
    else:
        path.write_bytes(lzma.compress(tokens.tobytes()) if ".xz" in name else tokens.tobytes())
    for source in (path, path.parent):
        out = tmp_path / f"out-{source.name}"
        prepared = run(f"tokens:{source}", out, validation_fraction=0)
        shards = ShardSet.open(out / "train")
        found = [shards.document(index).tolist() for index in range(shards.num_documents)]
        assert found == [*documents, [9]]
        assert prepared.reasons == {"empty": 1}


def test_tokens_that_cannot_be_these_are_refused_by_file(tmp_path):
    for name, content, message in (
        ("large.bin", np.array([5, 257], "<u2").tobytes(), "large.bin holds the token 257"),
        ("odd.bin", b"\0\0\0", "odd.bin cannot be read: it ends inside a token"),
        ("cut.bin.xz", lzma.compress(bytes(100))[:-9], "cut.bin.xz cannot be read"),
        ("not.npy", b"nothing", "not.npy is no array"),
        ("begun.bin", b"", "begun.bin has 0 bytes"),
        ("tokens.txt", b"", "holds no tokens; what is read: .bin and .npy"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            run(f"tokens:{tmp_path / name}", tmp_path / f"out-{name}")
    for name, array in (("flat.npy", np.zeros((2, 3), "<u2")), ("type.npy", np.zeros(3, "<i8"))):
        np.save(tmp_path / name, array)
        with pytest.raises(ValueError, match=f"{name} must hold one row"):
            run(f"tokens:{tmp_path / name}", tmp_path / f"out-{name}")
    np.save(tmp_path / "short.npy", np.zeros(9, "<u2"))
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-4])
    with pytest.raises(ValueError, match="promises 9 tokens and holds 7"):
        run(f"tokens:{tmp_path / 'short.npy'}", tmp_path / "out-short")
    with pytest.raises(ValueError, match="there is no file or folder"):
        run("tokens:nowhere", tmp_path / "out")
    parts = tmp_path / "parts"
    parts.mkdir()
    np.zeros(9, "<u2").tofile(parts / "0.bin")
    (parts / "1.bin.xz").touch()
    with pytest.raises(ValueError, match=r"1\.bin\.xz has 0 bytes, .* write it again"):
        run(f"tokens:{parts}", tmp_path / "out-parts")


@pytest.mark.parametrize("name", ["wide.bin", "wide.bin.xz"])
def test_tokens_of_32_bits_are_not_read_as_16(tmp_path, name):
    tokens = np.random.default_rng(0).integers(1, 50_256, 5_000)
    packed = lzma.compress if name.endswith(".xz") else bytes
    (tmp_path / name).write_bytes(packed(tokens.astype("<u4").tobytes()))
    with pytest.raises(ValueError, match=f"{name} looks like tokens of 32 bits.*save it as .npy"):
        run(f"tokens:{tmp_path / name}", tmp_path / "out", tokenizer="gpt2")
    for name, dtype in (("narrow.bin", "<u2"), ("wide.npy", "<u4")):
        if name.endswith(".npy"):
            np.save(tmp_path / name, tokens.astype(dtype))
        else:
            (tmp_path / name).write_bytes(tokens.astype(dtype).tobytes())
        prepared = run(f"tokens:{tmp_path / name}", tmp_path / f"out-{name}", tokenizer="gpt2")
        assert prepared.num_tokens == 5_001


def test_a_few_tokens_do_not_tell_their_width(tmp_path):
    (tmp_path / "few.bin").write_bytes(np.array([5, 0] * 31, "<u2").tobytes())
    assert run(f"tokens:{tmp_path / 'few.bin'}", tmp_path / "out").num_tokens == 63


def test_the_tokenizer_json_is_kept_beside_its_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, "[UNK]")
    )
    made.save(str(tmp_path / "mine.json"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    prepare(str(tmp_path / "texts"), tmp_path / "out", tokenizer=str(tmp_path / "mine.json"))
    kept = load_tokenizer(str(tmp_path / "out"))
    assert kept.vocabulary.hash == ShardSet.open(tmp_path / "out" / "train").vocabulary.hash


def test_token_files_of_gpt2_are_prepared_digit_by_digit_on_the_same_sides(tmp_path):
    gpt2, digits = load_tokenizer("gpt2"), load_tokenizer("gpt2-digits")
    texts = [f"Number {number} of 1234567." for number in range(40)]
    ready = [token for text in texts for token in [*gpt2.encode(text), 50_256]]
    with lzma.open(tmp_path / "ready.bin.xz", "wb") as file:
        file.write(np.array(ready, "<u2").tobytes())
    sides = {}
    for name, tokenizer in (("gpt2", gpt2), ("gpt2-digits", digits)):
        out = tmp_path / name
        prepare(f"tokens:{tmp_path / 'ready.bin.xz'}", out, tokenizer=name, workers=1,
                validation_fraction=0.3)  # fmt: skip
        for side in ("train", "validation"):
            shards = ShardSet.open(out / side)
            assert shards.vocabulary == tokenizer.vocabulary
            text = tokenizer.decode(shards.slice(0, shards.num_tokens).tolist())
            sides.setdefault(side, []).append(text)
    for with_gpt2, with_digits in sides.values():
        assert with_gpt2 == with_digits


def test_the_text_to_measure_on_is_one_that_no_run_has_seen(tmp_path):
    for side in ("both/train", "both/validation", "seen/train", "side"):
        (tmp_path / side).mkdir(parents=True)
        (tmp_path / side / "index.json").write_text("{}")
    for is_for_tests in (False, True):
        for folder, side in (("both", "both/validation"), ("side", "side")):
            found = text_to_measure(tmp_path / folder, is_for_tests=is_for_tests)
            assert found == tmp_path / side
        with pytest.raises(ValueError, match="no prepared tokens in .*nowhere"):
            text_to_measure(tmp_path / "nowhere", is_for_tests=is_for_tests)
    assert text_to_measure(tmp_path / "seen", is_for_tests=True) == tmp_path / "seen" / "train"
    with pytest.raises(ValueError, match="has no validation side"):
        text_to_measure(tmp_path / "seen", is_for_tests=False)
