"""The command line: quick help, one line and exit code 2 for bad usage, the path of a newcomer."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import typer.main

import ssmax
from ssmax_lab import cli
from ssmax_lab.cli import training
from ssmax_lab.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"
SHORT = [
    "--set", "run.steps=3", "--set", "run.batch_size=2", "--set", "run.micro_batch=2",
    "--set", "data.validation_windows=2",
]  # fmt: skip
TINY = [
    *SHORT, "--set", "model.num_layers=1", "--set", "model.num_heads=2",
    "--set", "model.hidden_size=16", "--set", "model.intermediate_size=16",
    "--set", "model.train_length=128",
]  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder to work in, with a little text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} bottles of beer. " * 30)
    return tmp_path


def test_help_is_instant():
    """By the processor's time: the clock's is that of everything else on the machine too."""
    command = [sys.executable, "-m", "ssmax_lab", "--help"]
    times = []
    for _ in range(3):
        start = os.times()
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        end = os.times()
        user, system = end.children_user, end.children_system
        times.append(user - start.children_user + system - start.children_system)
    assert "pretrain" in out and "generate" in out
    assert min(times) < 0.3
    code = "import sys, ssmax.cli.app; print('torch' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def verbs(command=None, path=()):
    command = command or typer.main.get_command(app)
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, (*path, name))


@pytest.mark.parametrize("verb", [path for path, _ in verbs()], ids=" ".join)
def test_the_help_of_every_verb_is_whole_on_a_narrow_terminal(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([*verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage" in out
    assert "..." not in out.replace("[ARGS]...", "").replace("{PIECE}...", "").replace(
        "{PROMPT}...", ""
    ), "a verb's first sentence does not fit"


def test_every_option_says_what_it_is_and_a_name_is_said_in_one_way():
    said = {}
    for path, command in verbs():
        for parameter in command.params:
            if "--help" in parameter.opts:
                continue
            where = f"{' '.join(path)} {parameter.opts[0]}"
            assert parameter.help and parameter.help.endswith("."), where
            if parameter.param_type_name == "argument":
                assert parameter.metavar.isupper(), f"{where}: an argument is written in capitals"
            said.setdefault(parameter.opts[0], set()).add(parameter.help)
    for name in ("--device", "--json", "--theta", "--set", "--file", "--resume", "--hf", "--open"):
        # finetune's --hf is a switch: its model is the argument.
        assert len(said[name]) == (2 if name == "--hf" else 1), (name, said[name])


def test_the_version_is_told(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"ssmax {ssmax.__version__}\n"


@pytest.mark.parametrize("typed", [[], ["evaluate", "--help"]])
def test_a_reader_that_leaves_hears_no_complaint(typed):
    command = [sys.executable, "-m", "ssmax_lab", *typed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_from_text_to_an_answer(home, capsys):
    assert cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes"]) == 0
    assert "to train on" in capsys.readouterr().out
    assert cli.run(["data", "verify", "tokens"]) == 0
    assert "whole" in capsys.readouterr().out
    assert cli.run(["pretrain", "--data", "tokens", *TINY]) == 0
    assert "ssmax-lab generate runs/quick-b" in capsys.readouterr().out
    assert cli.run(["pretrain", "--resume", "--set", "run.steps=4"]) == 0
    assert "done, 4 steps" in capsys.readouterr().out
    assert cli.run(["finetune", "runs/quick-b", *SHORT, "--config", "temperature"]) == 0
    assert "runs/quick-b-temperature-qa: done" in capsys.readouterr().out
    assert cli.run(["finetune", "runs/quick-b", "--name", "never", "--resume"]) == 2
    assert "runs/never is no run" in (told := capsys.readouterr().err)
    assert "leave --resume out to begin one" in told
    assert cli.run(["generate", "runs/quick-b", "beer", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("beer")
    options = ["--temperature", "1", "--top-k", "5", "--max-new-tokens", "2", "--theta", "500000"]
    assert cli.run(["generate", "runs/quick-b-temperature-qa", "a", "beer", *options]) == 0
    assert capsys.readouterr().out.count("---") == 2


def test_without_data_the_embedded_text_is_prepared(home, capsys):
    assert cli.run(["pretrain", "--config", "a", *TINY]) == 0
    out = capsys.readouterr().out
    assert "preparing 'embedded' in data/embedded-small" in out
    assert cli.run(["pretrain", "--config", "c", *TINY]) == 0
    assert "preparing" not in capsys.readouterr().out


def test_settings_come_from_a_file_and_the_command_line_wins(home):
    cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes"])
    (home / "mine.toml").write_text("[optim]\nlr = 0.5\nweight_decay = 0.25\n")
    command = ["pretrain", "--data", "tokens", "--file", "mine.toml", *TINY]
    assert cli.run([*command, "--set", "optim.lr=0.125"]) == 0
    from ssmax_lab.train import read_run_config

    config = read_run_config(home / "runs" / "quick-b")
    assert (config.optim.lr, config.optim.weight_decay) == (0.125, 0.25)


def test_a_run_is_made_again_from_its_own_config(prepared, tmp_path, monkeypatch):
    from ssmax_lab.train import read_run_config

    monkeypatch.chdir(tmp_path)
    typed = ["pretrain", "--data", str(prepared / "tokens"), "--config", "a", *TINY]
    assert cli.run(typed) == 0
    assert cli.run(["pretrain", "--file", "runs/quick-a/config.json", "--name", "again"]) == 0
    runs = tmp_path / "runs"
    assert read_run_config(runs / "again") == read_run_config(runs / "quick-a")
    first, again = ((runs / name / "metrics.jsonl").read_bytes() for name in ("quick-a", "again"))
    assert first == again


# What is typed, and what the one line must say.
BAD = [
    ("frob", "No such command 'frob'"),
    ("pretrain --frob", "--frob"),
    ("pretrain --preset huge", "--preset must be one of quick, small, gpu, paper, got 'huge'"),
    ("pretrain --config z", "config must be one of a, b, c, d, f"),
    ("pretrain --config e", "train a"),
    ("pretrain --data nowhere", "no prepared tokens in data.folder, 'nowhere'"),
    ("pretrain --data texts", "texts"),
    ("pretrain --data tokens --set optim.lrr=1", "did you mean 'optim.lr'"),
    ("pretrain --data tokens --set optim.lr=-1", "optim.lr must be positive"),
    ("pretrain --data tokens --set optim.lr", "key=value"),
    ("pretrain --data tokens --set model.vocab_size=100", "a vocabulary of 257"),
    ("pretrain --data tokens --set model.train_length=1000000", "too few for one window"),
    ("pretrain --data tokens --set run.parallel=tensor", "run.parallel must be one of"),
    ("pretrain --data tokens --on-nonfinite ignore", "run.on_nonfinite must be one of stop, skip"),
    ("pretrain --data tokens --file nowhere.toml", "there is no file nowhere.toml"),
    ("pretrain --data tokens --device tpu", "device must be cpu or cuda, got 'tpu'"),
    ("pretrain --resume", "runs/quick-b is no run"),
    ("pretrain --resume --name x", "leave --resume out to begin one"),
    ("finetune nowhere", "there is no folder nowhere"),
    ("finetune tiny-c", "or tiny-a, tiny-b, tiny-a-qa, tiny-b-qa, which come with the package"),
    ("finetune", "RUN"),
    ("generate nowhere hello", "there is no folder nowhere"),
    ("generate tiny-c hello", "or tiny-a, tiny-b, tiny-a-qa, tiny-b-qa, which come with"),
    ("generate", "RUN"),
    ("data prepare nowhere tokens2", "there is no file or folder 'nowhere'"),
    ("data prepare texts tokens --tokenizer gpt2", "holds another preparation"),
    ("data prepare texts tokens3 --tokenizer nowhere.json", "nowhere.json"),
    ("data prepare texts tokens3 --validation-fraction 2", "validation_fraction"),
    ("data prepare texts tokens3 --workers 0", "workers must be at least 1"),
    ("data prepare texts tokens3 --workers two", "--workers"),
    ("data verify nowhere", "nowhere"),
    ("data frob", "No such command 'frob'"),
    ("reproduce --preset huge", "--preset must be one of quick, small, gpu, paper, quick:theta-1k"),
    ("reproduce --minutes 0", "minutes must be more than 0"),
    ("reproduce --records out.zip", "NAME.tar.xz"),
    ("reproduce --test nowhere", "there are no prepared tokens in nowhere"),
    ("gather study nowhere.tar.xz", "there is no file nowhere.tar.xz"),
    ("data prepare texts afile --tokenizer bytes", "afile must be a folder, but afile is a file"),
    ("data prepare texts afile/x --tokenizer bytes", "afile/x must be a folder, but afile is a"),
    ("pretrain --data tokens --runs afile", "afile/quick-b must be a folder, but afile is a file"),
    ("pretrain --data tokens --runs . --name afile", "afile must be a folder, but afile is a file"),
    ("export tiny-b afile/x --to hf --check-tokens 50", "but"),
    ("export tiny-b out --to hf --text nowhere", "nowhere cannot be read: No such file"),
    ("export tiny-b out --to hf --text texts", "texts cannot be read: Is a directory"),
    ("export tiny-b out --to hf --text afile", "at least 2 tokens to compare on, afile holds 0"),
    ("gather afile study.tar.xz", "afile must be a folder, but afile is a file"),
    ("gather afile/x study.tar.xz", "afile/x must be a folder, but afile is a file"),
    ("reproduce --out afile", "afile must be a folder, but afile is a file"),
    ("reproduce --out afile/x", "afile/x must be a folder, but afile is a file"),
    ("reproduce --records afile/x.tar.xz", "afile must be a folder, but afile is a file"),
    ("evaluate needle tiny-b --data small --results afile", "afile must be a folder, but afile is"),
    ("reproduce --configs a,g", "there is no configuration 'g'; known: a, b, c"),
    ("reproduce --only figure9", "--only takes figure1 to figure8"),
    ("reproduce --seeds 0", "seeds must be at least 1, got 0"),
    ("reproduce --workers 0", "workers must be at least 1, got 0"),
    ("reproduce --set optim.lrr=1", "did you mean 'optim.lr'"),
    ("reproduce --data nowhere", "there are no prepared tokens in nowhere"),
    ("reproduce --questions nowhere", "there is no file nowhere"),
    ("reproduce --out texts", "texts holds something that is no study"),
    ("report nowhere", "there is no folder nowhere"),
    ("report texts", "texts is no study"),
    ("evaluate needle texts", "texts is no run"),
    ("evaluate needle gpt2", "for a Hugging Face model: --hf gpt2"),
    ("convert tiny-b out", "ssmax export tiny-b OUT --to hf makes a Hugging Face model of it"),
    ("bench --heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads"),
    ("bench --dtype int8", "--dtype must be one of"),
    ("bench --tokens 0", "--tokens must be at least 1"),
    ("bench --heads 0", "--heads must be at least 1"),
    ("bench --kv-heads 0", "--kv-heads must be at least 1"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text(f"{number} bottles of beer. " * 30)
    tokens = str(folder / "tokens")
    here = os.getcwd()
    os.chdir(folder)
    assert cli.run(["data", "prepare", "texts", tokens, "--tokenizer", "bytes"]) == 0
    assert cli.run(["data", "prepare", "texts", "small", "--tokenizer", "small"]) == 0
    (folder / "afile").touch()
    (folder / "study.tar.xz").touch()
    os.chdir(here)
    return folder


@pytest.mark.parametrize(("typed", "message"), BAD, ids=[typed for typed, _ in BAD])
def test_bad_usage_is_one_line_and_exit_code_2(prepared, monkeypatch, capsys, typed, message):
    monkeypatch.chdir(prepared)
    before = sorted(path.name for path in prepared.iterdir())
    assert cli.run(typed.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("ssmax: ") and err.count("\n") == 1 and "Errno" not in err
    assert sorted(path.name for path in prepared.iterdir()) == before, "it left something behind"


@pytest.mark.parametrize("verb", ["pretrain --data {data}", "finetune tiny-b"])
@pytest.mark.parametrize("name", ["../x", "../../x", "a/b", "/tmp/x", "", ".", "..", "a\\b", "x/"])
def test_the_name_of_a_run_stays_in_the_folder_of_runs(
    prepared, tmp_path, monkeypatch, capsys, verb, name
):
    (tmp_path / "here" / "now").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "now")
    typed = verb.format(data=prepared / "tokens").split()
    assert cli.run([*typed, *SHORT, "--name", name]) == 2
    told = capsys.readouterr().err
    assert "the name of a run must be" in told and repr(name) in told and told.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "now"]


def test_a_shard_with_a_flipped_bit_is_named(prepared, tmp_path, monkeypatch, capsys):
    import shutil

    shutil.copytree(prepared / "tokens", tmp_path / "tokens")
    path = next((tmp_path / "tokens" / "train").glob("*.shard"))
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    for command in ("data verify tokens", "pretrain --data tokens"):
        assert cli.run(command.split()) == 2
        assert path.name in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_named(home, capsys):
    cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes"])
    assert cli.run(["pretrain", "--data", "tokens", *TINY]) == 0
    path = home / "runs" / "quick-b" / "config.json"
    path.write_text(path.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
    assert cli.run(["pretrain", "--resume"]) == 2
    assert "is the checkpoint of another model" in capsys.readouterr().err


def test_a_model_that_is_no_run_is_told_where_it_goes(tmp_path, capsys):
    path = tmp_path / "config.json"
    for content, message in (
        ({"model_type": "llama"}, "evaluate --hf, finetune --hf and serve take it"),
        ({"format": "ssmax-lm-1"}, "give the folder of the run that holds it"),
    ):
        path.write_text(json.dumps(content))
        assert cli.run(["generate", str(tmp_path), "hello"]) == 2
        assert message in capsys.readouterr().err


def test_a_prompt_that_cannot_be_continued_is_not_shown(capsys):
    assert cli.run(["generate", "tiny-b", "hello", "--temperature", "-1"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "temperature must be at least 0" in told.err


@pytest.mark.parametrize("prompts", [[""], ["hello", ""]])
def test_an_empty_prompt_is_refused_as_text(capsys, prompts):
    assert cli.run(["generate", "tiny-b", *prompts]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert "a prompt must hold at least one token, got ''" in told.err and "shape" not in told.err


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody may write")
@pytest.mark.parametrize("typed", [
    "data prepare texts /proc --tokenizer bytes",
    "data prepare texts /proc/x --tokenizer bytes",
    "pretrain --data tokens --runs /proc/x",
    "export tiny-b /proc/x --to hf --check-tokens 50",
    "evaluate needle tiny-b --data small --results /proc/x",
    "reproduce --out /proc/x",
])  # fmt: skip
def test_a_folder_that_cannot_be_written_is_one_line(prepared, monkeypatch, capsys, typed):
    monkeypatch.chdir(prepared)
    assert cli.run(typed.split()) == 2
    err = capsys.readouterr().err
    assert "cannot be written to: " in err and "give another folder" in err
    assert err.startswith("ssmax: ") and err.count("\n") == 1 and "Errno" not in err


def test_a_disk_that_takes_no_more_is_one_line(prepared, tmp_path):
    """No file may grow past 64 KiB, which a checkpoint does; the journal does not."""
    typed = " ".join([*TINY, "--set", "run.batch_size=2", "--runs", "runs"])
    command = f"ulimit -f 64; exec '{sys.executable}' -m ssmax-lab pretrain {typed} --data"
    done = subprocess.run(
        ["bash", "-c", f"{command} '{prepared / 'tokens'}'"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "cannot be written" in done.stderr and "go on with --resume" in done.stderr
    assert not list((tmp_path / "runs" / "quick-b" / "checkpoints").glob("step-*"))


def test_a_single_text_leaves_none_for_validation(home):
    (home / "one").mkdir()
    (home / "one" / "a.txt").write_text("A single text. " * 100)
    cli.run(["data", "prepare", "one", "tokens", "--tokenizer", "bytes"])
    assert cli.run(["pretrain", "--data", "tokens", *TINY]) == 0


def test_ctrl_c_says_how_to_go_on(prepared, tmp_path):
    command = [
        sys.executable, "-m", "ssmax-lab", "pretrain", "--data", str(prepared / "tokens"), *TINY,
        "--set", "run.steps=100000",
    ]  # fmt: skip

    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    journal = tmp_path / "runs" / "quick-b" / "metrics.jsonl"
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped by SIGINT after step" in out and "--resume" in out


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_command_to_type_next_is_quoted(capsys, device):
    from ssmax_lab.train.loop import Outcome

    folder = Path("all runs") / "my run é"
    done = Outcome(step=3, stopped_by=None, loss=1.0)
    assert training._ended(done, folder, ["pretrain"], device) == 0
    told = capsys.readouterr().out.split("steps; ")[1]
    assert shlex.split(told) == ["ssmax-lab", "generate", str(folder), "a prompt"]
    stopped = Outcome(step=3, stopped_by="SIGINT", loss=1.0)
    assert training._ended(stopped, folder, ["finetune", "my base"], device) == 130
    told = capsys.readouterr().out.split("go on with: ")[1]
    assert shlex.split(told) == [
        "ssmax-lab", "finetune", "my base", "--runs", "all runs", "--name", "my run é",
        *([] if device is None else ["--device", device]), "--resume",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_a_run_goes_on_where_it_was_told_to_run(prepared, tmp_path, monkeypatch, capsys, verb):
    """The command that is told may be typed as it is, device and all."""
    from ssmax_lab.train.interrupt import Interrupts

    monkeypatch.chdir(tmp_path)
    begun = ["pretrain", "--data", str(prepared / "tokens"), *TINY]
    if verb == "finetune":
        assert cli.run(begun) == 0
        begun = ["finetune", "runs/quick-b", "--questions", "invented", *SHORT]
    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "asked", property(lambda self: True))
        assert cli.run([*begun, "--device", "cpu"]) == 128 + signal.SIGTERM
    told = shlex.split(capsys.readouterr().out.split("go on with: ")[1])
    assert told[1] == verb and told[told.index("--device") + 1] == "cpu"
    assert cli.run(told[1:]) == 0


def test_a_run_goes_on_only_as_what_it_began_as(prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begun = ["pretrain", "--data", str(prepared / "tokens"), "--name", "x", *TINY]
    assert cli.run([*begun, "--config", "a", "--set", "model.rule=ssmax"]) == 0
    resumed = ["pretrain", "--name", "x", "--resume"]
    capsys.readouterr()
    for typed, message in (
        (["--config", "a"], "runs/x began under the rule 'ssmax', not 'softmax'; resume without"),
        (["--config", "f"], "began under the rule 'ssmax', not 'softmax' then 'ssmax'"),
        (["--config", "z"], "config must be one of"),
        (["--preset", "small"], "runs/x began under the preset 'quick', not 'small'"),
    ):
        assert cli.run([*resumed, *typed]) == 2
        assert message in capsys.readouterr().err
    # As it began, by whatever words.
    assert cli.run([*resumed, "--config", "b", "--preset", "quick"]) == 0
    assert cli.run([*begun, "--config", "a", "--set", "model.rule=ssmax", "--resume"]) == 0


def test_a_run_is_measured(home, capsys):
    cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes"])
    assert cli.run(["pretrain", "--data", "tokens", *TINY]) == 0
    capsys.readouterr()
    typed = "evaluate position-loss runs/quick-b --length 300 --documents 2"
    assert cli.run(typed.split()) == 0
    assert "positions    256 to    300" in capsys.readouterr().out
    assert cli.run(typed.replace("documents 2", "documents 9999").split()) == 0
    assert re.search(r"\d+ documents \(9999 asked for: the text", capsys.readouterr().out)
    grid = "evaluate needle runs/quick-b --length 150 --length 200 --depths 2 --trials 2"
    assert cli.run([*grid.split(), "--theta", "500000"]) == 0
    assert "cell 4/4" in capsys.readouterr().out
    score = "evaluate needle-score runs/quick-b --length 200 --trials 2 --rule softmax"
    assert cli.run(score.split()) == 0
    assert "of 2 numbers found" in capsys.readouterr().out
    assert cli.run([*score.split(), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["trial"] for line in lines] == [0, 1]
    # Measured twice, it is there once.
    assert len((home / "results" / "needle_score.jsonl").read_text().splitlines()) == 2
    typed = "evaluate fading runs/quick-b --length 100 --documents 2"
    assert cli.run(typed.split()) == 0
    assert "n    101  largest weight" in capsys.readouterr().out
    # A fine-tuned run is measured on the text of its base.
    assert cli.run(["finetune", "runs/quick-b", "--questions", "invented", *SHORT]) == 0
    capsys.readouterr()
    score = "evaluate needle-score runs/quick-b-qa --length 200 --trials 1"
    assert cli.run(score.split()) == 0
    assert "of 1 numbers found" in capsys.readouterr().out
    names = sorted(path.name for path in (home / "results").iterdir())
    assert names == ["fading.jsonl", "needle.jsonl", "needle_score.jsonl", "position_loss.jsonl"]
    assert '"run": "quick-b@500000"' in (home / "results" / "needle.jsonl").read_text()
    assert '"run": "quick-b+softmax"' in (home / "results" / "needle_score.jsonl").read_text()
    for typed, message in (
        ("needle runs/quick-b --length 20", "a context of 20 tokens is too short"),
        ("needle-score runs/quick-b --depth 1.5", "depth must be from 0 to 1, got 1.5"),
        ("needle runs/quick-b --depths 0", "a grid needs"),
        ("position-loss runs/quick-b --length 10000000", "too few for a row"),
        ("fading nowhere", "there is no folder nowhere"),
        ("fading runs/quick-b --rule x", "rule must be one of"),
    ):
        assert cli.run(["evaluate", *typed.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("inside", "typed"), [(".", "."), ("model", ".."), (".", "../quick-b/")])
def test_a_run_is_called_by_its_folder_however_that_is_typed(
    prepared, tmp_path, monkeypatch, inside, typed
):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["pretrain", "--data", str(prepared / "tokens"), *TINY]) == 0
    monkeypatch.chdir(tmp_path / "runs" / "quick-b" / inside)
    results = ["--results", str(tmp_path / "results")]
    fading = ["evaluate", "fading", typed, "--length", "100", "--documents", "1", *results]
    assert cli.run(fading) == 0
    assert '"run": "quick-b"' in (tmp_path / "results" / "fading.jsonl").read_text()
    assert cli.run(["finetune", typed, "--questions", "invented", *SHORT]) == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"quick-b", "quick-b-qa"}


def test_numbers_have_the_digits_that_a_run_was_fine_tuned_on(home, capsys):
    cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes"])
    assert cli.run(["pretrain", "--data", "tokens", *TINY]) == 0
    for questions, digits in (("hidden", 4), ("invented+hidden:3", 3), ("invented", 7)):
        name = ["--name", f"of-{digits}"]
        typed = ["finetune", "runs/quick-b", "--questions", questions, *name, *SHORT]
        assert cli.run(typed) == 0
        capsys.readouterr()
        measured = f"runs/of-{digits} --length 150 --trials 1 --results of-{digits}"
        assert cli.run(["evaluate", "needle", "--depths", "1", *measured.split()]) == 0
        why = "" if digits == 7 else ", as the run was fine-tuned on"
        assert f"numbers of {digits} digits{why}; --digits" in capsys.readouterr().out
        # A script reads the result alone; who asks for others gets them.
        for given, expected in ([], digits), (["--digits", "2"], 2):
            assert cli.run(["evaluate", "needle-score", *measured.split(), *given, "--json"]) == 0
            (line,) = map(json.loads, capsys.readouterr().out.splitlines())
            assert len(line["number"]) == expected


def test_a_plan_is_shown_before_anything_is_done(home, capsys):
    typed = "reproduce --dry-run --configs a,b --only figure5"
    assert cli.run(typed.split()) == 0
    out = capsys.readouterr().out
    assert "loss by position" in out and "a-0, b-0, a-1, b-1" in out and "about" in out
    assert not (home / "reproduction").exists()


def test_what_needs_no_training_is_judged_at_once(home, capsys):
    typed = "reproduce --only figure1 --only figure3 --out study --no-open"
    assert cli.run(typed.split()) == 0
    out = capsys.readouterr().out
    assert "SUPPORTED" in out and "NOT MEASURED" in out and "report.html" in out
    assert cli.run(["report", "study", "--json", "--no-open"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {one["verdict"] for one in told["comparisons"]} == {"supported"}
    assert told["page"].endswith("study/report.html")


def test_every_command_is_on_the_page_of_the_command_line():
    text = (DOCS / "command-line.md").read_text()
    listed = re.findall(
        r"^\| `ssmax ([\w -]+?)(?: [A-Z.]+)*` \| .+ \| \[.+\]\(.+\) \|$", text, re.M
    )
    commands = {path: command for path, command in verbs() if not hasattr(command, "commands")}
    assert sorted(listed) == sorted(map(" ".join, commands))
    for path, command in commands.items():
        (line,) = re.findall(rf"^\| `ssmax {' '.join(path)}[ `].*", text, re.M)
        known = {name for parameter in command.params for name in parameter.opts}
        assert set(re.findall(r"`(--[\w-]+)", line)) <= known, path


def test_every_extra_is_in_the_table_of_the_quick_start():
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    text = (DOCS / "quickstart.md").read_text().split("## Extras")[1]
    listed = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert listed == list(project["optional-dependencies"])


def test_bench_tells_the_cost_of_a_shape(capsys):
    typed = "bench --tokens 16 --heads 4 --kv-heads 2 --head-dim 8 --device cpu"
    assert cli.run([*typed.split(), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["heads"], told["kv_heads"]) == (4, 2)
    costs = told["costs"]
    assert [cost["mode"] for cost in costs] == ["forward", "forward+backward"]
    assert all(cost["ratio"] > 0 for cost in costs)
    assert cli.run(typed.split()) == 0
    assert "softmax" in capsys.readouterr().out
