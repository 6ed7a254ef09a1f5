"""`ssmax-lab export`: a run in, a Hugging Face folder out, which the library brings to engines."""

import json
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
from ssmax_lab.train import PRETRAINING, configured, load_run_model


def write_run(folder, **changes):
    """A run's folder as training leaves it: configuration, tokenizer, model."""
    tokenizer = load_tokenizer("small")
    model = native(vocab_size=tokenizer.vocabulary.size, **changes)
    save_lm(model, folder / "model")
    config = configured(PRETRAINING["quick"](), model.config.rule).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer.definition.encode() + b"\r\n")
    return folder


@pytest.mark.parametrize("rule", ["softmax", "ssmax", "ssmax_bias", "temperature", "probe"])
def test_the_folder_computes_what_the_run_does(tmp_path, capsys, rule):
    run, out = write_run(tmp_path / "run", rule=rule), tmp_path / "out"
    assert cli.run(["export", str(run), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out)}
    exported, model = ssmax.hf.from_pretrained(out).eval(), load_run_model(run).eval()
    assert isinstance(exported, transformers.LlamaForCausalLM)
    assert ssmax.hf.verify(exported).layers == 2 and exported.config.ssmax["rule"] == rule
    tokens = torch.randint(0, 768, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted = exported(tokens).logits, model(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    # Byte for byte, also where its lines end as on Windows.
    assert (out / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "def f(x): return x"
    assert tokenizer.encode(text) == load_tokenizer("small").encode(text)
    assert tokenizer.eos_token_id == exported.config.eos_token_id is not None


def test_the_command_that_it_names_brings_it_to_engines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    assert cli.run(["export", "run", "hf"]) == 0
    then = capsys.readouterr().out.strip().split("; for engines: ")[1]
    assert then == "ssmax export hf OUT --to ministral"
    # What is no Hugging Face folder is refused, with the command that makes one of a run.
    assert ssmax.cli.run(["export", "run", "OUT", "--to", "ministral"]) == 2
    assert "ssmax-lab export run OUT" in capsys.readouterr().err
    assert ssmax.cli.run([*then.split()[1:], "--check-tokens", "50"]) == 0
    assert "100.00% of choices the same" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"window": 16}, {"qk_norm": True}, {"rotary_dim": 8}])
def test_what_llama_cannot_compute_is_refused(tmp_path, capsys, changes):
    run = write_run(tmp_path / "run", **changes)
    assert cli.run(["export", str(run), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "Llama" in told and told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_stopped_leaves_nothing(tmp_path, number):
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "is written\n" for line in process.stdout)
        assert [path.name for path in tmp_path.iterdir()] == [".y.partial"]
        process.send_signal(number)
    assert process.returncode == 128 + number
    assert not list(tmp_path.iterdir())
