"""`ssmax serve`: real servers, asked by the `openai` client."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
import transformers
from small_llama import END, byte_bpe, llama

import ssmax.hf
from ssmax import cli
from ssmax.cli import serve as serving
from ssmax.export import export
from ssmax.hf.remote_code import is_our_code

TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
NEW = 16
ENGINES = os.environ.get("SSMAX_ENGINES")
VLLM = f"{ENGINES}/vllm/bin/python"
needs_vllm = [
    pytest.mark.engines,
    pytest.mark.skipif(ENGINES is None, reason="needs vLLM; make test-engines installs it"),
]


def write_model(folder, rule):
    """A converted model with a tokenizer, 32 wide heads as vLLM wants on a CPU."""
    tokenizer = byte_bpe()
    model = llama(
        rule, vocab_size=tokenizer.get_vocab_size(), hidden_size=128, max_position_embeddings=2048
    )
    model.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def served(folder, *options, key=None):
    """Start it; yields the process, the printed lines and a client."""
    port = free_port()
    command = [sys.executable, "-m", "ssmax", "serve", str(folder), "--port", str(port)]
    added = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    added |= {} if key is None else {"SSMAX_API_KEY": key}
    log = folder.parent / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=file, text=True,
            # Whoever runs the tests may ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env={**os.environ, **added},
        )  # fmt: skip
    try:
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert "/v1" in lines[0], log.read_text()[-3000:]
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=key or "none", max_retries=0
        )
        with client:
            yield process, lines, client
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def prompts(number):
    """So many of unequal lengths, some past the training length of 64."""
    texts = ["the end", "return", "def f(x): return x", "in the other end of the return "]
    return [texts[i % 4] * (1 + i // 4) + str(i) for i in range(number)]


def whole(text):
    """Without the first bytes of a character at its end, which engines hold back."""
    return text.rstrip("\ufffd")


def own_answers(folder, texts):
    """Greedy answers of the converted model itself, one by one."""
    model = ssmax.hf.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    answers = []
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt")
        out = model.generate(**tokens, max_new_tokens=NEW, do_sample=False)
        answers.append(whole(tokenizer.decode(out[0, tokens["input_ids"].shape[1] :], True)))
    return answers


def check_answers(client, folder, number=50):
    """Completions, chat, streams and many at once say what the model itself says."""
    name, greedy = folder.name, {"max_tokens": NEW, "temperature": 0.0}

    def complete(text):
        return whole(client.completions.create(model=name, prompt=text, **greedy).choices[0].text)

    texts = prompts(number)
    wanted = own_answers(folder, texts)
    assert len(set(wanted)) > number // 2
    assert [complete(text) for text in texts[:10]] == wanted[:10]
    with ThreadPoolExecutor(number) as pool:
        assert list(pool.map(complete, texts)) == wanted

    pieces = list(client.completions.create(model=name, prompt=texts[5], stream=True, **greedy))
    assert len(pieces) > 2
    text = "".join(piece.choices[0].text for piece in pieces if piece.choices)
    assert whole(text) == wanted[5]
    messages = [{"role": "user", "content": "the return"}]
    (said,) = own_answers(folder, ["user: the return\nassistant:"])
    chat = client.chat.completions.create(model=name, messages=messages, **greedy)
    assert whole(chat.choices[0].message.content) == said
    pieces = client.chat.completions.create(model=name, messages=messages, stream=True, **greedy)
    parts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert whole("".join(parts)) == said


def check_bad_requests(client, folder):
    """Each is told, and the next one is answered."""
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=folder.name, prompt={"not": "text"})
    with pytest.raises(openai.APIError):
        client.completions.create(model=folder.name, prompt="x", max_tokens=-1)
    # The connection may have been closed on an error.
    again = client.with_options(max_retries=2)
    assert again.completions.create(model=folder.name, prompt="x", max_tokens=2).choices


def check_ends(process, client):
    """Ctrl-C, and nothing is left."""
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert "stopped" in process.stdout.read()
    with pytest.raises(openai.APIConnectionError):
        client.completions.create(model="x", prompt="x")


@pytest.mark.parametrize(
    ("rule", "number"), [("ssmax", 12), pytest.param("ssmax_bias", 50, marks=pytest.mark.slow)]
)
def test_transformers_serves_what_the_model_says(rule, number, tmp_path):
    """s alone goes as Ministral 3, a bias for every head as code of ours."""
    folder = write_model(tmp_path / "model", rule)
    with served(folder, "--engine", "transformers") as (process, lines, client):
        assert lines[0].startswith("transformers serves model at http://127.0.0.1:")
        answer = subprocess.run(
            lines[1], shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        assert json.loads(answer.stdout)["choices"]
        check_answers(client, folder, number)
        check_bad_requests(client, folder)
        check_ends(process, client)


@pytest.mark.parametrize(
    "rule", [pytest.param(one, marks=needs_vllm) for one in ("ssmax", "ssmax_bias")]
)
def test_vllm_serves_what_the_model_says_to_who_has_the_key(rule, tmp_path):
    folder = write_model(tmp_path / "model", rule)
    options = ["--engine", f"vllm={VLLM}", "--dtype", "float32", "--", "--enforce-eager"]
    with served(folder, *options, key="secret") as (process, lines, client):
        assert lines[0].startswith("vllm serves model at http://127.0.0.1:")
        assert "secret" not in "".join(lines)
        check_answers(client, folder)
        check_bad_requests(client, folder)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="guess").completions.create(model="model", prompt="x")
        check_ends(process, client)


@pytest.mark.slow
def test_sigterm_ends_the_engine_too(tmp_path):
    folder = write_model(tmp_path / "model", "ssmax")
    with served(folder, "--engine", "transformers") as (process, _, client):
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model="x", prompt="x")


def test_a_folder_with_code_is_served_as_it_is_only_if_the_code_is_ours(tmp_path):
    source = write_model(tmp_path / "model", "ssmax_bias")
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    export(source, out, to="hf")
    scratch.mkdir()
    assert is_our_code(out)
    assert serving._servable(out, scratch) == (out, True)

    code = out / "modeling_ssmax.py"
    written = code.read_text()
    code.write_text(written + "\nprint('not ours')\n")
    assert not is_our_code(out)
    folder, needs_code = serving._servable(out, scratch)
    assert needs_code and folder.parent == scratch and is_our_code(folder)

    code.write_text(written)
    (out / "more.py").write_text("")
    assert not is_our_code(out)
    (out / "more.py").unlink()
    values = json.loads((out / "config.json").read_text())
    values["auto_map"]["AutoModel"] = "somebody/else--modeling_ssmax.SSMaxLlamaModel"
    (out / "config.json").write_text(json.dumps(values))
    assert not is_our_code(out)


def test_an_exported_folder_is_served_as_it_is(tmp_path):
    source = write_model(tmp_path / "model", "ssmax")
    export(source, tmp_path / "out", to="ministral")
    assert serving._servable(tmp_path / "out", tmp_path) == (tmp_path / "out", False)


@pytest.fixture
def model(tmp_path):
    """What looks like a model until it is read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "ministral3"}')
    (folder / "tokenizer.json").touch()
    return folder


def test_bad_usage_is_one_line(model, tmp_path, monkeypatch, capsys):
    def refused(*arguments):
        assert cli.run(["serve", *map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        return said

    assert "ssmax-lab export tiny-b OUT" in refused("tiny-b")
    assert "must be one of vllm, transformers" in refused(model, "--engine", "sglang")
    assert "cannot be run" in refused(model, "--engine", "vllm=/nowhere/python")
    said = refused(model, "--engine", "transformers", "--api-key", "secret")
    assert "no key" in said and "secret" not in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "--port" in refused(model, "--engine", "transformers", "--port", port)
    assert "--port" in refused(model, "--engine", "transformers", "--port", 0)
    (model / "tokenizer.json").unlink()
    assert "holds no tokenizer" in refused(model, "--engine", "transformers")
    monkeypatch.setattr(serving, "python_of", lambda engine: None)
    assert "no engine is installed" in refused(model, "--", "--tokenizer", "another")
    (model / "tokenizer.json").touch()
    monkeypatch.undo()
    odd = model.rename(tmp_path / "a@b")
    assert "rename" in refused(odd, "--engine", "transformers")
    monkeypatch.setattr(serving, "python_of", lambda engine: None)
    said = refused(odd)
    assert "pip install vllm" in said and "transformers[serving]" in said


def test_an_engine_that_does_not_start_is_told_with_its_code(model, tmp_path, capfd):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    python.chmod(0o755)
    assert cli.run(["serve", str(model), "--engine", f"vllm={python}"]) == 1
    said = capfd.readouterr().err
    assert "no such module" in said and "exit code 3" in said


def test_workers_that_outlive_their_engine_are_ended(model, tmp_path, capfd):
    python, mark = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{mark}\nexit 3\n")
    python.chmod(0o755)
    assert cli.run(["serve", str(model), "--engine", f"vllm={python}"]) == 1
    worker = int(mark.read_text())
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(worker, 0)
            time.sleep(0.1)


STUBBORN = """
import http.server, signal, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

signal.signal(signal.SIGTERM, signal.SIG_IGN)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
IMPATIENT = "from ssmax.cli import main, serve; serve.SECONDS_TO_STOP = 0.5; main()"


def test_an_engine_that_does_not_stop_when_asked_is_ended(model, tmp_path):
    """As one that waits for its clients; Ctrl-C still ends without a traceback."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{STUBBORN}")
    python.chmod(0o755)
    arguments = ["serve", str(model), "--port", str(free_port()), "--engine", f"vllm={python}"]
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    with process:
        assert "/v1" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped" in out and "Traceback" not in err
