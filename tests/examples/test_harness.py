"""lm-evaluation-harness on native and converted models, with the offline tasks of examples."""

from pathlib import Path

import pytest
import torch
import transformers
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import ssmax.hf
from hugging_face import write_model
from ssmax_lab.tiny import run_folder
from ssmax_lab.train.run import load_run_model, load_run_tokenizer

HARNESS = Path(__file__).parent.parent.parent / "examples" / "harness"
TASKS = ["ssmax_needle", "ssmax_needle_choice"]
THETA = 1.6e5
FEW = {"lengths": [150, 400], "depths": [0.0, 0.7], "trials": 2}

# What the harness says of its own imports is not ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {run: write_model(run, home / run, theta=THETA) for run in ("tiny-a-qa", "tiny-b-qa")}


def answered(source, tokenizer, *, batch=3):
    """What the harness got to hear: texts and log-likelihoods, question by question."""
    model = HFLM(
        source,
        tokenizer=str(tokenizer),
        batch_size=batch,
        max_length=512,
        device="cpu",
        dtype="float32",
    )
    manager = TaskManager(include_path=str(HARNESS), include_defaults=False, metadata=FEW)
    out = simple_evaluate(model, tasks=TASKS, task_manager=manager, bootstrap_iters=0)
    samples = {task: sorted(out["samples"][task], key=lambda one: one["doc_id"]) for task in TASKS}
    said = [one["resps"][0][0] for one in samples["ssmax_needle"]]
    likelihoods = [[float(choice[0][0]) for choice in one["resps"]] for one in samples[TASKS[1]]]
    prompts = [one["doc"] for one in samples["ssmax_needle"]]
    return prompts, said, torch.tensor(likelihoods), out["results"]


def test_a_native_model_says_in_the_harness_what_it_says_at_home(folders):
    questions, said, likelihoods, results = answered(
        str(folders["tiny-b-qa"]), folders["tiny-b-qa"]
    )
    model = load_run_model(run_folder("tiny-b-qa")).eval()
    model.theta = THETA
    tokenizer = load_run_tokenizer(run_folder("tiny-b-qa"))
    prompts = [tokenizer.encode(question["prompt"]) for question in questions]
    end = tokenizer.vocabulary.end_of_document
    at_home = [
        tokenizer.decode(tokens) for tokens in model.generate(prompts, 12, stop_tokens=[end])
    ]
    assert [text.split(".")[0].split("\n")[0] for text in at_home] == said
    for row, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
        for column, choice in enumerate(question["choices"]):
            tokens = torch.tensor([prompt + tokenizer.encode(f" {choice}")])
            with torch.no_grad():
                log_p = model(tokens).log_softmax(-1)[0, len(prompt) - 1 : -1]
            expected = log_p.gather(-1, tokens[0, len(prompt) :, None]).sum()
            torch.testing.assert_close(likelihoods[row, column], expected, atol=1e-3, rtol=1e-4)
    found = [
        text.strip() == question["answer"] for text, question in zip(said, questions, strict=True)
    ]
    assert results["ssmax_needle"]["exact_match,first-word"] == sum(found) / len(found) > 0


def test_a_converted_model_answers_the_same_in_any_batch(folders):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["tiny-a-qa"])
    before = answered(model, folders["tiny-a-qa"])
    ssmax.hf.convert(model, init="identity")
    same = answered(model, folders["tiny-a-qa"])
    assert same[1] == before[1] and same[2].equal(before[2])
    ssmax.hf.revert(model)
    ssmax.hf.convert(model, rule="clamp", train_length=64)
    one_by_one, together = (answered(model, folders["tiny-a-qa"], batch=n) for n in (1, 8))
    assert one_by_one[1] == together[1]
    torch.testing.assert_close(one_by_one[2], together[2], atol=1e-3, rtol=1e-4)
    assert not one_by_one[2].allclose(before[2], atol=1e-2)
