"""Fine-tuning converted models: the loop's laws hold for somebody else's model too."""

import json
import shutil
from importlib import resources

import numpy as np
import pytest
import torch
import transformers as tf

import ssmax
import ssmax.cli
import ssmax.hf
from ssmax.hf.conversion import Conversion
from ssmax_lab import cli
from ssmax_lab.data import prepare
from ssmax_lab.data.qa import Example
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.records import read_metrics
from ssmax_lab.train import finetune_converted
from ssmax_lab.train.converted import ConvertedLoss, restarting_positions
from ssmax_lab.train.dist import single_process
from ssmax_lab.train.finetuning import question_rows

CPU = single_process(torch.device("cpu"))
SHAPE = {"vocab_size": 768, "bos_token_id": 0, "eos_token_id": 0}
FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=128, **SHAPE,
        )
    ),
    # With dropout, and its embedding used twice.
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=128, **SHAPE)
    ),
}  # fmt: skip
SHORT = {
    "run.steps": 6, "run.batch_size": 4, "run.micro_batch": 2, "run.checkpoint_every": 2,
    "run.validate_every": 3, "run.scale_every": 2, "data.validation_windows": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by family and init, as `ssmax convert` writes them, tokenizer included."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_file=str(resources.files("ssmax_lab.data") / "small_tokenizer.json"),
        eos_token="<|endoftext|>",
    )
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        make().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    options = ["--init", "anneal", "--train-length", "64"]
    assert (
        ssmax.cli.run(["convert", str(folder / "llama"), str(folder / "llama-anneal"), *options])
        == 0
    )
    for name in FAMILIES:
        assert ssmax.cli.run(["convert", str(folder / name), str(folder / f"{name}-identity")]) == 0
    typed = ["convert", str(folder / "llama"), str(folder / "llama-adapter"), "--adapter"]
    assert ssmax.cli.run(typed) == 0
    return folder


def tune(source, folder, overrides=None, **options):
    options = {"ranks": CPU, **options}
    return finetune_converted(source, folder, overrides={**SHORT, **(overrides or {})}, **options)


def weights_of(run):
    return ssmax.hf.from_pretrained(run / "model").state_dict()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt2-identity", {}),
        ("llama-identity", {"model.only_ssmax": True}),
        ("llama-anneal", {"model.gradient_checkpointing": True}),
    ],
)
@pytest.mark.parametrize("step", [1, 4])
def test_a_run_that_was_stopped_is_one_that_never_was(
    models, tmp_path, monkeypatch, stop_after, name, overrides, step
):
    tune(models / name, tmp_path / "whole", overrides)
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        outcome = tune(models / name, tmp_path / "stopped", overrides)
    assert (outcome.step, outcome.stopped_by) == (step, "SIGTERM")
    assert not (tmp_path / "stopped" / "model").exists()
    finetune_converted(models / name, tmp_path / "stopped", ranks=CPU, resume=True)
    metrics = [(tmp_path / run / "metrics.jsonl").read_bytes() for run in ("whole", "stopped")]
    assert metrics[0] == metrics[1]
    whole, stopped = weights_of(tmp_path / "whole"), weights_of(tmp_path / "stopped")
    for weight in whole:
        assert torch.equal(whole[weight], stopped[weight]), weight


@pytest.mark.parametrize("other", ["llama-anneal", "gpt2-identity"])
def test_a_run_goes_on_with_the_model_that_it_began_with(
    models, tmp_path, monkeypatch, stop_after, other
):
    """Where s alone learns, all else comes from the source again."""
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        tune(models / "llama-identity", tmp_path / "run", {"model.only_ssmax": True})
    with pytest.raises(ValueError, match=r"began with .*llama-identity, not with .*" + other):
        finetune_converted(models / other, tmp_path / "run", ranks=CPU, resume=True)


def test_a_run_leaves_a_model_that_learned(models, tmp_path, capsys):
    typed = ["finetune", "--hf", str(models / "llama-identity"), "--runs", str(tmp_path),
             "--device", "cpu", "--questions", "invented", "--set", "optim.lr=1e-2"]  # fmt: skip
    for key, value in {**SHORT, "run.steps": 12}.items():
        typed += ["--set", f"{key}={value}"]
    assert cli.run(typed) == 0
    run = tmp_path / "llama-identity-tuned"
    out, err = capsys.readouterr()
    assert "step 12/12" in err and f"ssmax.hf.from_pretrained('{run / 'model'}')" in out
    steps = read_metrics(run / "metrics.jsonl", "step")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
    s = read_metrics(run / "metrics.jsonl", "scale")[-1]["values"]
    assert next(iter(s)) == "model.layers.0.self_attn.ssmax.s"
    looks = read_metrics(run / "metrics.jsonl", "validation")
    assert looks[-1]["loss"] < looks[0]["loss"]
    assert ssmax.hf.verify(ssmax.hf.from_pretrained(run / "model")).layers == 2
    assert tf.AutoTokenizer.from_pretrained(run / "model").eos_token == "<|endoftext|>"
    assert json.loads((run / "config.json").read_text())["data"]["questions"] == "invented"


def test_remote_code_is_tuned_without_a_question(models, tmp_path, monkeypatch, capfd):
    """Nor is its code run, which Transformers asks to be allowed where it is not told."""
    source = tmp_path / "code"
    assert ssmax.cli.run(["convert", str(models / "llama"), str(source), "--remote-code"]) == 0
    (source / "modeling_ssmax.py").write_text("raise SystemExit('run')")
    (source / "preprocessor_config.json").write_text("{}")
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "n")
    capfd.readouterr()
    tune(source, tmp_path / "run")
    assert not asked and "instantiate" not in capfd.readouterr().err
    written = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"} <= written
    assert "modeling_ssmax.py" not in written
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "run" / "model").eos_token == "<|endoftext|>"


def test_frozen_but_for_s_nothing_else_moves_nor_is_kept(models, tmp_path):
    tune(models / "llama-identity", tmp_path / "run", {"model.only_ssmax": True})
    before = ssmax.hf.from_pretrained(models / "llama-identity").state_dict()
    for name, weight in weights_of(tmp_path / "run").items():
        assert torch.equal(weight, before[name]) != (".ssmax." in name), name
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert sum(path.stat().st_size for path in newest.iterdir()) < 8_000


def test_s_has_a_learning_rate_of_its_own(models, tmp_path):
    """Adam's first step is the learning rate: of s its own, of a weight that of the run."""
    overrides = {"optim.lr": 1e-5, "model.ssmax_lr": 1e-2, "run.steps": 1,
               "schedule.kind": "constant"}  # fmt: skip
    tune(models / "llama-identity", tmp_path / "run", overrides)
    before = ssmax.hf.from_pretrained(models / "llama-identity").state_dict()
    for name, weight in weights_of(tmp_path / "run").items():
        moved = (weight - before[name]).abs().max().item()
        assert moved == pytest.approx(1e-2 if ".ssmax." in name else 1e-5, rel=0.02), name


@pytest.mark.parametrize(("is_alone", "rate"), [(True, 1e-2), (False, 1e-5)])
def test_the_rate_that_is_logged_is_one_that_something_learns_at(
    models, tmp_path, logged, is_alone, rate
):
    overrides = {"optim.lr": 1e-5, "model.ssmax_lr": 1e-2, "model.only_ssmax": is_alone,
               "run.steps": 1, "schedule.kind": "constant"}  # fmt: skip
    tune(models / "llama-identity", tmp_path / "run", overrides)
    (step,) = read_metrics(tmp_path / "run" / "metrics.jsonl", "step")
    assert step["lr"] == pytest.approx(rate)
    assert f"lr {rate:.2e}" in logged.getvalue()


def test_an_annealed_model_ends_at_the_papers_start_and_is_not_annealed_again(models, tmp_path):
    still = {"model.only_ssmax": True, "model.ssmax_lr": 1e-9}
    tune(models / "llama-anneal", tmp_path / "run", still)
    model = ssmax.hf.from_pretrained(tmp_path / "run" / "model")
    scale = model.model.layers[0].self_attn.ssmax
    assert scale.s.tolist() == pytest.approx([ssmax.initial_s(64)] * 2, abs=1e-6)
    assert scale.bias.tolist() == pytest.approx([0.0] * 2, abs=1e-6)
    assert Conversion.of(model).init == "annealed"
    tune(tmp_path / "run" / "model", tmp_path / "again", still)
    again = weights_of(tmp_path / "again")["model.layers.0.self_attn.ssmax.bias"]
    assert again.tolist() == pytest.approx([0.0] * 2, abs=1e-6)
    # A finished run says so too when it is resumed.
    finetune_converted(models / "llama-anneal", tmp_path / "run", ranks=CPU, resume=True)
    assert Conversion.of(ssmax.hf.from_pretrained(tmp_path / "run" / "model")).init == "annealed"


def test_an_adapter_is_its_model(models, tmp_path):
    tune(models / "llama-identity", tmp_path / "whole")
    tune(models / "llama-adapter", tmp_path / "adapter", base=str(models / "llama"))
    whole, adapter = weights_of(tmp_path / "whole"), weights_of(tmp_path / "adapter")
    for name in whole:
        assert torch.equal(whole[name], adapter[name]), name


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} bottles of beer. " * 30)
    return tmp_path / "texts"


def test_text_is_learned_in_the_models_own_tokens(models, texts, tmp_path):
    source = models / "llama-identity"
    prepare(str(texts), tmp_path / "tokens", tokenizer=str(source), workers=1)
    overrides = {"optim.lr": 1e-2, "model.train_length": 32}
    tune(source, tmp_path / "run", overrides, data=tmp_path / "tokens")
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl", "step")]
    assert losses[-1] < losses[0] - 0.1
    prepare(str(texts), tmp_path / "bytes", tokenizer="bytes", workers=1)
    with pytest.raises(ValueError, match="tokens of another tokenizer, 'bytes'"):
        tune(source, tmp_path / "other", overrides, data=tmp_path / "bytes")


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("is_text", [True, False])
def test_a_run_goes_on_with_what_it_began_to_learn_from(
    models, texts, tmp_path, monkeypatch, stop_after, is_text, has_checkpoint
):
    source, run, overrides = models / "llama-identity", tmp_path / "run", {"model.train_length": 32}
    tokens = tmp_path / "tokens"
    prepare(str(texts), tokens, tokenizer=str(source), workers=1)
    questions = tmp_path / "squad.json"
    entry = {"question": "What is it?", "answers": [{"text": "grey", "answer_start": 6}]}
    entries = [{"id": str(number), **entry} for number in range(60)]
    paragraphs = [{"context": "It is grey.", "qas": entries}]
    questions.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    began = tokens if is_text else questions
    learned = {"data": began} if is_text else {"questions": str(began)}
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        tune(source, run, overrides, **learned)
    if not has_checkpoint:
        shutil.rmtree(run / "checkpoints")
    resumed = {"ranks": CPU, "resume": True}
    for other in ({"questions": "invented"}, {"questions": str(questions)}, {"data": tokens}):
        if other != learned:
            with pytest.raises(ValueError, match=f"began with '{began}', not with '.*without"):
                finetune_converted(source, run, **resumed, **other)
    # Moved, it is the same; config.json says where it is.
    moved = began.rename(tmp_path / "moved")
    learned = {"data": moved} if is_text else {"questions": str(moved)}
    assert finetune_converted(source, run, **resumed, **learned).step == 6
    stored = json.loads((run / "config.json").read_text())["data"]
    assert stored["folder" if is_text else "questions"] == str(moved)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_examples_have_the_loss_they_have_alone(models, name):
    model = ssmax.hf.from_pretrained(models / f"{name}-identity").double().eval()
    generator = np.random.default_rng(0)
    examples = [
        Example(tokens=generator.integers(1, 768, size).astype(np.int32), answer_start=size // 2)
        for size in (9, 14, 7, 20, 5, 8)
    ]
    rows, _ = question_rows([examples[0], *examples], length=32, seed=0)
    batch = rows.batches(0, rows.stream.rows_in_epoch(0))[0]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("ssmax.s"):
                parameter.fill_(0.7)
        packed = ConvertedLoss(model, 32)(batch.inputs_BT, batch.targets_BT, batch.cu_seqlens)
        alone = torch.zeros(())
        for example in examples:
            tokens = torch.from_numpy(example.tokens).long()
            log_p = model(tokens[None]).logits[0].log_softmax(-1)
            answer = torch.arange(example.answer_start, len(tokens))
            alone = alone - log_p[answer - 1, tokens[answer]].sum()
    # The norms of these models compute in float32.
    assert packed.item() == pytest.approx(alone.item(), rel=1e-6)


def test_positions_start_again_with_every_segment():
    bounds = torch.tensor([0, 3, 4, 8])
    assert restarting_positions(bounds).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_a_model_that_does_not_keep_packed_examples_apart_is_refused(models, monkeypatch, tmp_path):
    plain = tf.LlamaForCausalLM.forward

    def without_positions(self, *arguments, position_ids=None, **options):
        return plain(self, *arguments, **options)

    monkeypatch.setattr(tf.LlamaForCausalLM, "forward", without_positions)
    with pytest.raises(ValueError, match="examples of a packed row would see each other"):
        tune(models / "llama-identity", tmp_path / "run")


BAD = {
    "nowhere": "there is no folder nowhere",
    "llama": "convert it with ssmax convert llama OUT",
    "llama-adapter": "name the model it is for with --base",
    "llama-adapter --base nowhere/at/all": "there is no folder",
    "llama-adapter --base gpt2": "the adapter is for another model",
    "llama-identity --base llama": "--base is for adapters",
    "llama-identity --config e": "--config is for runs",
    "llama-identity --data tokens --questions invented": "give --data or --questions",
    "llama-identity --data tokens": "tokens",
    "llama-identity --questions nowhere.json": "there is no file",
    "llama-identity --set optim.lrr=1": "did you mean 'optim.lr'",
    "llama-identity --set model.rule=ssmax": "model.rule is not a setting",
    "llama-identity --set model.train_length=4096": "must be at most 128",
    "llama-identity --set model.ssmax_lr=0": "model.ssmax_lr must be positive",
    "llama-identity --set switch.rule=probe": "switch.rule is for the paper's model",
    "llama-identity --questions hidden": "hidden questions are about the text of a run",
    "llama-identity --questions invented+hidden:7": "hidden questions are about the text of a run",
    "llama-identity --resume": "nothing to resume; leave --resume out to begin one",
    "llama-clamp --only-ssmax": "has nothing that could learn",
    "bert": "does not predict the next token",
}


@pytest.mark.parametrize("typed", BAD)
def test_bad_usage_is_one_line_and_exit_code_2(models, tmp_path, monkeypatch, capsys, typed):
    monkeypatch.chdir(models)
    if "clamp" in typed and not (models / "llama-clamp").exists():
        convert = ["convert", "llama", "llama-clamp", "--rule", "clamp", "--train-length", "64"]
        assert ssmax.cli.run(convert) == 0
    if typed == "bert" and not (models / "bert").exists():
        config = tf.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                               intermediate_size=16, vocab_size=768)  # fmt: skip
        ssmax.hf.convert(tf.BertForMaskedLM(config)).save_pretrained(models / "bert")
    capsys.readouterr()
    options = ["--runs", str(tmp_path), "--device", "cpu"]
    if not any(given in typed for given in ("--data", "--questions", "--resume")):
        options += ["--questions", "invented"]
    assert cli.run(["finetune", "--hf", *typed.split(), *options]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ssmax-lab:")]
    assert len(said) == 1 and BAD[typed] in said[0]
    assert not list(tmp_path.glob("*/config.json"))


@pytest.mark.parametrize("typed", ["", "--only-ssmax"])
def test_nothing_is_learned_from_what_nobody_gave(models, tmp_path, monkeypatch, capsys, typed):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["finetune", "--hf", str(models / "llama-identity"), *typed.split()]) == 2
    said = capsys.readouterr().err
    assert "give --data" in said and "--questions invented" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_belongs_to_converted_models_needs_hf(capsys):
    assert cli.run(["finetune", "nowhere", "--only-ssmax"]) == 2
    assert "add --hf" in capsys.readouterr().err


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_ranks_are_one(models, tmp_path, run_ranks, parallel):
    source = models / "llama-identity"
    tune(source, tmp_path / "one", {"optim.lr": 1e-3})
    typed = ["finetune", "--hf", str(source), "--runs", str(tmp_path), "--name", "two",
             "--device", "cpu", "--questions", "invented"]  # fmt: skip
    for key, value in {**SHORT, "optim.lr": 1e-3, "run.parallel": parallel}.items():
        typed += ["--set", f"{key}={value}"]
    run_ranks(2, "-m", "ssmax_lab", *typed)
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / run / "metrics.jsonl", "step")]
        for run in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    assert (two["model.layers.0.self_attn.ssmax.s"] != 0).all()
    assert load_tokenizer(str(tmp_path / "two")).vocabulary.size == 768
