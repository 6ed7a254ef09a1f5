"""`ssmax-lab export`: a run in, the Hugging Face folder that computes the same out."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import transformers
from small_native import native

import ssmax.cli
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
@pytest.mark.parametrize("rule", ["ssmax", "ssmax_bias", "clamp", "softmax", "probe"])
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


def test_the_command_that_it_names_brings_it_to_engines(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run()
    assert cli.run(["export", "run", "hf"]) == 0
    then = capsys.readouterr().out.strip().split("; for engines: ")[1]
    assert then == "ssmax export hf OUT --to ministral"
    assert ssmax.cli.run([*then.split()[1:], "--check-tokens", "50"]) == 0
    assert "100.00% of choices the same" in capsys.readouterr().out


STOPPED = """
import signal, sys, time
from ssmax_lab import cli
import transformers

def save_pretrained(*_, **__):
    print("is written", flush=True)
    time.sleep(600)

# Whoever runs the tests may ignore it, as nohup does.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

transformers.LlamaForCausalLM.save_pretrained = save_pretrained
sys.exit(cli.run("export tiny-b y".split()))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_an_export_that_is_stopped_leaves_nothing(tmp_path, number):
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "is written\n" for line in process.stdout)
        assert [path.name for path in tmp_path.iterdir()] == [".y.partial"]
        process.send_signal(number)
    assert process.returncode == 128 + number
    assert not list(tmp_path.iterdir())
