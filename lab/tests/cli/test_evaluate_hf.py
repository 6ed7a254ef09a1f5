"""Models of Hugging Face, measured from the command line, before and after conversion."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

import ssmax.cli
import ssmax.hf
from ssmax_lab import cli
from ssmax_lab.model.hf_causal_lm import HFCausalLM
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, Sharpness, read_jsonl

KINDS = {
    "position_loss": PositionLoss, "needle": NeedleTrial, "needle_score": NeedleScore,
    "sharpness": Sharpness,
}  # fmt: skip
SMALL = "--length 160 --documents 2 --depths 2 --trials 2 --digits 3"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A base, the same model converted, an adapter, and text in bytes."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, eos_token_id=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained("base")
    ssmax.hf.convert(model)
    model.save_pretrained("same")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("ssmax.s"):
                parameter.fill_(3.0)
    ssmax.hf.save(model, "adapter")
    (tmp_path / "texts").mkdir()
    words = "A quiet sentence about nothing. And another one.\n" * 200
    (tmp_path / "texts" / "one.txt").write_text(words)
    prepare = "data prepare texts tokens --tokenizer bytes --validation-fraction 0"
    assert cli.run(prepare.split()) == 0
    return tmp_path


def records(folder, kind):
    found = {}
    for record in read_jsonl(folder / "results" / f"{kind}.jsonl", KINDS[kind]):
        found.setdefault(record.run, []).append(record)
    return found


def test_before_and_after_stand_side_by_side_in_one_report(home, capsys):
    typed = "evaluate all --hf base --hf same --tokenizer bytes --data tokens/train"
    assert cli.run([*typed.split(), *SMALL.split()]) == 0
    out = capsys.readouterr().out
    assert "loss, positions 128 to 160" in out and "side-by-side.html" in out
    for kind in KINDS:
        found = records(home, kind)
        assert list(found) == ["base", "same"]
        for before, after in zip(found["base"], found["same"], strict=True):
            # Converted and not trained, a model is the same; loaded from another file, its weights
            # may be aligned otherwise and its sums end in another last bit.
            assert getattr(before, "said", None) == getattr(after, "said", None)
            for field in ("binned", "number_scores", "largest", "entropy"):
                if hasattr(before, field):
                    values = (getattr(one, field) for one in (before, after))
                    np.testing.assert_allclose(*values, atol=1e-6)
    page = (home / "results" / "side-by-side.html").read_text()
    assert page.count("data:image/svg+xml") == 4
    assert "loss less that of base, nats" in page and "the difference from base" in page
    assert "loss, positions 128 to 160" in page and '<th scope="col">same</th>' in page
    assert cli.run(["report", "results"]) == 0
    assert "loss, positions 128 to 160" in capsys.readouterr().out
    assert (home / "results" / "side-by-side.html").read_text() == page
    assert cli.run(["report", "results", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"] == ["base", "same"] and len(told["rows"]) > 10


def test_an_adapter_is_measured_beside_its_base(home, capsys):
    measured = "--hf base --adapter adapter --tokenizer bytes --data tokens/train"
    assert cli.run(f"evaluate sharpness --length 160 --documents 2 {measured}".split()) == 0
    assert "base+adapter" in capsys.readouterr().out
    sharpness = records(home, "sharpness")
    last = {run: found[0].largest[0][0][-1] for run, found in sharpness.items()}
    assert last["base+adapter"] > last["base"]  # s = 3 sharpens


def save_tokenizer(folder, *, letters):
    """Every letter a token, a first token before every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<s>": 0, "</s>": 1, "\n": 2} | {letter: ord(letter) for letter in letters}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    )
    own.save_pretrained(folder)


def test_a_model_reads_text_in_its_own_tokens_behind_its_own_first_token(home, capsys, monkeypatch):
    letters = [chr(code) for code in range(32, 127)]
    save_tokenizer("base", letters=letters)
    firsts = []
    losses = HFCausalLM.losses

    def watched(self, tokens):
        firsts.extend(tokens[:, 0].tolist())
        return losses(self, tokens)

    monkeypatch.setattr(HFCausalLM, "losses", watched)
    prepare = "data prepare texts own --tokenizer base --validation-fraction 0"
    assert cli.run(prepare.split()) == 0
    typed = "evaluate position-loss --hf base --length 100 --documents 2"
    assert cli.run([*typed.split(), "--data", "own/train"]) == 0
    assert firsts == [0, 0]
    capsys.readouterr()
    assert cli.run([*typed.split(), "--data", "tokens/train"]) == 2
    assert "are those of 'bytes', not of the model" in capsys.readouterr().err
    # Beside it another model must read the same tokens; what ssmax convert writes does.
    assert ssmax.cli.run(["convert", "base", "converted"]) == 0
    both = [*typed.split(), "--data", "own/train", "--hf"]
    assert cli.run([*both, "converted"]) == 0
    save_tokenizer("same", letters=letters[:-1])
    capsys.readouterr()
    assert cli.run([*both, "same"]) == 2
    assert "'same' reads other tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_folders_of_one_name_are_called_by_the_folders_around_them(home, capsys):
    for around, folder in (("before", "base"), ("after", "same")):
        shutil.copytree(folder, home / around / "llama")
    alone = "evaluate sharpness --hf before/llama --tokenizer bytes --length 99 --data tokens/train"
    assert cli.run([*alone.split(), "--documents", "2"]) == 0
    both = f"{alone} --hf after/llama"
    # The name that one had alone is not the other's. Once measured, both are found again.
    for _ in range(2):
        assert cli.run([*both.split(), "--documents", "2"]) == 0
        assert "before/llama" in capsys.readouterr().out
    assert list(records(home, "sharpness")) == ["llama", "before/llama", "after/llama"]


def test_a_copy_with_another_theta_in_its_config_is_measured_with_it(home):
    shutil.copytree("base", "far")
    values = json.loads((home / "far" / "config.json").read_text())
    values["rope_parameters"]["rope_theta"] = 40000.0
    (home / "far" / "config.json").write_text(json.dumps(values))
    typed = "evaluate position-loss --hf base --hf far --tokenizer bytes --data tokens/train"
    assert cli.run([*typed.split(), "--length", "100", "--documents", "2"]) == 0
    losses = records(home, "position_loss")
    assert losses["base"][0].mean != losses["far"][0].mean


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("sharpness", "give one thing to measure"),
        ("sharpness base --hf base", "give one thing to measure"),
        ("sharpness runs/x --adapter adapter", "go with --hf"),
        (
            "sharpness --hf base --rule ssmax",
            "--rule is a run's; a Hugging Face model is given one by "
            "ssmax convert base OUT --rule ssmax, and then measured",
        ),
        (
            "sharpness --hf base --theta 40000",
            "--theta is a run's; for a Hugging Face model copy its "
            "folder, set the rope_theta in config.json of the copy to 40000",
        ),
        ("sharpness --hf base --hf same --adapter adapter", "goes with one --hf, got 2"),
        ("sharpness --hf base --hf base", "two models are called 'base'"),
        ("sharpness --hf base --data tokens/train", "gives no tokenizer.json"),
        (
            "sharpness --hf nowhere --data tokens",
            "there is no folder 'nowhere'",
        ),
        ("sharpness --hf ./nowhere --data tokens", "there is no such folder"),
        ("sharpness --hf adapter --data tokens", "adapter holds an adapter"),
        (
            "sharpness --hf encoder --data tokens",
            "encoder holds a BertForMaskedLM, which is no causal",
        ),
        ("sharpness --hf base --hf seq2seq --data tokens", "which is no causal language model"),
        ("sharpness --hf nowhere --tokenizer bytes --data tokens", "there is no folder"),
        ("sharpness --hf base --tokenizer gpt2 --data tokens", "the model 300"),
        ("sharpness --hf base --tokenizer bytes --data nowhere", "no prepared tokens"),
        ("sharpness --hf base --adapter texts --tokenizer bytes --data tokens/train", "no adapter"),
    ],
)
def test_what_cannot_be_measured_is_one_line(home, capsys, monkeypatch, typed, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    encoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
               "intermediate_size": 16}  # fmt: skip
    transformers.BertForMaskedLM(transformers.BertConfig(**encoder)).save_pretrained("encoder")
    t5 = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    transformers.T5ForConditionalGeneration(t5).save_pretrained("seq2seq")
    capsys.readouterr()
    assert cli.run(["evaluate", *typed.split(), *(["--length", "100"])]) == 2
    assert message in capsys.readouterr().err
    assert not (home / "results").exists()


SHARPNESS = "evaluate sharpness --tokenizer bytes --data tokens/train --length 100 --documents 2"


@pytest.mark.slow
def test_the_table_shows_what_was_asked_for_and_the_page_says_what_else_it_has(home, capsys):
    assert cli.run([*SHARPNESS.split(), "--hf", "base"]) == 0
    assert f"the page: {home}" in capsys.readouterr().out
    assert cli.run([*SHARPNESS.split(), "--hf", "same"]) == 0
    out = capsys.readouterr().out
    (titles,) = [line for line in out.split("\n\n")[-2].splitlines() if "n = " not in line]
    assert titles.split() == ["same"]
    assert f"the page, with base from earlier commands: {home}" in out
    page = (home / "results" / "side-by-side.html").read_text()
    assert '<th scope="col">base</th>' in page and '<th scope="col">same</th>' in page


def trained_on(folder):
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.save_pretrained(folder)


def another_s(folder):
    model = transformers.LlamaForCausalLM.from_pretrained("base")
    ssmax.hf.save(ssmax.hf.convert(model), folder)


def clamped(folder):
    """The same weights: what tells them apart is in the config."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    ssmax.hf.convert(model, rule="clamp", train_length=8).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "change"),
    [
        ("--hf base", "--hf base", lambda: trained_on("base")),
        ("--hf base", "--hf other/base", lambda: trained_on("other/base")),
        ("--hf base", "--hf other/base", lambda: clamped("other/base")),
        (
            "--hf base --adapter adapter",
            "--hf base --adapter adapter",
            lambda: another_s("adapter"),
        ),
    ],
    ids=["trained on", "of the same name", "of the same weights", "another s"],
)
def test_two_models_never_share_a_column(home, capsys, first, second, change):
    shutil.copytree("base", "other/base")
    assert cli.run([*SHARPNESS.split(), *first.split()]) == 0
    # It is the model that counts, not where it is.
    assert cli.run([*SHARPNESS.split(), *first.replace("base", "other/base").split()]) == 0
    before = records(home, "sharpness")
    change()
    capsys.readouterr()
    assert cli.run([*SHARPNESS.split(), *second.split()]) == 2
    name = "base+adapter" if "adapter" in second else "base"
    said = capsys.readouterr().err
    assert f"another model that is called {name!r}" in said and "--results another folder" in said
    assert records(home, "sharpness")[name] == before[name]
    assert cli.run([*SHARPNESS.split(), *second.split(), "--results", "new"]) == 0


@pytest.mark.parametrize(
    ("base", "message"),
    [("same", "same is converted already, so that adapter cannot go with it"),
     ("gpt2", "a model of model_type = llama, gpt2 has model_type = gpt2"),
     ("wide", "a model of hidden_size = 32, wide has hidden_size = 64")],
)  # fmt: skip
def test_an_adapter_is_refused_before_its_base_is_measured(home, capsys, base, message):
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300)
    transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")
    wide = transformers.AutoConfig.from_pretrained("base")
    wide.hidden_size *= 2
    transformers.LlamaForCausalLM(wide).save_pretrained("wide")
    capsys.readouterr()
    assert cli.run([*SHARPNESS.split(), "--hf", base, "--adapter", "adapter"]) == 2
    assert message in capsys.readouterr().err
    assert not (home / "results").exists()
