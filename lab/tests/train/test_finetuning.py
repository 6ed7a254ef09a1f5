"""Fine-tuning: the loss is the answers', examples do not see each other, a run goes on."""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ssmax_lab.data.haystack import hidden_examples
from ssmax_lab.data.qa import COLOURS, IGNORE, UNANSWERABLE, encode_questions, invented_questions
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.model import LM
from ssmax_lab.records import read_metrics
from ssmax_lab.train import finetuning
from ssmax_lab.train.dist import single_process
from ssmax_lab.train.finetuning import Rows, finetune
from ssmax_lab.train.pretraining import pretrain
from ssmax_lab.train.run import load_run_model, load_run_tokenizer, read_run_config
from ssmax_lab.train.step import Loss

CPU = single_process(torch.device("cpu"))
QUICK = {"run.steps": 4, "run.batch_size": 4, "run.micro_batch": 2, "schedule.warmup_steps": 1}


@pytest.fixture
def base(small, tmp_path):
    config = small("a", model__train_length=160, run__steps=2, run__batch_size=2)
    pretrain(config, tmp_path / "base", ranks=CPU)
    return tmp_path / "base"


def examples(count=12, length=160):
    tokenizer = load_tokenizer("bytes")
    questions = invented_questions(count, seed=0, max_facts=3)
    found, _ = encode_questions(questions, tokenizer.encode, end_of_document=256, length=length)
    return found


def test_packed_rows_have_the_loss_of_the_examples_one_by_one(small):
    """Packing overrides neither n nor what is seen: each example loses what it loses alone."""
    torch.manual_seed(0)
    config = dataclasses.replace(small("d").model, train_length=512)
    loss = Loss(LM(config).double())
    rows = Rows(examples(), length=512, seed=0)
    batch = rows.batches(0, 3)[0]
    assert batch.inputs_BT.shape == (1, 3 * 512)
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == 3 * 512
    together = loss(batch.inputs_BT, batch.targets_BT, batch.cu_seqlens)
    alone_sum, count = torch.zeros((), dtype=torch.float64), 0
    bounds = batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        targets = batch.targets_BT[:, start:stop]
        count += int((targets != IGNORE).sum())
        alone_sum += loss(batch.inputs_BT[:, start:stop], targets)
    assert count > 0
    torch.testing.assert_close(together, alone_sum, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_one_graph_serves_every_number_of_packed_examples(small):
    torch.compiler.reset()
    loss = Loss(LM(dataclasses.replace(small("b").model, train_length=512)))
    counter = CompileCounterWithBackend("eager")
    for block in loss.model.blocks:
        block.compile(backend=counter)
    rows, graphs, packed = Rows(examples(), length=512, seed=0), [], set()
    for first in range(4):
        batch = rows.batches(first, 1)[0]
        loss(batch.inputs_BT, batch.targets_BT, batch.cu_seqlens)
        graphs.append(counter.frame_count)
        packed.add(len(batch.cu_seqlens))
    assert len(packed) > 1
    # One for the first block, which has nothing left to add, and one for all others.
    assert graphs == [2] * 4


def test_only_answers_are_learned():
    tokenizer = load_tokenizer("bytes")
    batch = Rows(examples(), length=512, seed=0).batches(0, 1)[0]
    learned = batch.targets_BT[batch.targets_BT != IGNORE].tolist()
    text = tokenizer.decode([token for token in learned if token != 256])
    assert "Question" not in text and " is " not in text
    assert set(text.split()) <= {*COLOURS, UNANSWERABLE}


def test_a_pretrained_run_learns_and_resumes(base, tmp_path, logged):
    finetune(base, tmp_path / "qa", ranks=CPU, overrides=QUICK)
    steps = read_metrics(tmp_path / "qa" / "metrics.jsonl", "step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert "questions to learn from" in logged.getvalue()
    with pytest.raises(ValueError, match=r"run.steps cannot change"):
        finetune(base, tmp_path / "qa", ranks=CPU, overrides={"run.steps": 8}, resume=True)
    assert finetune(base, tmp_path / "qa", ranks=CPU, resume=True).step == 4
    tokenizer = load_run_tokenizer(tmp_path / "qa")
    out = load_run_model(tmp_path / "qa").generate([tokenizer.encode("Ada's hat")], 3)
    assert len(out[0]) <= 3


def test_it_starts_from_the_pretrained_weights(base, tmp_path):
    overrides = {**QUICK, "run.steps": 1, "optim.lr": 1e-12}
    finetune(base, tmp_path / "qa", ranks=CPU, overrides=overrides)
    before, after = (load_run_model(path).state_dict() for path in (base, tmp_path / "qa"))
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-9)


def test_the_seed_of_its_config_is_the_seed_it_had(base, tmp_path):
    metrics = []
    for seed in (0, 7):
        folder = tmp_path / f"seed{seed}"
        finetune(base, folder, ranks=CPU, overrides={**QUICK, "data.seed": seed})
        metrics.append((folder / "metrics.jsonl").read_bytes())
    assert metrics[0] != metrics[1]


@pytest.mark.parametrize("rule", [None, "ssmax"])
def test_without_a_checkpoint_it_starts_again_from_the_base(base, tmp_path, rule):
    for name in ("whole", "again"):
        finetune(base, tmp_path / name, ranks=CPU, overrides=QUICK, rule=rule)
    for name in ("checkpoints", "model"):
        shutil.rmtree(tmp_path / "again" / name)
    finetune(base, tmp_path / "again", ranks=CPU, resume=True)
    whole, again = ((tmp_path / n / "metrics.jsonl").read_bytes() for n in ("whole", "again"))
    assert whole == again


def test_it_goes_on_from_the_base_that_it_began_from(base, tmp_path):
    finetune(base, tmp_path / "qa", ranks=CPU, overrides=QUICK)
    shutil.copytree(base, tmp_path / "other")
    with pytest.raises(ValueError, match=r"began from .*base, not .*other; resume with that"):
        finetune(tmp_path / "other", tmp_path / "qa", ranks=CPU, resume=True)
    moved = base.rename(tmp_path / "moved")
    finetune(moved, tmp_path / "qa", ranks=CPU, resume=True)
    assert read_run_config(tmp_path / "qa").data.base == str(moved)


@pytest.mark.parametrize("key", ["data.base", "data.questions"])
def test_what_the_command_names_is_no_setting(base, tmp_path, key):
    with pytest.raises(ValueError, match=f"{key} is told by RUN and --questions"):
        finetune(base, tmp_path / "qa", ranks=CPU, overrides={key: "invented"})


def test_the_seed_is_the_bases_unless_another_is_given(small, tmp_path):
    config = small("a", model__train_length=160, run__steps=1, run__batch_size=2, data__seed=5)
    pretrain(config, tmp_path / "base", ranks=CPU)
    finetune(tmp_path / "base", tmp_path / "qa", ranks=CPU, overrides=QUICK)
    assert json.loads((tmp_path / "qa" / "config.json").read_text())["data"]["seed"] == 5
    assert finetune(tmp_path / "base", tmp_path / "qa", ranks=CPU, resume=True).step == 4


def test_zero_validation_windows_are_never_looked_at(base, tmp_path):
    overrides = {**QUICK, "data.validation_windows": 0}
    finetune(base, tmp_path / "qa", ranks=CPU, overrides=overrides)
    assert read_metrics(tmp_path / "qa" / "metrics.jsonl", "validation") == []


@pytest.mark.parametrize(
    "key", ["model.train_length", "model.num_layers", "model.rule", "data.folder"]
)
def test_the_model_is_the_bases(base, tmp_path, key):
    with pytest.raises(ValueError, match=f"{key} is the pretrained run's"):
        finetune(base, tmp_path / "qa", ranks=CPU, overrides={key: "8"})
    assert not (tmp_path / "qa" / "config.json").exists()


def test_configuration_e_replaces_the_rule_first(base, tmp_path):
    finetune(base, tmp_path / "e", ranks=CPU, rule="ssmax", overrides={**QUICK, "run.steps": 1})
    assert load_run_model(tmp_path / "e").config.rule == "ssmax"
    assert json.loads((tmp_path / "e" / "config.json").read_text())["model"]["rule"] == "ssmax"
    assert finetune(base, tmp_path / "e", ranks=CPU, rule="ssmax", resume=True).step == 1
    with pytest.raises(ValueError, match="began under the rule 'ssmax', not 'probe'"):
        finetune(base, tmp_path / "e", ranks=CPU, rule="probe", resume=True)


def squad_file(path):
    """Eight questions."""
    paragraphs = [
        {
            "context": f"The sky over town {number} is grey.",
            "qas": [
                {
                    "id": str(number),
                    "question": "What colour is the sky?",
                    "answers": [{"text": "grey", "answer_start": 0}],
                }
            ],
        }
        for number in range(8)
    ]
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return path


def test_questions_of_a_file(base, tmp_path):
    path = squad_file(tmp_path / "squad.json")
    assert (
        finetune(base, tmp_path / "qa", ranks=CPU, questions=str(path), overrides=QUICK).step == 4
    )
    stored = json.loads((tmp_path / "qa" / "config.json").read_text())["data"]
    assert (stored["questions"], stored["base"]) == (str(path), str(base))
    assert finetune(base, tmp_path / "qa", ranks=CPU, resume=True).step == 4
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not SQuAD"):
        finetune(base, tmp_path / "other", ranks=CPU, questions=str(path))
    with pytest.raises(ValueError, match="cannot be read as SQuAD"):
        finetune(base, tmp_path / "other", ranks=CPU, questions=str(tmp_path / "nowhere"))


def test_it_goes_on_with_the_questions_that_it_began_with(base, tmp_path, monkeypatch):
    monkeypatch.setattr(finetuning, "NUM_HIDDEN", 100)
    path, run = squad_file(tmp_path / "squad.json"), tmp_path / "qa"
    finetune(base, run, ranks=CPU, questions=f"{path}+hidden", overrides=QUICK)
    whole = (run / "metrics.jsonl").read_bytes()
    other = tmp_path / "other.json"
    other.write_text(path.read_text().replace("grey", "blue"))
    for given in ("hidden", f"{path}+hidden:5", "invented+hidden", f"{other}+hidden"):
        with pytest.raises(ValueError, match="trained on other samples"):
            finetune(base, run, ranks=CPU, questions=given, resume=True)
    # Moved, they are the same; config.json says where they are.
    moved = path.rename(tmp_path / "moved.json")
    finetune(base, run, ranks=CPU, questions=f"{moved}+hidden:4", resume=True)
    assert read_run_config(run).data.questions == f"{moved}+hidden:4"
    assert (run / "metrics.jsonl").read_bytes() == whole


def test_questions_that_are_left_out_are_counted(base, tmp_path, logged):
    path = squad_file(tmp_path / "squad.json")
    values = json.loads(path.read_text())
    long = {**values["data"][0]["paragraphs"][0]["qas"][0], "question": "Why? " * 1000}
    values["data"][0]["paragraphs"][0]["qas"] += [long] * 3
    path.write_text(json.dumps(values))
    finetune(base, tmp_path / "qa", ranks=CPU, questions=str(path), overrides=QUICK)
    assert "; 3 are longer than a row and left out" in logged.getvalue()


def test_questions_too_long_for_the_model_are_refused(small, tmp_path):
    pretrain(small("a", run__steps=1), tmp_path / "base", ranks=CPU)
    with pytest.raises(ValueError, match=r"0 of 2048 questions of 'invented' fit 16 tokens"):
        finetune(tmp_path / "base", tmp_path / "qa", ranks=CPU, questions="invented")
    with pytest.raises(ValueError, match=r"more than a row of 16; .* 'invented'"):
        finetune(tmp_path / "base", tmp_path / "qa", ranks=CPU, questions="hidden")
    with pytest.raises(ValueError, match="at least 1 digit, got 'hidden:0'"):
        finetune(tmp_path / "base", tmp_path / "qa", ranks=CPU, questions="hidden:0")


def test_hidden_numbers_stand_in_the_text_and_are_answered():
    tokenizer = load_tokenizer("small")
    text = tokenizer.encode("Some text. It goes on, and on; then it ends. " * 40)
    options = {"count": 60, "length": 64, "digits": 4, "tokenizer": tokenizer}
    examples = hidden_examples(text, seed=1, **options)
    for example in examples:
        assert example.tokens.size <= 64
        prompt = tokenizer.decode(example.tokens[: example.answer_start].tolist())
        answer = tokenizer.decode(example.tokens[example.answer_start : -1].tolist())
        assert len(answer) == 5 and answer[1:].isdigit()
        assert f"number is:{answer}." in prompt and prompt.endswith("number?\nAnswer:")
        assert example.tokens[-1] == tokenizer.vocabulary.end_of_document
    assert len({example.tokens.size for example in examples}) > 10
    again = hidden_examples(text, seed=1, **options)
    assert all((a.tokens == b.tokens).all() for a, b in zip(examples, again, strict=True))
    other = hidden_examples(text, seed=2, **options)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(examples, other, strict=True))
    with pytest.raises(ValueError, match="too few to hide"):
        hidden_examples(text[:10], seed=1, **options)


def test_a_quick_run_learns_hidden_numbers_of_its_own_text(small, tmp_path):
    pretrain(small("a", run__steps=1, model__train_length=160), tmp_path / "base", ranks=CPU)
    overrides = {"run.steps": 2, "run.batch_size": 4, "run.micro_batch": 4}
    finetune(tmp_path / "base", tmp_path / "qa", ranks=CPU, overrides=overrides)
    assert read_run_config(tmp_path / "qa").data.questions == "hidden"


def test_questions_of_a_file_and_hidden_numbers_together(small, tmp_path, monkeypatch, logged):
    pretrain(small("a", run__steps=1, model__train_length=160), tmp_path / "base", ranks=CPU)
    squad_file(tmp_path / "a+b.json")
    monkeypatch.setattr(finetuning, "NUM_HIDDEN", 100)
    monkeypatch.chdir(tmp_path)
    learned = {}
    # A file with a + in its name stands by itself; it is found again from elsewhere.
    for name in ("a+b.json", "hidden:5", "c.json+hidden:5"):
        shutil.copyfile("a+b.json", "c.json")
        finetune(Path("base"), Path("runs", name), ranks=CPU, questions=name, overrides=QUICK)
        found = re.search(r"(\d+) questions to learn from", logged.getvalue())
        learned[name] = int(found[1])
        logged.truncate(0)
    assert learned["a+b.json"] == 7 and learned["hidden:5"] == 98
    assert learned["c.json+hidden:5"] == 105
    both = Path("runs", "c.json+hidden:5")
    assert read_run_config(both).data.questions == f"{tmp_path / 'c.json'}+hidden:5"
    assert finetune(Path("base"), both, ranks=CPU, resume=True).step == 4


def test_a_fine_tuned_run_hides_numbers_in_the_text_of_its_base(small, tmp_path):
    config = small("a", model__train_length=128, run__steps=1, run__recipe="quick")
    pretrain(config, tmp_path / "base", ranks=CPU)
    finetune(tmp_path / "base", tmp_path / "once", ranks=CPU, overrides=QUICK)
    finetune(tmp_path / "once", tmp_path / "twice", ranks=CPU, overrides=QUICK)
    assert read_run_config(tmp_path / "twice").data.questions == "hidden"


def test_invented_questions_can_be_answered_from_their_context():
    questions = invented_questions(500, seed=3, max_facts=5)
    assert questions == invented_questions(500, seed=3, max_facts=5)
    assert questions != invented_questions(500, seed=4, max_facts=5)
    without = 0
    for question in questions:
        owner = question.question.removeprefix("What colour is ").removesuffix("?")
        fact = f"{owner} is {question.answer}."
        without += question.answer == ""
        assert (fact in question.context) == (question.answer != "")
        assert question.context.count(owner) == (question.answer != "")
    assert 20 < without < 90
