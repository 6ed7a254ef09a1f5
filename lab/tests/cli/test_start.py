"""What a verb does first: bad usage is told before torch is imported, a bug is not bad usage."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

import ssmax_lab.study.jobs
import ssmax_lab.study.reproduction
from ssmax.errors import UsageError
from ssmax_lab import cli
from ssmax_lab.cli import training
from ssmax_lab.study import worker

MISTYPED = [
    "bench --dtype int8",
    "bench --device tpu",
    "bench --frob",
    "convert nowhere out",
    "convert nowhere out --rule ssmaxx",
    "convert nowhere out --init papper",
    "convert nowhere out --layers some",
    "data prepare nowhere out",
    "data verify nowhere",
    "evaluate all nowhere",
    "evaluate sharpness tiny-b --rule ssmaxx",
    "evaluate needle --hf nowhere",
    "evaluate needle-score tiny-b --data nowhere",
    "evaluate position-loss tiny-b --device tpu",
    "export nowhere out --to hf",
    "export tiny-b out --to gguff",
    "export tiny-b out --to hf --text nowhere",
    "finetune nowhere",
    "finetune nowhere --hf --data nowhere",
    "finetune tiny-b --config ssmaxx",
    "finetune tiny-b --questions nowhere",
    "finetune tiny-b --set optim.lrr=1",
    "merge study nowhere.tar.xz",
    "generate nowhere hello",
    "generate tiny-b hello --device tpu",
    "generate tiny-b hello --max-new-tokens -1",
    "generate tiny-b hello --temperature -1",
    "generate tiny-b hello --top-k 5",
    "generate tiny-b hello --top-p 0.9",
    "pretrain --config ssmaxx",
    "pretrain --data nowhere",
    "pretrain --frob",
    "pretrain --on-nonfinite ignore",
    "pretrain --preset huge",
    "pretrain --resume",
    "pretrain --set optim.lrr=1",
    "report nowhere",
    "reproduce --configs a,g",
    "reproduce --device tpu --dry-run",
    "reproduce --preset huge",
    "reproduce --set optim.lrr=1",
    "serve nowhere --port 0",
    "serve tiny-b --port 0 --device tpu",
]
RUN_THEM = """
import json, sys
from ssmax_lab import cli
for typed in json.loads(sys.argv[1]):
    code = cli.run(typed.split())
    print(json.dumps([code, "torch" in sys.modules or "transformers" in sys.modules]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of every mistyped command its exit code, and whether torch was imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_THEM, json.dumps(MISTYPED)],
        cwd=tmp_path_factory.mktemp("home"), capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert len(lines) == len(MISTYPED) and all(line.startswith("ssmax: ") for line in lines)
    return dict(zip(MISTYPED, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("typed", MISTYPED)
def test_bad_usage_is_told_without_torch(found, typed):
    assert found[typed] == [2, False]


def test_generation_imports_nothing_of_torch_compile(tmp_path):
    code = (
        "import sys; from ssmax.cli import app; "
        "cli.run(['generate', 'tiny-b', 'a', '--max-new-tokens', '1', '--device', 'cpu']); "
        "print(*('torch._dynamo' in sys.modules, 'torch.distributed.checkpoint' in sys.modules))"
    )
    # Triton's interpreter, which tests run with, imports more.
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=plain
    ).stdout
    assert out.splitlines()[-1] == "False False"


@pytest.mark.parametrize("bug", [ValueError("not a word"), KeyError("x"), FileNotFoundError("y")])
def test_a_bug_keeps_its_traceback(monkeypatch, bug):
    def raises(**_):
        raise bug

    monkeypatch.setattr(training, "pretrain_shown", raises)
    with pytest.raises(type(bug)) as raised:
        cli.run(["pretrain"])
    assert raised.value is bug


def test_a_bug_exits_with_1():
    code = (
        "from ssmax.cli import main, training\n"
        "def raises(**_): raise ValueError('not a word')\n"
        "training.pretrain_shown = raises\n"
        "import sys; sys.argv = ['ssmax', 'pretrain']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.endswith("ValueError: not a word\n")


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("give another"), 2), (ValueError("a bug"), None)]
)
def test_a_job_tells_bad_usage_in_one_line_and_a_bug_with_its_traceback(
    monkeypatch, capsys, error, code, tmp_path
):
    def raises(*_, **__):
        raise error

    monkeypatch.setattr(worker, "_follow_parent", lambda: None)
    monkeypatch.setattr(
        ssmax_lab.study.reproduction, "read_study", lambda _: (None, {"data": None})
    )
    monkeypatch.setattr(ssmax_lab.study.jobs, "run_job", raises)
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path), "data", "--data", "x"])
    if code is None:
        with pytest.raises(ValueError, match="a bug"):
            worker.main()
    else:
        assert worker.main() == code
        assert capsys.readouterr().out == f"{error}\n"


@pytest.mark.parametrize("module", ["typer", "numpy", "torch"])
def test_ctrl_c_during_an_import_ends_at_once(tmp_path, module):
    """Also where the module swallows the KeyboardInterrupt, as NumPy's may."""
    (tmp_path / f"{module}.py").write_text(
        textwrap.dedent("""
            import time
            print("importing", flush=True)
            try:
                time.sleep(60)
            except BaseException:
                time.sleep(60)
        """)
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", "from ssmax.cli import main; main()", "generate", "tiny-b", "a"],
        env={**os.environ, "PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert told == "ssmax: stopped at once\n"


def test_a_shape_that_no_memory_holds_is_one_line(capsys):
    assert cli.run(["bench", "--tokens", "100000000", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "GiB" in told and "fewer --tokens" in told


@pytest.mark.parametrize("verb", ["generate {} hello", "export {} out --to hf", "report {}"])
def test_a_folder_that_is_not_there_is_called_so(tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(tmp_path)
    assert cli.run(verb.format("runs/nowhere").split()) == 2
    assert "there is no folder runs/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nomodel", "./a/b", "/nowhere", "a/b/", "a/b/c"])
def test_what_is_no_name_on_the_hub_is_not_looked_for_there(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ssmax.hf.sources._answers", lambda _: pytest.fail("it was asked"))
    assert cli.run(["convert", name, "out"]) == 2
    assert "there is no" in (told := capsys.readouterr().err) and told.count("\n") == 1


def test_a_hub_that_does_not_answer_is_told_in_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ssmax.hf.sources.SECONDS_FOR_THE_HUB", 0.5)
    # It takes connections, and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        for typed in ("convert some/model out", "evaluate needle --hf some/model"):
            assert cli.run(typed.split()) == 2
            told = capsys.readouterr().err
            assert told.count("\n") == 1 and f"{address} cannot be reached" in told


def test_text_that_is_none_is_one_line(tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"\xff\xfe\x00")
    typed = ["export", "tiny-b", str(tmp_path / "out"), "--to", "hf"]
    assert cli.run([*typed, "--text", str(tmp_path / "text")]) == 2
    assert "is not text in UTF-8" in capsys.readouterr().err
