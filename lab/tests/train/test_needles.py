"""Documents that hide a number, mixed into pretraining."""

import numpy as np
import pytest
import torch

from ssmax_lab.data.haystack import CITIES, NeedleDocuments
from ssmax_lab.data.qa import IGNORE
from ssmax_lab.data.shards import ShardSet
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.model import LM
from ssmax_lab.records import read_metrics
from ssmax_lab.train.dist import single_process
from ssmax_lab.train.pretraining import Windows, WithNeedles, pretrain
from ssmax_lab.train.step import Loss, accumulate_gradients, make_optimizer

CPU = single_process(torch.device("cpu"))
NEEDLES = {"data__needle_length": 128, "data__needles_per_row": 3, "model__train_length": 256}


@pytest.fixture
def documents():
    tokenizer = load_tokenizer("bytes")
    text = np.frombuffer(b"It was late. Nobody came, and the rain went on. " * 50, np.uint8)

    def make(length: int = 128, seed: int = 0) -> NeedleDocuments:
        return NeedleDocuments(text, length=length, digits=4, seed=seed, tokenizer=tokenizer)

    return make


def test_a_document_hides_one_number_asks_for_it_and_answers(documents):
    tokens, answers, places = documents().batch(0, 50)
    assert tokens.shape == (50, 136) and answers.shape == places.shape == (50, 6)
    decode = load_tokenizer("bytes").decode
    for row, answer, place in zip(tokens, answers, places, strict=True):
        text, number = decode(row[: place[0] + 1]), decode(answer[:-1])
        (city,) = (name for name in CITIES if f"magic {name} number is:{number}." in text)
        assert text.endswith(f"What is the special magic {city} number?\nAnswer:")
        assert text.count(number) == 1
        # What predicts a digit has read those before it, and what is behind is padding.
        np.testing.assert_array_equal(row[place[1:]], answer[:-1])
        assert answer[-1] == 256 and set(row[place[-1] + 1 :].tolist()) <= {256}


def test_documents_differ_in_length_up_to_what_is_asked_for(documents):
    _, _, places = documents().batch(0, 400)
    starts = places[:, 0] + 1
    assert starts.min() <= 103 and starts.max() == 128
    assert len(set(starts.tolist())) > 20


def test_a_document_depends_on_its_seed_and_number_alone(documents):
    tokens = documents().batch(0, 40)[0]
    np.testing.assert_array_equal(documents().batch(7, 5)[0], tokens[7:12])
    assert not (documents(seed=1).batch(0, 40)[0] == tokens).all(axis=1).any()
    assert len({row.tobytes() for row in tokens}) == 40


def test_a_document_too_short_for_its_needle_is_refused(documents):
    with pytest.raises(ValueError, match=r"data\.needle_length=100"):
        documents(100)


@pytest.fixture
def mixed(small, tokens):
    config = small("b", **NEEDLES)
    text = Windows(ShardSet.open(tokens / "train"), length=256, seed=0)
    return config, text, WithNeedles(text, config.data, load_tokenizer("bytes"))


def test_the_numbers_of_a_step_weigh_as_much_as_its_text(mixed):
    config, text, samples = mixed
    loss = Loss(LM(config.model).double())
    batches = samples.batches(0, 4)
    assert [tuple(batch.inputs_BT.shape) for batch in batches] == [(4, 256), (12, 136)]
    weighted = accumulate_gradients(loss, batches, CPU, "float32")
    means = [
        loss(one.inputs_BT, one.targets_BT, None, one.places_BT) / one.targets_BT.numel()
        for one in batches
    ]
    assert weighted.item() == pytest.approx(sum(means).item() / 2)
    assert (batches[0].targets_BT != IGNORE).all()
    (plain,) = text.batches(0, 4)
    assert torch.equal(plain.inputs_BT, batches[0].inputs_BT)


def test_the_loss_of_a_number_is_that_of_its_digits_alone(mixed):
    config, _, samples = mixed
    model = LM(config.model).double()
    needles = samples.batches(0, 2)[1]
    logits_BTV = torch.stack([
        logits[places]
        for logits, places in zip(model(needles.inputs_BT), needles.places_BT, strict=True)
    ])  # fmt: skip
    expected = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), needles.targets_BT.flatten(), reduction="sum"
    )
    found = Loss(model)(needles.inputs_BT, needles.targets_BT, None, needles.places_BT)
    torch.testing.assert_close(found, expected)


def test_micro_batches_do_not_change_a_run_with_needles(small, tmp_path):
    for name, size in (("whole", 4), ("parts", 1)):
        config = small("b", **NEEDLES, run__micro_batch=size, run__steps=3)
        pretrain(config, tmp_path / name, ranks=CPU)
    whole, parts = (
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl", "step")]
        for name in ("whole", "parts")
    )
    assert whole == pytest.approx(parts, abs=1e-5)


@pytest.mark.parametrize(("letter", "share"), [("d", 10.0), ("a", 10.0), ("d", 1.0)])
def test_what_the_rules_learn_has_a_rate_of_its_own(small, letter, share):
    config = small(letter, optim__scale_lr=share)
    model = LM(config.model)
    optimizer = make_optimizer(model, config.optim, torch.device("cpu"))
    named = {id(one): name for name, one in model.named_parameters()}
    learned = {
        named[id(one)]
        for group in optimizer.param_groups
        if group.get("lr_share", 1.0) == 10.0
        for one in group["params"]
    }
    wanted = {name for name in named.values() if ".ssmax." in name}
    assert learned == (wanted if share == 10.0 else set())
    assert len(wanted) == (4 if letter == "d" else 0)


def test_a_gain_multiplies_the_first_queries_and_nothing_else(small):
    weights = []
    for gain in (1.0, 2.3):
        torch.manual_seed(0)
        weights.append(LM(small("a", model__query_gain=gain).model).state_dict())
    plain, louder = weights
    for name, weight in plain.items():
        factor = 2.3 if name.endswith("q_proj.weight") else 1.0
        torch.testing.assert_close(louder[name], weight * factor)
