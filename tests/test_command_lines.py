"""Both command lines: quick help, one name for one thing, bad usage told without torch."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer.main

import ssmax
import ssmax.cli.app
import ssmax_lab
import ssmax_lab.cli.app

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = {"ssmax": ssmax.cli, "ssmax-lab": ssmax_lab.cli}
MISTYPED = [
    "ssmax convert nowhere out",
    "ssmax convert nowhere out --rule ssmaxx",
    "ssmax convert nowhere out --init papper",
    "ssmax convert nowhere out --layers some",
    "ssmax export nowhere out --to hf",
    "ssmax export nowhere out --to gguff",
    "ssmax export nowhere out --to hf --text nowhere",
    "ssmax audit nowhere",
    "ssmax audit nowhere --engine vlllm",
    "ssmax serve nowhere",
    "ssmax serve nowhere --engine vlllm",
    "ssmax-lab data prepare nowhere out",
    "ssmax-lab data verify nowhere",
    "ssmax-lab evaluate all nowhere",
    "ssmax-lab evaluate everything tiny-b",
    "ssmax-lab evaluate needle tiny-b --depths 0",
    "ssmax-lab evaluate needle-score tiny-b --depth 2",
    "ssmax-lab evaluate sharpness tiny-b --depths 3",
    "ssmax-lab evaluate sharpness tiny-b --rule ssmaxx",
    "ssmax-lab evaluate needle --hf nowhere",
    "ssmax-lab evaluate needle-score tiny-b --data nowhere",
    "ssmax-lab evaluate position-loss tiny-b --device tpu",
    "ssmax-lab export nowhere out",
    "ssmax-lab finetune nowhere",
    "ssmax-lab finetune tiny-b --config ssmaxx",
    "ssmax-lab finetune tiny-b --questions nowhere",
    "ssmax-lab finetune tiny-b --set optim.lrr=1",
    "ssmax-lab generate nowhere hello",
    "ssmax-lab generate tiny-b hello --device tpu",
    "ssmax-lab generate tiny-b hello --max-new-tokens -1",
    "ssmax-lab generate tiny-b hello --temperature -1",
    "ssmax-lab generate tiny-b hello --top-k 5",
    "ssmax-lab generate tiny-b hello --top-p 0.9",
    "ssmax-lab pretrain --config ssmaxx",
    "ssmax-lab pretrain --data nowhere",
    "ssmax-lab pretrain --frob",
    "ssmax-lab pretrain --set run.on_nonfinite=ignore",
    "ssmax-lab pretrain --preset huge",
    "ssmax-lab pretrain --resume",
    "ssmax-lab pretrain --set optim.lrr=1",
    "ssmax-lab report nowhere",
    "ssmax-lab reproduce --configs a,g",
    "ssmax-lab reproduce --device tpu --dry-run",
    "ssmax-lab reproduce --preset huge",
    "ssmax-lab reproduce --set optim.lrr=1",
]
RUN_THEM = """
import json, sys
import ssmax.cli, ssmax_lab.cli
programs = {"ssmax": ssmax.cli, "ssmax-lab": ssmax_lab.cli}
for typed in json.loads(sys.argv[1]):
    program, *words = typed.split()
    code = programs[program].run(words)
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
    assert len(lines) == len(MISTYPED)
    for typed, line in zip(MISTYPED, lines, strict=True):
        assert line.startswith(f"{typed.split()[0]}: "), line
    return dict(zip(MISTYPED, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("typed", MISTYPED)
def test_bad_usage_is_told_without_torch(found, typed):
    assert found[typed] == [2, False]


@pytest.mark.parametrize(("program", "verb"), [("ssmax", "convert"), ("ssmax_lab", "generate")])
def test_help_is_instant(program, verb):
    """By the processor's time: the clock's is that of everything else on the machine too."""
    command = [sys.executable, "-m", program, "--help"]
    times = []
    for _ in range(3):
        start = os.times()
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        end = os.times()
        user, system = end.children_user, end.children_system
        times.append(user - start.children_user + system - start.children_system)
    assert verb in out
    assert min(times) < 0.3
    code = f"import sys, {program}.cli.app; print('torch' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def verbs(program, command=None, path=()):
    command = command or typer.main.get_command(PROGRAMS[program].app.app)
    yield program, path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(program, inner, (*path, name))


EVERY = [verb for program in PROGRAMS for verb in verbs(program)]


@pytest.mark.parametrize(("program", "path"), [verb[:2] for verb in EVERY], ids=str)
def test_the_help_of_every_verb_is_whole_on_a_narrow_terminal(program, path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert PROGRAMS[program].run([*path, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage" in out
    for plural in ("[ARGS]...", "[FLAG]...", "{PART}...", "{PROMPT}..."):
        out = out.replace(plural, "")
    assert "..." not in out, "a verb's first sentence does not fit"


def test_every_option_says_what_it_is_and_a_name_is_said_in_one_way():
    said = {}
    for program, path, command in EVERY:
        for parameter in command.params:
            if "--help" in parameter.opts:
                continue
            where = f"{program} {' '.join(path)} {parameter.opts[0]}"
            assert parameter.help and parameter.help.endswith("."), where
            if parameter.param_type_name == "argument":
                assert parameter.metavar.isupper(), f"{where}: an argument is written in capitals"
            said.setdefault(parameter.opts[0], set()).add(parameter.help)
    for name in ("--device", "--json", "--theta", "--set", "--file", "--resume", "--hf"):
        assert len(said[name]) == 1, (name, said[name])


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_version_is_told(program, capsys):
    assert PROGRAMS[program].run(["--version"]) == 0
    version = {"ssmax": ssmax, "ssmax-lab": ssmax_lab}[program].__version__
    assert capsys.readouterr().out == f"{program} {version}\n"


@pytest.mark.parametrize("typed", [["ssmax"], ["ssmax_lab"], ["ssmax_lab", "evaluate", "--help"]])
def test_a_reader_that_leaves_hears_no_complaint(typed):
    command = [sys.executable, "-m", *typed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_every_command_is_on_the_page_of_the_command_line():
    text = (DOCS / "command-line.md").read_text()
    listed = re.findall(
        r"^\| `(ssmax(?:-lab)? [a-z -]+?)(?: [A-Z.]+)*` \| .+ \| \[.+\]\(.+\) \|$", text, re.M
    )
    commands = {
        " ".join([program, *path]): command
        for program, path, command in EVERY
        if not hasattr(command, "commands")
    }
    assert sorted(listed) == sorted(commands)
    for name, command in commands.items():
        (line,) = re.findall(rf"^\| `{name}[ `].*", text, re.M)
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"`(--[\w-]+)", line)) <= known, name


@pytest.mark.parametrize(
    ("program", "module"), [("ssmax", "typer"), ("ssmax_lab", "numpy"), ("ssmax_lab", "torch")]
)
def test_ctrl_c_during_an_import_ends_at_once(tmp_path, program, module):
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
    typed = ["generate", "tiny-b", "a"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {program}.cli import main; main()", *typed],
        env={**os.environ, "PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # A shell that put these tests in the background lets them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert told.endswith(": stopped at once\n") and told.count("\n") == 1
