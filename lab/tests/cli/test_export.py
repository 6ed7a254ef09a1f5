"""`ssmax-lab export`: a run in, the Hugging Face folder that computes the same out."""

import json
import shutil

import pytest
import torch
import transformers
from small_native import native

import ssmax.hf
from ssmax_lab import cli
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.model import save_lm
from ssmax_lab.tiny import run_folder

TOKENIZER = load_tokenizer("small")


@pytest.fixture
def run(tmp_path):
    """A run's folder as training leaves it, with another model in it."""

    def written(**changes):
        model = native(vocab_size=TOKENIZER.vocabulary.size, **changes)
        shutil.copytree(run_folder("tiny-b"), tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "model")
        save_lm(model, tmp_path / "run" / "model")
        return model

    return written


@torch.no_grad()
@pytest.mark.parametrize("rule", ["ssmax", "ssmax_bias", "qwen_logn", "softmax", "probe"])
def test_a_run_computes_the_same_in_transformers(rule, run, tmp_path):
    model = run(rule=rule, train_length=256)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    loaded = ssmax.hf.from_pretrained(tmp_path / "out").eval()
    assert ssmax.hf.verify(loaded).layers == 2 and loaded.config.ssmax["rule"] == rule
    tokens = torch.randint(99, (1, 150), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)


def test_its_tokenizer_comes_along_and_says_which_token_ends_a_text(run, tmp_path, capsys):
    run()
    typed = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert cli.run([*typed, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(tmp_path / "out")}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert config["eos_token_id"] == loaded.eos_token_id == TOKENIZER.vocabulary.end_of_document
    assert loaded.encode("if x:\n\ty = 12") == TOKENIZER.encode("if x:\n\ty = 12")
    assert cli.run(typed) == 2
    assert "not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"window": 8}, {"rotary_dim": 8}])
def test_what_llama_has_not_is_refused(changes, run, tmp_path, capsys):
    run(**changes)
    (name,) = changes
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert f"{name}=" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
