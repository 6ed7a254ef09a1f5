"""`ssmax export` from the command line: a converted model in, a checked form out."""

import json
import re
import signal
import subprocess
import sys

import peft
import pytest
import torch
import transformers
from small_llama import END, byte_bpe, llama
from tiny_models import build, randomise
from tokenizers import Tokenizer, models, pre_tokenizers

import ssmax.hf
from ssmax import cli


@pytest.fixture
def source(tmp_path):
    """A converted model's folder with its tokenizer."""
    folder, tokenizer = tmp_path / "model", byte_bpe()
    llama(vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(
        folder
    )
    return folder


def test_a_model_is_exported_with_progress_and_checked_on_real_text(source, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["export", str(source), str(out), "--to", "gguf", "--check-tokens", "700"]
    assert cli.run(arguments) == 0
    said, logged = capsys.readouterr()
    assert "100.00% of choices the same" in said and "checked" not in said
    assert "checked token 700/700" in logged
    assert {path.name for path in out.iterdir()} == {"README.md", "model.gguf", "tokenizer.json"}
    assert cli.run(arguments) == 2
    assert "not an empty folder" in capsys.readouterr().err


STOPPED = """
import signal, sys, time
from ssmax import cli
from ssmax.export import checking

def compare(*_):
    print("is written", flush=True)
    time.sleep(600)

# Whoever runs the tests may ignore it, as nohup does.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

checking.compare = compare
sys.exit(cli.run("export model y --to hf --check-tokens 50".split()))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_an_export_that_is_stopped_leaves_nothing(source, tmp_path, number):
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "is written\n" for line in process.stdout)
        assert {path.name for path in tmp_path.iterdir()} == {"model", ".y.partial"}
        process.send_signal(number)
    assert process.returncode == (128 + number)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_json_is_one_object(source, tmp_path, capsys):
    assert cli.run(["export", str(source), str(tmp_path / "out"), "--to", "hf", "--json",
                    "--check-tokens", "200"]) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 200 and found["same_choice"] == 1.0
    assert ssmax.hf.from_pretrained(tmp_path / "out").config.ssmax["rule"] == "ssmax"


def test_remote_code_is_exported_without_a_question(tmp_path, monkeypatch, capfd):
    source = tmp_path / "code"
    ssmax.hf.save_remote_code(ssmax.hf.convert(build("llama")), source)
    (source / "modeling_ssmax.py").write_text("raise SystemExit('run')")
    words = Tokenizer(models.WordLevel({str(number): number for number in range(99)}, "1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "n")
    capfd.readouterr()
    typed = ["export", str(source), str(tmp_path / "out"), "--to", "hf", "--check-tokens", "20"]
    assert cli.run(typed) == 0
    assert not asked and "instantiate" not in capfd.readouterr().err


def test_the_tokenizer_is_exported_byte_for_byte(source, tmp_path):
    """Also where its lines end as on Windows."""
    definition = (source / "tokenizer.json").read_bytes() + b"\r\n"
    (source / "tokenizer.json").write_bytes(definition)
    typed = ["export", str(source), str(tmp_path / "out"), "--to", "gguf", "--check-tokens", "20"]
    assert cli.run(typed) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == definition


def test_a_run_of_the_laboratory_is_told_what_makes_a_folder_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"model": {}, "run": {}}')
    assert cli.run(["export", "run", "out", "--to", "hf"]) == 2
    assert "ssmax-lab export run OUT" in capsys.readouterr().err


def test_a_free_bias_is_one_line_and_fit_tells_its_cost(tmp_path, capsys):
    llama("ssmax_bias").save_pretrained(tmp_path / "model")
    capsys.readouterr()
    arguments = ["export", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "ministral",
                 "--check-tokens", "100"]  # fmt: skip
    assert cli.run(arguments) == 2
    said = capsys.readouterr().err
    assert "--fit" in said.splitlines()[-1] and "Traceback" not in said
    assert cli.run([*arguments, "--fit"]) == 0
    assert "fitted to s log n + b" in capsys.readouterr().out


def test_a_converted_model_keeps_its_dtype_where_the_form_has_one(tmp_path, capsys):
    model = randomise(ssmax.hf.convert(build("llama"), init="paper", train_length=64))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for to in ("ministral", "torch-export"):
        assert cli.run(["export", str(tmp_path / "model"), str(tmp_path / to), "--to", to,
                        "--check-tokens", "100"]) == 0, capsys.readouterr().err  # fmt: skip
    assert "bfloat16" in (tmp_path / "ministral" / "config.json").read_text()


def write_adapter(folder):
    ssmax.hf.save(ssmax.hf.convert(build("llama")), folder)


def write_peft_adapter(folder):
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["ssmax"])
    peft.get_peft_model(ssmax.hf.convert(build("llama")), config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("write", "base", "says"),
    [
        (write_adapter, lambda: build("llama"), "an adapter, s and b without the model"),
        (write_peft_adapter, lambda: ssmax.hf.convert(build("llama")), "PEFT's adapter without"),
    ],
    ids=["ssmax", "peft"],
)
def test_an_adapter_is_called_one_and_its_advice_makes_a_model(
    write, base, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write("adapter")
    out = ["out", "--to", "hf", "--check-tokens", "20"]
    capsys.readouterr()
    assert cli.run(["export", "adapter", *out]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"adapter holds {says}" in said
    advice = re.search(r"; (\S+\(base, 'adapter'\)\S+\(OUT\)) makes a whole model", said)[1]
    names = {"ssmax": ssmax, "PeftModel": peft.PeftModel, "base": base(), "OUT": "whole"}
    # The message's own words, as a reader would type them.
    eval(advice, names)
    assert cli.run(["export", "whole", *out]) == 0


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "llama"}', "{}"])
def test_what_is_no_model_is_bad_usage(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert cli.run(["export", str(tmp_path), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()
