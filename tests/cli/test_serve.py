"""`ssmax serve`: what it loads, what it refuses, and a real process that drains before it ends."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import tokenizers
import torch
import transformers
from served import answers, engine_of
from small_native import native
from tiny_models import build, randomise

import ssmax.hf
from ssmax.cli import app
from ssmax.cli.serve import load_served
from ssmax.data.tokenizer import load_tokenizer
from ssmax.lm import save_lm
from ssmax.serve import export
from ssmax.serve.engine import Request
from ssmax.serve.language import transcript
from ssmax.train import PRETRAINING, configured

SMALL = load_tokenizer("small")
MODEL = native(vocab_size=SMALL.vocabulary.size)
PROMPT = SMALL.encode("def main():\n    return")
CHAT = [{"role": "user", "content": "Hello"}]


def write_run(folder):
    """As training leaves it: configuration, tokenizer, model."""
    save_lm(MODEL, folder / "model")
    config = configured(PRETRAINING["quick"](), "b").to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(SMALL.definition)


def write_native(folder):
    save_lm(MODEL, folder)
    (folder / "tokenizer.json").write_text(SMALL.definition)


def write_config(folder, text):
    folder.mkdir()
    (folder / "config.json").write_text(text)


def exported(to):
    return lambda folder: export(MODEL, folder, to=to, tokenizer=SMALL.definition)


@pytest.mark.parametrize(
    "write",
    [write_run, write_native, exported("hf"), exported("ministral"), exported("torch-export")],
    ids=["run", "save_lm", "hf", "ministral", "torch-export"],
)
def test_every_form_of_a_native_model_is_served_alike(write, tmp_path):
    write(tmp_path / "it")
    decoder, language, longest = load_served(tmp_path / "it", None, "cpu", trust_program=True)
    with engine_of(decoder, language) as engine:
        (tokens,) = answers(engine, [Request(prompt=PROMPT, max_new_tokens=20)])
    end = SMALL.vocabulary.end_of_document
    assert tokens == MODEL.generate([PROMPT], 20, stop_tokens=[end])[0]
    assert longest is None and language.ends == {end}
    assert language.encode("def main():\n    return") == PROMPT
    assert language.decode(language.encode_chat(CHAT)) == transcript(CHAT)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_converted_model_comes_with_its_dtype_template_and_ends(family, tmp_path):
    model = randomise(ssmax.hf.convert(build(family))).to(torch.bfloat16)
    model.generation_config.eos_token_id = [2, 9]
    model.save_pretrained(tmp_path / "it")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 1, "</s>": 3, "a": 5}, "a"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", chat_template="{{ messages[0].content }}"
    ).save_pretrained(tmp_path / "it")
    decoder, language, longest = load_served(tmp_path / "it", None, "cpu")
    assert decoder.empty_past()[0].dtype == torch.bfloat16
    assert language.ends == {2, 9, 3} and language.encode_chat([{"content": "a"}]) == [5]
    assert longest == {"llama": None, "gpt2": 128}[family]


@pytest.mark.parametrize(
    ("write", "options", "says"),
    [
        (lambda folder: folder.mkdir(), [], "holds no config.json"),
        (lambda folder: save_lm(MODEL, folder), [], "holds no tokenizer.json.*--tokenizer"),
        (write_run, ["--tokenizer", "gpt2"], "50,257 tokens, the model 768"),
        (exported("gguf"), [], "llama-server -m"),
        (exported("torch-export"), [], "runs what code it finds in one; give --trust-program"),
        (write_run, ["--api-key", ""], "API key is empty"),
        (write_run, ["--max-batch", "0"], "max_batch must be at least 1"),
        (write_run, ["--drain-seconds", "-5"], "--drain-seconds must be at least 0, got -5"),
        (lambda folder: write_config(folder, "[]"), [], "config.json describes no model"),
        (lambda folder: write_config(folder, "{}"), [], "config.json describes no model"),
        (write_run, ["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (write_run, ["--port", "70000"], "65535"),
        (lambda folder: build("gpt2").save_pretrained(folder),
         ["--tokenizer", "small"], "768 tokens, the model 99"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_line(write, options, says, tmp_path, capsys):
    write(tmp_path / "it")
    capsys.readouterr()
    typed = ["serve", str(tmp_path / "it"), "--port", "0", "--device", "cpu", *options]
    assert app.run(typed) == 2
    # Transformers shows how it loads.
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ssmax: ") and re.search(says, last)


def test_an_address_that_is_taken_is_known_before_the_model_is_loaded(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert app.run(["serve", str(tmp_path / "none"), "--port", port]) == 2
    assert f"port {port} of 127.0.0.1 is in use; give another --port" in capsys.readouterr().err


def test_learnt_positions_bound_what_may_be_asked(tmp_path, capsys):
    build("gpt2").save_pretrained(tmp_path / "it")
    (tmp_path / "it" / "tokenizer.json").write_text(_words())
    typed = ["serve", str(tmp_path / "it"), "--port", "0", "--max-new-tokens", "100"]
    assert app.run([*typed, "--max-prompt-tokens", "29"]) == 2
    assert "learnt 128 positions" in capsys.readouterr().err
    assert app.run(typed[:-2]) == 2
    assert "give --max-new-tokens below that, got 1024" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["onnx", "torch-export"])
def test_a_graph_remembers_how_many_positions_were_learnt(to, tmp_path):
    if to == "onnx":
        pytest.importorskip("onnxruntime")
    model = randomise(ssmax.hf.convert(build("gpt2")))
    export(model, tmp_path / "it", to=to, tokenizer=_words())
    assert load_served(tmp_path / "it", None, "cpu", trust_program=True)[2] == 128


def test_an_empty_variable_is_no_key(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SSMAX_API_KEY", "")
    assert app.run(["serve", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "API key is empty" in capsys.readouterr().err


def _words() -> str:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 5}, "a"))
    words.add_special_tokens(["</s>"])
    return words.to_str()


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/one-tuned/model", "one-tuned"), ("model", "model")]
)
def test_what_was_tuned_is_called_by_its_run(folder, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one-tuned")
    shutil.rmtree("runs/one-tuned/model")
    exported("hf")(tmp_path / folder)
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    capsys.readouterr()
    assert app.run(["serve", folder, "--port", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: http://127.0.0.1:")


def started(folder, **variables):
    command = [sys.executable, "-m", "ssmax", "serve", str(folder), "--port", "0",
               "--device", "cpu"]  # fmt: skip
    return subprocess.Popen(
        command, env={**os.environ, **variables}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_the_clients_of_the_page_are_answered(tmp_path):
    """As they stand there, but for the port."""
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (client,) = re.findall(r"```text\n(from openai import .*?)```", page, re.DOTALL)
    (curl,) = re.findall(r"```text\n(curl .*?)```", page, re.DOTALL)
    write_run(tmp_path / "quick-b")
    with started(tmp_path / "quick-b") as server:
        try:
            address = server.stdout.readline().split(": ")[1].strip().removesuffix("/v1")
            answers = []  # what an untrained model says may be any text, also "error", or none
            commands = [[sys.executable, "-c", client], ["bash", "-c", curl]]
            for command in commands if shutil.which("curl") else commands[:1]:
                assert command[-1].count("http://127.0.0.1:8000/v1") == 1
                command[-1] = command[-1].replace("http://127.0.0.1:8000", address)
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                answers.append(done.stdout)
            for answer in answers[1:]:  # curl's own exit is 0 for a refusal too
                assert json.loads(answer)["choices"], answer
        finally:
            server.kill()


def test_a_process_drains_and_ends(tmp_path):
    write_run(tmp_path / "it")
    told = []
    with started(tmp_path / "it", SSMAX_API_KEY="secret") as server:
        try:
            address = re.fullmatch(r"it: (http://127\.0\.0\.1:\d+/v1)\n", server.stdout.readline())
            with openai.OpenAI(base_url=address[1], api_key="secret") as client:
                stream = iter(
                    client.completions.create(
                        model="it", prompt=PROMPT, max_tokens=300, temperature=0, stream=True
                    )
                )
                told.append(next(stream).choices[0].text)
                server.send_signal(signal.SIGTERM)
                told += [part.choices[0].text for part in stream]
            _, complaints = server.communicate(timeout=60)
        finally:
            server.kill()
    end = SMALL.vocabulary.end_of_document
    assert "".join(told) == SMALL.decode(MODEL.generate([PROMPT], 300, stop_tokens=[end])[0])
    assert (server.returncode, complaints) == (-signal.SIGTERM, "")
