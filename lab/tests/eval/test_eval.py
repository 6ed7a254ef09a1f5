"""Measures have known answers for models that are known: one that knows, one that sees evenly."""

import dataclasses
import json
import math
import random
import re

import numpy as np
import pytest
import torch

from ssmax_lab.data.haystack import (
    PAPERS_NEEDLE,
    Needle,
    count_matching_digits,
    hide,
    is_exact_match,
    random_needle,
)
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.eval.position_loss import bin_edges, measure_position_loss
from ssmax_lab.eval.retrieval import accuracy, measure_needle_scores, measure_retrieval, top_heads
from ssmax_lab.eval.sharpness import measure_sharpness
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.records import NeedleTrial, Provenance, read_jsonl

BYTES = load_tokenizer("bytes")
TEXT = BYTES.encode("It was a dark and stormy night. The rain fell in torrents. " * 200)
HERE = Provenance(
    commit="test", config_hash="0", versions={}, device="cpu", seed=0, date="2026-11-15"
)
PAPER = Needle(city=PAPERS_NEEDLE[0], number=PAPERS_NEEDLE[1])


class Stand:
    """A model of so many layers and heads that sees every key evenly and knows what it is told."""

    layers, heads = 2, 3

    def __init__(self, answer=None):
        self.answer, self.asked = answer, 0

    def losses(self, tokens_BT):
        return torch.arange(tokens_BT.shape[1] - 1).expand(len(tokens_BT), -1).float()

    def attention_rows(self, tokens_BT, rows):
        for _ in range(self.layers):
            weights = torch.zeros(len(tokens_BT), self.heads, len(rows), tokens_BT.shape[1])
            for index, row in enumerate(rows):
                weights[:, :, index, : row + 1] = 1 / (row + 1)
            yield weights

    def generate(self, prompts, max_new_tokens):
        self.asked += len(prompts)
        return [
            BYTES.encode(self.answer(BYTES.decode(prompt)))[:max_new_tokens] for prompt in prompts
        ]


def knows(prompt):
    (city,) = re.findall(r"What is the special magic (\w+) number", prompt)
    (number,) = re.findall(rf"The special magic {city} number is: (\d+)\.", prompt)
    return f" {number}."


def test_the_papers_needle_lies_where_it_is_said_to_lie():
    for depth in (0.0, 0.5, 1.0):
        stack = hide(PAPER, TEXT, length=600, depth=depth, encode=BYTES.encode)
        assert len(stack.tokens) == 600
        assert BYTES.decode(stack.tokens[slice(*stack.number)]) == " 8106422"
        sentence = BYTES.decode(stack.tokens[slice(*stack.sentence)])
        assert sentence == " The special magic Tokyo number is: 8106422."
        prompt = BYTES.decode(stack.tokens)
        assert prompt.endswith("Question: What is the special magic Tokyo number?\nAnswer:")
        assert stack.answer == BYTES.encode(" 8106422")
    assert stack.sentence[1] < 600 - len("What is the special magic Tokyo number?")


def test_the_needle_stands_between_sentences():
    ends = BYTES.sentence_ends
    for depth in (0.1, 0.33, 0.9):
        stack = hide(PAPER, TEXT, length=700, depth=depth, encode=BYTES.encode, breaks=ends)
        before = BYTES.decode(stack.tokens[: stack.sentence[0]])
        assert before.endswith("night.") or before.endswith("torrents.")
        assert abs(stack.sentence[0] - depth * 600) < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1.5}, "depth must be from 0 to 1, got 1.5"),
        ({"depth": -0.1}, "depth must be from 0 to 1"),
        ({"length": 20}, "a context of 20 tokens is too short"),
        ({"text": TEXT[:10]}, "the haystack has 10 tokens, a context of 600 needs"),
        ({"text": []}, "the haystack has 0 tokens"),
    ],
)
def test_bad_haystacks_are_refused(options, message):
    arguments = {"text": TEXT, "length": 600, "depth": 0.5, "encode": BYTES.encode, **options}
    with pytest.raises(ValueError, match=message):
        hide(PAPER, **arguments)


@pytest.mark.parametrize(
    ("said", "whole", "digits"),
    [
        (" 8106422", True, 7),
        ("8106422. And", True, 7),
        (" 81064223", False, 7),
        (" 8106423", False, 6),
        (" 8", False, 1),
        ("", False, 0),
        (" The number 8106422", False, 0),
        (" 9106422", False, 6),
    ],
)
def test_what_counts_as_found(said, whole, digits):
    assert is_exact_match(said, "8106422") == whole
    assert count_matching_digits(said, "8106422") == digits


def grid(subject, out, **options):
    arguments = {"lengths": [300, 500], "depths": [0.0, 0.5, 1.0], "trials": 3, **options}
    return measure_retrieval(
        subject, BYTES, TEXT, run="r", seed=0, out=out, provenance=HERE, **arguments
    )


def test_one_who_knows_finds_all_and_one_who_guesses_none(tmp_path):
    found = grid(Stand(knows), tmp_path / "a.jsonl")
    assert accuracy(found) == 1.0
    assert all(trial.first_digit and trial.digits_right == 7 for trial in found)
    missed = grid(Stand(lambda _: " none"), tmp_path / "b.jsonl")
    assert accuracy(missed) == 0.0
    assert [trial.number for trial in missed] == [trial.number for trial in found]
    first = grid(Stand(lambda prompt: knows(prompt)[:2] + "x"), tmp_path / "c.jsonl")
    assert accuracy(first) == 0.0 and all(trial.first_digit for trial in first)


def test_a_stopped_grid_goes_on_where_it_was(tmp_path):
    whole = grid(Stand(knows), tmp_path / "whole.jsonl")
    out = tmp_path / "cut.jsonl"
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    # Two cells, each behind its provenance, a third without its last trial, and half a line.
    out.write_text("".join(lines[:11]) + lines[11][:40])
    subject = Stand(knows)
    assert grid(subject, out) == whole
    assert subject.asked == 3 * 4
    assert grid(again := Stand(knows), out) == whole and again.asked == 0
    assert len(read_jsonl(out, NeedleTrial)) == 18


def test_another_configuration_is_another_measurement(tmp_path):
    grid(Stand(knows), tmp_path / "a.jsonl")
    other = dataclasses.replace(HERE, config_hash="1")
    subject = Stand(knows)
    found = measure_retrieval(
        subject, BYTES, TEXT, run="r", lengths=[300], depths=[0.5], trials=3, seed=1,
        out=tmp_path / "a.jsonl", provenance=other,
    )  # fmt: skip
    assert subject.asked == 3 and len(found) == 3
    assert len(read_jsonl(tmp_path / "a.jsonl", NeedleTrial)) == 21


def test_runs_share_a_file_without_sharing_cells(tmp_path):
    grid(Stand(knows), tmp_path / "a.jsonl")
    measure_retrieval(
        Stand(lambda _: " 0"), BYTES, TEXT, run="other", lengths=[300], depths=[0.5], trials=2,
        seed=0, out=tmp_path / "a.jsonl", provenance=HERE,
    )  # fmt: skip
    assert len(read_jsonl(tmp_path / "a.jsonl", NeedleTrial)) == 20
    assert accuracy(grid(Stand(lambda _: " 0"), tmp_path / "a.jsonl")) == 1.0


def test_an_empty_grid_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a grid needs lengths, depths and trials, got 0, 3, 3"):
        grid(Stand(knows), tmp_path / "a.jsonl", lengths=[])
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        grid(Stand(knows), tmp_path / "a.jsonl", batch=0)
    (tmp_path / "b.jsonl").write_text('{"run": 1}\n')
    with pytest.raises(ValueError, match=r"b.jsonl:1 is no NeedleTrial"):
        grid(Stand(knows), tmp_path / "b.jsonl")


def test_even_attention_scores_the_share_of_the_span():
    scores = measure_needle_scores(
        Stand(knows), BYTES, TEXT, run="r", length=400, trials=4, seed=0, provenance=HERE
    )
    assert len({score.depth for score in scores}) == 4
    for score in scores:
        assert score.is_whole
        assert np.array(score.number_scores) == pytest.approx(8 / 400)
        assert np.array(score.number_scores).shape == (2, 3)
    (fixed,) = measure_needle_scores(
        Stand(knows), BYTES, TEXT, run="r", length=400, trials=1, seed=0, depth=0.5, provenance=HERE
    )
    assert fixed.depth == 0.5


def test_trials_are_scored_together_as_they_are_alone(model):
    def scored(batch):
        return measure_needle_scores(
            model, BYTES, TEXT, run="r", length=200, trials=5, seed=3, provenance=HERE, batch=batch
        )

    alone, together = scored(1), scored(3)
    for one, other in zip(alone, together, strict=True):
        assert (one.trial, one.depth, one.number) == (other.trial, other.depth, other.number)
        assert one.said == other.said
        assert np.array(one.number_scores) == pytest.approx(
            np.array(other.number_scores), rel=1e-4, abs=1e-7
        )
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        scored(0)


def test_the_top_heads_are_the_largest():
    assert top_heads([[0.1, 0.9], [0.5, 0.2]], 3) == [(0, 1, 0.9), (1, 0, 0.5), (1, 1, 0.2)]


def test_loss_by_position():
    record = measure_position_loss(
        Stand(), np.zeros((5, 301), np.uint16), run="r", provenance=HERE, batch=2
    )
    assert record.mean == [float(i) for i in range(300)]
    assert record.count == 5
    assert bin_edges(300) == [0, 64, 128, 256, 300]
    assert record.binned[0] == [31.5, 95.5, 191.5, 277.5]
    assert record.edges == bin_edges(300)
    for shape in ((5,), (0, 5), (3, 1)):
        with pytest.raises(ValueError, match="rows of at least 2 tokens"):
            measure_position_loss(Stand(), np.zeros(shape), run="r", provenance=HERE)


def test_even_attention_fades_as_one_over_n():
    record = measure_sharpness(Stand(), np.zeros((2, 100)), run="r", provenance=HERE)
    assert record.num_keys == [1, 2, 4, 8, 16, 32, 64, 100]
    for layer in range(2):
        for head in range(3):
            assert record.largest[layer][head] == pytest.approx([1 / n for n in record.num_keys])
            assert record.entropy[layer][head] == pytest.approx(
                [math.log(n) for n in record.num_keys], abs=1e-6
            )
    with pytest.raises(ValueError, match="num_keys must be from 1 to the documents' 100 tokens"):
        measure_sharpness(Stand(), np.zeros((2, 100)), run="r", provenance=HERE, num_keys=[101])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LM(
        LMConfig(
            num_layers=2, num_heads=2, hidden_size=32, intermediate_size=64, vocab_size=257,
            rule="ssmax", train_length=64,
        )
    ).eval()  # fmt: skip


def test_the_papers_model_answers_the_three_questions(model, tmp_path):
    tokens = torch.randint(0, 256, (3, 200))
    record = measure_position_loss(model, tokens, run="r", provenance=HERE, batch=2)
    logits = model(tokens[:, :-1])
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    torch.testing.assert_close(
        torch.tensor(record.mean), expected.mean(0).float(), rtol=1e-4, atol=1e-4
    )
    (score,) = measure_needle_scores(
        model, BYTES, TEXT, run="r", length=200, trials=1, seed=0, provenance=HERE
    )
    assert all(0 <= value <= 1 for row in score.number_scores for value in row)
    assert len(grid(model, tmp_path / "a.jsonl", lengths=[200], trials=2)) == 6
    sharpness = measure_sharpness(model, tokens, run="r", provenance=HERE, num_keys=[1, 50, 200])
    assert [row[0] for row in sharpness.largest[0]] == pytest.approx([1.0, 1.0])


def test_no_measure_makes_a_matrix_of_tokens_by_tokens(model):
    from ssmax.testing.watch import LargestTensor

    length = 1500
    with LargestTensor() as watch:
        measure_position_loss(model, np.zeros((1, length + 1)), run="r", provenance=HERE)
        measure_needle_scores(
            model, BYTES, TEXT, run="r", length=length, trials=1, seed=0, provenance=HERE
        )
    assert watch.elements < length * length


def test_records_survive_their_file(tmp_path):
    grid(Stand(knows), tmp_path / "a.jsonl", trials=1)
    first = read_jsonl(tmp_path / "a.jsonl", NeedleTrial)[0]
    assert first.provenance == HERE
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[1])["run"] == "r"


def test_needles_are_numbers_of_their_length():
    chance = random.Random(0)
    needles = [random_needle(chance, digits=4) for _ in range(300)]
    assert all(re.fullmatch(r"[1-9]\d{3}", needle.number) for needle in needles)
    assert len({needle.city for needle in needles}) == 20
    with pytest.raises(ValueError, match="digits must be at least 1, got 0"):
        random_needle(chance, digits=0)
