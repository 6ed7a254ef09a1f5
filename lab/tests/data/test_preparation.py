"""Preparation: the same files however it was run, interrupted or divided among workers."""

import hashlib
import json
import lzma
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ssmax._files import locked
from ssmax.errors import MachineError, UsageError
from ssmax_lab.data import preparation as module
from ssmax_lab.data.preparation import prepare, text_to_measure
from ssmax_lab.data.shards import ShardSet, read_index
from ssmax_lab.data.sources import Document, Part
from ssmax_lab.data.tokenizer import load_tokenizer


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


def test_every_document_is_on_one_side_and_every_other_thing_is_listed(tmp_path, caplog):
    source = write_texts(tmp_path / "texts")
    with caplog.at_level("INFO", logger="ssmax_lab"):
        sides = run(source, tmp_path / "out", validation_fraction=0.2)
    train, validation = (texts_of(tmp_path / "out" / side) for side in ("train", "validation"))
    expected = [path.read_text() for path in sorted(source.glob("*.txt"))] + ["good"]
    assert sorted(train + validation) == sorted(expected)
    # Each side keeps the order of the source.
    assert [text for text in expected if text in set(train)] == train
    assert 0 < len(validation) < len(train)
    for side, texts in (("train", train), ("validation", validation)):
        assert sides[side].num_documents == len(texts)
        assert sides[side].num_tokens == sum(len(text) + 1 for text in texts)
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "out/tasks").iterdir())]
    skipped = [pair for record in records for pair in record["skipped"]]
    assert skipped == [
        ["bad.jsonl:2", "not a string"],
        ["bad.jsonl:3", "not JSON"],
        ["image.png", "not a kind of file that is read"],
    ]
    assert sides["train"].details["skipped"] == {reason: 1 for _, reason in skipped}
    total = len(records)
    assert caplog.messages == [f"part {done}/{total}" for done in range(total + 1)]


def test_small_files_share_a_shard_and_large_ones_do_not(tmp_path):
    (tmp_path / "texts").mkdir()
    for name, size in {"a": 900, "b": 900, "c": 5_000, "d": 10, "e": 10}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text("x" * size)
    run(tmp_path / "texts", tmp_path / "out", validation_fraction=0)
    _, shards, _ = read_index(tmp_path / "out" / "train")
    assert [shard.num_documents for shard in shards] == [2, 1, 2]


def test_the_number_of_workers_changes_nothing(tmp_path):
    source = write_texts(tmp_path / "texts", 12)
    run(source, tmp_path / "one", validation_fraction=0.1)
    run(source, tmp_path / "three", validation_fraction=0.1, workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert len(list((tmp_path / "one" / "train").glob("*.shard"))) > 1


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
def test_no_side_is_empty_if_there_are_two_texts(tmp_path, monkeypatch, fraction):
    monkeypatch.setattr(module, "TASK_BYTES", 64_000_000)
    source = write_texts(tmp_path / "texts", 12)
    sides = run(source, tmp_path / "out", validation_fraction=fraction)
    assert sorted(side.num_documents for side in sides.values()) == [1, 12]
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
    sides = run(tmp_path / "texts", tmp_path / "out", validation_fraction=fraction)
    assert {side: shards.num_documents for side, shards in sides.items()} == {"train": copies}
    assert not (tmp_path / "out" / "validation").exists()


@pytest.mark.parametrize(("copies", "held_out"), [(1, 1), (2, 0)])
def test_the_rule_of_two_sides_holds_out_no_text_that_is_most_of_all(
    tmp_path, monkeypatch, copies, held_out
):
    monkeypatch.setattr(module, "TASK_BYTES", 10_000)
    (tmp_path / "texts").mkdir()
    other = "o" * 900
    key = hashlib.sha256(other.encode()).digest()
    texts = (f"{number:03}" + "x" * 697 for number in range(999))
    moved = next(text for text in texts if hashlib.sha256(text.encode()).digest() < key)
    (tmp_path / "texts" / "other.txt").write_text(other)
    for number in range(copies):
        (tmp_path / "texts" / f"{number}.txt").write_text(moved)
    sides = run(tmp_path / "texts", tmp_path / "out", validation_fraction=1e-12)
    assert sides["train"].num_documents == copies + 1 - held_out
    assert ("validation" in sides) == bool(held_out)
    before = contents(tmp_path / "out")
    run(tmp_path / "texts", tmp_path / "out", validation_fraction=1e-12)
    assert contents(tmp_path / "out") == before


KILLED = """
import sys
from pathlib import Path
from ssmax_lab.data import preparation as module
module.TASK_BYTES = 2_000
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

    def watched(task, *arguments, **options):
        done.add(task)
        return original(task, *arguments, **options)

    monkeypatch.setattr(module, "run_task", watched)
    run(source, out, validation_fraction=fraction)
    assert done == set()
    (out / "train" / "000001.shard").unlink()
    damaged = out / "train" / "000002.shard"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (out / "tasks" / "000003.json").write_text("{")
    run(source, out, validation_fraction=fraction)
    assert done == {f"{number:06}" for number in (1, 2, 3)}
    assert contents(out) == whole


@pytest.fixture
def run_until(monkeypatch):
    """Prepare and stop when so many parts are finished, or so many are left."""

    def run_until(number, *arguments):
        def stop(logger, what, done, total):
            if done == number % total:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(module, "log_progress", stop)
            with pytest.raises(KeyboardInterrupt):
                run(*arguments)

    return run_until


def test_an_unfinished_folder_has_no_index(tmp_path, run_until):
    source, out = write_texts(tmp_path / "texts"), tmp_path / "out"
    run_until(3, source, out)
    with pytest.raises(UsageError, match="not finished"):
        ShardSet.open(out / "train")
    run(source, out)
    (out / "train" / "000000.shard").unlink()
    (out / "train" / "000005.shard").unlink()
    run_until(-1, source, out)
    with pytest.raises(UsageError, match="not finished"):
        ShardSet.open(out / "train")


def test_an_unfinished_preparation_of_another_source_is_in_nobodys_way(tmp_path, run_until):
    first, second = write_texts(tmp_path / "a", 80), write_texts(tmp_path / "b", 9, seed=1)
    run(second, tmp_path / "alone")
    run_until(-2, first, tmp_path / "out")
    run(second, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


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
        with pytest.raises(UsageError, match=message):
            run(**{"source": source, "out": out, **changes})
    (source / "new.txt").write_text("new")
    with pytest.raises(UsageError, match="parts was '42 from .*' and is '43 from"):
        run(source, out)
    assert contents(out) == before


@pytest.mark.parametrize("prefix", ["", "tokens:"])
def test_a_source_is_the_same_with_whatever_slashes_it_is_typed(tmp_path, monkeypatch, prefix):
    write_texts(tmp_path / "embedded", 12)
    np.save(tmp_path / "embedded" / "ready.npy", np.arange(97, 123, dtype=np.uint16))
    monkeypatch.chdir(tmp_path)
    run(prefix + ".//embedded/.", "out")
    before = contents(tmp_path / "out")
    for again in ("./embedded", "./embedded/", "embedded/./"):
        run(prefix + again, "out")
        assert contents(tmp_path / "out") == before
    # The word is not the folder that is called so.
    for other in ("./embedded" if prefix else "tokens:embedded", "embedded"):
        with pytest.raises(UsageError, match="holds another preparation"):
            run(other, "out")


def test_a_second_process_is_kept_out_while_the_first_one_lives(tmp_path):
    source, out = write_texts(tmp_path / "texts", 3), tmp_path / "out"
    out.mkdir()
    with locked(out), pytest.raises(UsageError, match="in use by another process"):
        run(source, out)
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
        assert last.startswith(f"ssmax.errors.MachineError: {out} cannot be written: [Errno 27]")
        assert len(list((out / "tasks").glob("*.json"))) >= 5
        assert not list(out.glob("*/*.partial"))
    run(source, out)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="file/out must be a folder, but .*file is a file"):
        run("embedded", tmp_path / "file" / "out")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_stops_is_not_taken_for_a_folder_that_cannot_be_written(
    tmp_path, monkeypatch, workers
):
    parts = [Part(name=f"hf:x#{number}", size=None, read=stopping) for number in range(3)]
    monkeypatch.setattr(module, "open_source", lambda *_, **__: parts)
    with pytest.raises(MachineError, match="^gone$"):
        run("hf:x", tmp_path / "out", workers=workers)


def stopping():
    yield Document("first", "text")
    raise MachineError("gone")


def test_a_source_without_documents_is_refused_and_says_why(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" ")
    with pytest.raises(UsageError, match="holds no documents to train on: skipped 1 as 'empty'"):
        run(tmp_path / "texts", tmp_path / "out")
    # What is mended may be prepared into the same folder.
    (tmp_path / "texts" / "a.txt").write_text("bottles of beer")
    assert run(tmp_path / "texts", tmp_path / "out")["train"].num_documents == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_refused_half_way_may_be_mended(tmp_path, workers):
    out, tokens = tmp_path / "out", tmp_path / "tokens"
    tokens.mkdir()
    for number in range(3):
        np.arange(2_000, dtype=np.uint16).astype("<u2").tofile(tokens / f"{number}.bin")
    np.full(2_000, 97, "<u2").tofile(tokens / "0.bin")
    for number in range(1, 3):
        with pytest.raises(UsageError, match=f"[{number}2].bin cannot be read as tokens"):
            run(f"tokens:{tokens}", out, workers=workers, validation_fraction=0)
        np.full(1_000 * number, 98, "<u2").tofile(tokens / f"{number}.bin")
    prepared = run(f"tokens:{tokens}", out, validation_fraction=0)
    assert prepared["train"].num_tokens == 5_003
    run(f"tokens:{tokens}", tmp_path / "fresh", validation_fraction=0)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_text_without_tokens_is_skipped(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
    made.save(str(tmp_path / "mine.json"))
    (tmp_path / "texts").mkdir()
    for name, text in {"a": "aaa", "b": "bbb", "c": "ab"}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    options = {"tokenizer": str(tmp_path / "mine.json"), "validation_fraction": 0}
    train = run(tmp_path / "texts", tmp_path / "out", **options)["train"]
    assert (train.num_documents, train.details["skipped"]) == (2, {"no tokens": 1})


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
        with pytest.raises(UsageError, match=message):
            run(**{"source": source, "out": tmp_path / "out", **changes})
    assert not (tmp_path / "out").exists()


def test_the_embedded_corpus_is_prepared_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TASK_BYTES", 64_000_000)
    sides = run("embedded", tmp_path / "out")
    assert sides["train"].num_tokens > 5_000_000
    assert sides["validation"].num_documents > 0
    assert "embedded 3." in sides["train"].details["parts"]


@pytest.mark.parametrize("name", ["a.bin", "a.bin.xz", "a.npy"])
def test_ready_tokens_become_the_documents_between_the_ends(tmp_path, monkeypatch, name):
    from ssmax_lab.data import sources

    monkeypatch.setattr(sources, "_PIECE", 6)
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
        shards = run(f"tokens:{source}", out, validation_fraction=0)["train"]
        found = [shards.document(index).tolist() for index in range(shards.num_documents)]
        assert found == [*documents, [9]]
        assert shards.details["skipped"]["empty"] == 1


def test_tokens_that_cannot_be_these_are_refused_by_file(tmp_path):
    for name, content, message in (
        ("large.bin", np.array([5, 257], "<u2").tobytes(), "it holds the token 257"),
        ("odd.bin", b"\0\0\0", "multiple of element size"),
        ("cut.bin.xz", lzma.compress(bytes(100))[:-9], "end-of-stream"),
        ("not.npy", b"nothing", "magic"),
        ("begun.bin", b"", "after 0 tokens"),
        ("begun.bin.xz", b"", "end-of-stream"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"{name} cannot be read as tokens: .*{message}"):
            run(f"tokens:{tmp_path / name}", tmp_path / f"out-{name}")
    for name, array in (("flat.npy", np.zeros((2, 3), "<u2")), ("type.npy", np.zeros(3, "<i8"))):
        np.save(tmp_path / name, array)
        with pytest.raises(UsageError, match=f"{name} .* must hold one row"):
            run(f"tokens:{tmp_path / name}", tmp_path / f"out-{name}")
    np.save(tmp_path / "short.npy", np.zeros(9, "<u2"))
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-4])
    with pytest.raises(UsageError, match="after 7 tokens"):
        run(f"tokens:{tmp_path / 'short.npy'}", tmp_path / "out-short")
    with pytest.raises(UsageError, match="there is no file or folder"):
        run("tokens:nowhere", tmp_path / "out")
    (tmp_path / "tokens.txt").touch()
    with pytest.raises(UsageError, match="holds nothing to read"):
        run(f"tokens:{tmp_path / 'tokens.txt'}", tmp_path / "out")


@pytest.mark.parametrize("name", ["wide.bin", "wide.bin.xz"])
def test_tokens_of_32_bits_are_not_read_as_16(tmp_path, name):
    tokens = np.random.default_rng(0).integers(1, 50_256, 5_000)
    packed = lzma.compress if name.endswith(".xz") else bytes
    (tmp_path / name).write_bytes(packed(tokens.astype("<u4").tobytes()))
    with pytest.raises(UsageError, match=f"{name} .*tokens of 32 bits"):
        run(f"tokens:{tmp_path / name}", tmp_path / "out", tokenizer="gpt2")
    for name, dtype in (("narrow.bin", "<u2"), ("wide.npy", "<u4")):
        if name.endswith(".npy"):
            np.save(tmp_path / name, tokens.astype(dtype))
        else:
            (tmp_path / name).write_bytes(tokens.astype(dtype).tobytes())
        sides = run(f"tokens:{tmp_path / name}", tmp_path / f"out-{name}", tokenizer="gpt2")
        assert sides["train"].num_tokens == 5_001
    # A few tokens do not tell their width.
    (tmp_path / "few.bin").write_bytes(np.array([5, 0] * 31, "<u2").tobytes())
    assert run(f"tokens:{tmp_path / 'few.bin'}", tmp_path / "few")["train"].num_tokens == 63


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
        with pytest.raises(UsageError, match="no prepared tokens in .*nowhere"):
            text_to_measure(tmp_path / "nowhere", is_for_tests=is_for_tests)
    assert text_to_measure(tmp_path / "seen", is_for_tests=True) == tmp_path / "seen" / "train"
    with pytest.raises(UsageError, match="has no validation side"):
        text_to_measure(tmp_path / "seen", is_for_tests=False)
