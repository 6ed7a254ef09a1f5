"""Before and after an extension, from the command line."""

import json
import re

import pytest
import torch
import transformers

import ssmax.hf
from ssmax_lab import cli
from ssmax_lab.data.haystack import ADDRESSES
from ssmax_lab.data.sources import open_source
from ssmax_lab.model.hf_causal_lm import HFCausalLM
from ssmax_lab.records import NeedleTrial, PositionLoss, Provenance, read_jsonl
from ssmax_lab.report.before_after import extension_verdict

SMALL = ["--tokenizer", "bytes", "--documents", "2", "--trials", "2", "--digits", "2"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A model that was trained to 288 tokens, and the same for 576."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, eos_token_id=256, max_position_embeddings=288,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained("before")
    ssmax.hf.extend(model, 576, sharpen="clamp")
    model.save_pretrained("after")
    ssmax.hf.save(model, "adapter")
    (tmp_path / "text.txt").write_text("A quiet sentence about nothing. And another one.\n" * 200)
    return tmp_path


@pytest.mark.parametrize("models", ["--hf before after", "--hf before --adapter adapter"])
def test_before_and_after_stand_side_by_side(home, capsys, models):
    assert cli.run(["evaluate", *models.split(), "--text", "text.txt", *SMALL]) == 0
    out, err = capsys.readouterr()
    for shown in ("positions 512 to 576", "context 576", "Inside 288 tokens", "orth having"):
        assert shown in out
    assert "document 2/2" in err and "cell 6/6" in err
    losses = read_jsonl(home / "results/position_loss.jsonl", PositionLoss)
    line = next(line for line in out.splitlines() if "positions 512 to 576" in line)
    shown = [float(x) for x in re.findall(r"(?<= )\d\.\d{4}", line)]
    assert shown == [round(sum(d[-1] for d in one.binned) / 2, 4) for one in losses]
    assert {one.length for one in read_jsonl(home / "results/needle.jsonl", NeedleTrial)} == {
        144, 288, 576
    }  # fmt: skip


def test_the_same_command_measures_no_needle_twice(home, capsys, monkeypatch):
    command = ["evaluate", "--hf", "before", "after", "--text", "text.txt", *SMALL, "--json"]
    assert cli.run(command) == 0
    first = capsys.readouterr().out
    told = [json.loads(line) for line in first.splitlines()]
    assert sum("run" in each for each in told) == 2 * (1 + 6)
    before = read_jsonl(home / "results/needle.jsonl", NeedleTrial)
    monkeypatch.setattr(HFCausalLM, "generate", lambda *_: pytest.fail("measured again"))
    assert cli.run(command) == 0
    assert read_jsonl(home / "results/needle.jsonl", NeedleTrial) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hf before", "compares two models"),
        ("--hf before after --length 100", "not longer than the 288"),
        ("--hf before after --text none.txt", "no text"),
        ("needle --hf before --text text.txt --data data", "two texts"),
        ("needle tiny-a --text text.txt", "goes with --hf"),
        ("--hf before after --depths 2", "--depths is not an option of extension"),
        ("", "give WHAT to measure"),
    ],
)
def test_what_cannot_be_compared_says_so(home, capsys, arguments, message):
    assert cli.run(["evaluate", *arguments.split(), "--tokenizer", "bytes"]) == 2
    assert message in capsys.readouterr().err


def test_the_text_that_comes_along_is_long_and_plain():
    (part,) = open_source(str(ADDRESSES))
    texts = [document.text for document in part.read()]
    assert len(texts) == 4 and all(len(text.split()) > 25_000 for text in texts)


def loss(run, *values):
    return PositionLoss(
        run=run, mean=[0.0], count=1, edges=[0, 64, 128, 256], binned=[list(values)],
        provenance=Provenance.here(config={}, device="cpu", seed=0),
    )  # fmt: skip


def needles(run, share):
    return [
        NeedleTrial(
            run=run, length=256, depth=0.5, trial=trial, city="Rome", number="1", said="",
            is_whole=trial < 10 * share, first_digit=False, digits_right=0,
            provenance=Provenance.here(config={}, device="cpu", seed=0),
        )
        for trial in range(10)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("after", "share", "inside", "said"),
    [
        ((4.0, 3.5, 3.3), 0.0, "nothing is lost", "Worth having: "),
        ((4.0, 3.5, 3.6), 0.9, "nothing is lost", "Worth having to find"),
        ((4.03, 3.53, 3.6), 0.1, "you lose 0.03 nats", "Not worth having"),
        ((3.9, 3.4, 3.6), 0.1, "you gain 0.10 nats", "Not worth having"),
    ],
)
def test_the_sentence_follows_from_the_numbers(after, share, inside, said):
    """A text that is cut to the trained length has the loss of its last octave."""
    first, _, last = extension_verdict(
        [loss("one", 4.0, 3.5, 6.0), *needles("one", 0.0)],
        [loss("two", *after), *needles("two", share)],
        train_length=128,
    )
    assert inside in first and last.startswith(said)
