"""The laboratory's command line: one line and exit code 2 for bad usage, the path of a newcomer."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssmax_lab import cli
from ssmax_lab.cli import train

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


def test_from_text_to_an_answer(home, capsys):
    assert cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes"]) == 0
    assert "tokens/train: " in capsys.readouterr().out
    assert cli.run(["data", "verify", "tokens"]) == 0
    assert "checksums match" in capsys.readouterr().out
    assert cli.run(["pretrain", "--data", "tokens", *TINY]) == 0
    assert "ssmax-lab generate runs/quick-b" in capsys.readouterr().out
    assert cli.run(["pretrain", "--resume", "--set", "run.steps=4"]) == 0
    assert "done, 4 steps" in capsys.readouterr().out
    assert cli.run(["finetune", "runs/quick-b", *SHORT, "--config", "temperature"]) == 0
    assert "runs/quick-b-temperature-qa: done" in capsys.readouterr().out
    assert cli.run(["finetune", "runs/quick-b", "--out", "runs/never", "--resume"]) == 2
    assert "runs/never is no run" in (told := capsys.readouterr().err)
    assert "leave --resume out to begin one" in told
    assert cli.run(["generate", "runs/quick-b", "beer", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("beer")
    options = ["--temperature", "1", "--top-k", "5", "--max-new-tokens", "2", "--theta", "500000"]
    assert cli.run(["generate", "runs/quick-b-temperature-qa", "a", "beer", *options]) == 0
    assert capsys.readouterr().out.count("---") == 2


@pytest.mark.slow
def test_without_data_the_embedded_text_is_prepared(home, capsys):
    assert cli.run(["pretrain", "--config", "a", *TINY]) == 0
    assert "preparing 'embedded' in data/embedded-small" in capsys.readouterr().err
    assert cli.run(["pretrain", "--config", "c", *TINY]) == 0
    assert "preparing" not in capsys.readouterr().err


def test_settings_come_from_a_file_and_the_command_line_wins(home):
    cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes"])
    (home / "mine.toml").write_text("[optim]\nlr = 0.5\nweight_decay = 0.25\n")
    command = ["pretrain", "--data", "tokens", "--file", "mine.toml", *TINY]
    assert cli.run([*command, "--set", "optim.lr=0.125"]) == 0
    from ssmax_lab.train.run import read_run_config

    config = read_run_config(home / "runs" / "quick-b")
    assert (config.optim.lr, config.optim.weight_decay) == (0.125, 0.25)


def test_a_run_is_made_again_from_its_own_config(prepared, tmp_path, monkeypatch):
    from ssmax_lab.train.run import read_run_config

    monkeypatch.chdir(tmp_path)
    typed = ["pretrain", "--data", str(prepared / "tokens"), "--config", "a", *TINY]
    assert cli.run(typed) == 0
    assert cli.run(["pretrain", "--file", "runs/quick-a/config.json", "--out", "runs/again"]) == 0
    runs = tmp_path / "runs"
    assert read_run_config(runs / "again") == read_run_config(runs / "quick-a")
    first, again = ((runs / name / "metrics.jsonl").read_bytes() for name in ("quick-a", "again"))
    assert first == again


# What is typed, and what the one line must say.
BAD = [
    ("frob", "No such command 'frob'"),
    ("pretrain --frob", "--frob"),
    (
        "pretrain --preset huge",
        "one of quick, million, small, gpu, paper, long, got 'huge'",
    ),
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
    (
        "pretrain --data tokens --set run.on_nonfinite=ignore",
        "must be one of stop, skip",
    ),
    ("pretrain --data tokens --file nowhere.toml", "there is no file nowhere.toml"),
    ("pretrain --data tokens --device tpu", "device must be cpu or cuda, got 'tpu'"),
    ("pretrain --resume", "runs/quick-b is no run"),
    ("pretrain --resume --out runs/x", "leave --resume out to begin one"),
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
    (
        "reproduce --preset huge",
        "one of quick, million, small, gpu, paper, quick:theta-1k",
    ),
    ("reproduce --minutes 0", "'--minutes'"),
    ("reproduce --records out.zip", "NAME.tar.xz"),
    ("reproduce --test nowhere", "there are no prepared tokens in nowhere"),
    ("merge study nowhere.tar.xz", "nowhere.tar.xz is no part of a study: No such file"),
    ("data prepare texts afile --tokenizer bytes", "afile must be a folder, but afile is a file"),
    ("data prepare texts afile/x --tokenizer bytes", "afile/x must be a folder, but afile is a"),
    ("pretrain --data tokens --out afile/x", "afile/x must be a folder, but afile is a file"),
    ("pretrain --data tokens --out afile", "afile must be a folder, but afile is a file"),
    ("export tiny-b afile/x", "but"),
    ("export tiny-b afile", "afile is not an empty folder"),
    ("export texts out", "texts is no run"),
    ("merge afile study.tar.xz", "afile must be a folder, but afile is a file"),
    ("merge afile/x study.tar.xz", "afile/x must be a folder, but afile is a file"),
    ("reproduce --out afile", "afile must be a folder, but afile is a file"),
    ("reproduce --out afile/x", "afile/x must be a folder, but afile is a file"),
    ("reproduce --records afile/x.tar.xz", "afile must be a folder, but afile is a file"),
    ("evaluate needle tiny-b --data small --results afile", "afile must be a folder, but afile is"),
    ("reproduce --configs a,g", "there is no configuration 'g'; known: a, b, c"),
    ("reproduce --only figure9", "--only takes figure1 to figure8"),
    ("reproduce --seeds 0", "'--seeds'"),
    ("reproduce --first-seed -1", "'--first-seed'"),
    ("reproduce --workers 0", "'--workers'"),
    ("reproduce --set optim.lrr=1", "did you mean 'optim.lr'"),
    ("reproduce --data nowhere", "there are no prepared tokens in nowhere"),
    ("reproduce --questions nowhere", "there is no file nowhere"),
    ("reproduce --out texts", "texts holds something that is no study"),
    ("report nowhere", "there is no folder nowhere"),
    ("report texts", "texts is no study"),
    ("evaluate needle texts", "texts is no run"),
    ("evaluate needle gpt2", "for a Hugging Face model: --hf gpt2"),
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
    assert err.startswith("ssmax-lab: ") and err.count("\n") == 1 and "Errno" not in err
    assert sorted(path.name for path in prepared.iterdir()) == before, "it left something behind"


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
        ({"model_type": "llama"}, "evaluate --hf and serve take it"),
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
    "pretrain --data tokens --out /proc/x",
    "export tiny-b /proc/x",
    "evaluate needle tiny-b --data small --results /proc/x",
    "reproduce --out /proc/x",
])  # fmt: skip
def test_a_folder_that_cannot_be_written_is_one_line(prepared, monkeypatch, capsys, typed):
    monkeypatch.chdir(prepared)
    assert cli.run(typed.split()) == 2
    err = capsys.readouterr().err
    assert "cannot be written to: " in err and "give another folder" in err
    assert err.startswith("ssmax-lab: ") and err.count("\n") == 1 and "Errno" not in err


def test_a_disk_that_takes_no_more_is_one_line(prepared, tmp_path):
    """No file may grow past 64 KiB, which a checkpoint does; metrics.jsonl does not."""
    typed = " ".join([*TINY, "--set", "run.batch_size=2"])
    command = f"ulimit -f 64; exec '{sys.executable}' -m ssmax_lab pretrain {typed} --data"
    done = subprocess.run(
        ["bash", "-c", f"{command} '{prepared / 'tokens'}'"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ssmax-lab: ")
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr and "resume with --resume" in done.stderr
    assert not list((tmp_path / "runs" / "quick-b" / "checkpoints").glob("step-*"))


def test_a_single_text_leaves_none_for_validation(home):
    (home / "one").mkdir()
    (home / "one" / "a.txt").write_text("A single text. " * 100)
    cli.run(["data", "prepare", "one", "tokens", "--tokenizer", "bytes"])
    assert cli.run(["pretrain", "--data", "tokens", *TINY]) == 0


def test_ctrl_c_says_how_to_resume(prepared, tmp_path):
    command = [
        sys.executable, "-m", "ssmax_lab", "pretrain", "--data", str(prepared / "tokens"), *TINY,
        "--set", "run.steps=100000",
    ]  # fmt: skip

    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "quick-b" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
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
    assert train._ended(done, folder, ["pretrain"], device) == 0
    told = capsys.readouterr().out.split("steps; ")[1]
    assert shlex.split(told) == ["ssmax-lab", "generate", str(folder), "a prompt"]
    stopped = Outcome(step=3, stopped_by="SIGINT", loss=1.0)
    assert train._ended(stopped, folder, ["finetune", "my base"], device) == 130
    told = capsys.readouterr().out.split("resume with: ")[1]
    assert shlex.split(told) == [
        "ssmax-lab", "finetune", "my base", "--out", str(folder), "--resume",
        *([] if device is None else ["--device", device]),
    ]  # fmt: skip


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_a_run_goes_on_where_it_was_told_to_run(prepared, tmp_path, monkeypatch, capsys, verb):
    """The command that is told may be typed as it is, device and all."""
    from ssmax_lab.train.loop import Interrupts

    monkeypatch.chdir(tmp_path)
    begun = ["pretrain", "--data", str(prepared / "tokens"), *TINY]
    if verb == "finetune":
        assert cli.run(begun) == 0
        begun = ["finetune", "runs/quick-b", "--questions", "invented", *SHORT]
    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "asked", property(lambda self: True))
        assert cli.run([*begun, "--device", "cpu"]) == 128 + signal.SIGTERM
    told = shlex.split(capsys.readouterr().out.split("resume with: ")[1])
    assert told[1] == verb and told[told.index("--device") + 1] == "cpu"
    assert cli.run(told[1:]) == 0


def test_a_run_resumes_only_as_what_it_began_as(prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begun = ["pretrain", "--data", str(prepared / "tokens"), "--out", "runs/x", *TINY]
    assert cli.run([*begun, "--config", "a", "--set", "model.rule=ssmax"]) == 0
    resumed = ["pretrain", "--out", "runs/x", "--resume"]
    capsys.readouterr()
    for typed, message in (
        (["--config", "a"], "model.rule cannot change"),
        (["--config", "f"], "model.rule cannot change"),
        (["--config", "z"], "config must be one of"),
        (["--preset", "small"], "run.recipe cannot change"),
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
    assert "cell 4/4" in capsys.readouterr().err
    score = "evaluate needle-score runs/quick-b --length 200 --trials 2 --rule softmax"
    assert cli.run(score.split()) == 0
    assert "needle retrieval accuracy" in capsys.readouterr().out
    assert cli.run([*score.split(), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line).get("trial") for line in lines] == [None, 0, 1]
    # Measured twice, it is there once, behind its provenance.
    assert (home / "results" / "needle_score.jsonl").read_text().splitlines() == lines
    typed = "evaluate sharpness runs/quick-b --length 100 --documents 2"
    assert cli.run(typed.split()) == 0
    assert "n    101  largest weight" in capsys.readouterr().out
    # A fine-tuned run is measured on the text of its base.
    assert cli.run(["finetune", "runs/quick-b", "--questions", "invented", *SHORT]) == 0
    capsys.readouterr()
    score = "evaluate needle-score runs/quick-b-qa --length 200 --trials 1"
    assert cli.run(score.split()) == 0
    assert "needle retrieval accuracy" in capsys.readouterr().out
    names = sorted(path.name for path in (home / "results").iterdir())
    assert names == ["needle.jsonl", "needle_score.jsonl", "position_loss.jsonl", "sharpness.jsonl"]
    assert '"run": "quick-b@500000"' in (home / "results" / "needle.jsonl").read_text()
    assert '"run": "quick-b+softmax"' in (home / "results" / "needle_score.jsonl").read_text()
    for typed, message in (
        ("needle runs/quick-b --length 20", "a context of 20 tokens is too short"),
        ("needle-score runs/quick-b --depth 1.5", "depth must be from 0 to 1, got 1.5"),
        ("needle runs/quick-b --depths 0", "--depths must be at least 1, got 0"),
        ("position-loss runs/quick-b --length 10000000", "too few for a row"),
        ("sharpness nowhere", "there is no folder nowhere"),
        ("sharpness runs/quick-b --rule x", "rule must be one of"),
    ):
        assert cli.run(["evaluate", *typed.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inside", "typed"),
    [
        pytest.param(".", ".", marks=pytest.mark.slow),
        ("model", ".."),
        pytest.param(".", "../quick-b/", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_called_by_its_folder_however_that_is_typed(
    prepared, tmp_path, monkeypatch, inside, typed
):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["pretrain", "--data", str(prepared / "tokens"), *TINY]) == 0
    monkeypatch.chdir(tmp_path / "runs" / "quick-b" / inside)
    results = ["--results", str(tmp_path / "results")]
    sharpness = ["evaluate", "sharpness", typed, "--length", "100", "--documents", "1", *results]
    assert cli.run(sharpness) == 0
    assert '"run": "quick-b"' in (tmp_path / "results" / "sharpness.jsonl").read_text()
    assert cli.run(["finetune", typed, "--questions", "invented", *SHORT]) == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"quick-b", "quick-b-qa"}


def test_numbers_have_the_digits_that_a_run_was_fine_tuned_on(home, capsys):
    cli.run(["data", "prepare", "texts", "tokens", "--tokenizer", "bytes"])
    assert cli.run(["pretrain", "--data", "tokens", *TINY]) == 0
    for questions, digits in (("invented+hidden:3", 3), ("invented", 7)):
        name = ["--out", f"runs/of-{digits}"]
        typed = ["finetune", "runs/quick-b", "--questions", questions, *name, *SHORT]
        assert cli.run(typed) == 0
        capsys.readouterr()
        measured = f"runs/of-{digits} --length 150 --trials 1 --results of-{digits}"
        assert cli.run(["evaluate", "needle", "--depths", "1", *measured.split()]) == 0
        why = "" if digits == 7 else ", as the run was fine-tuned on"
        assert f"numbers of {digits} digits{why}; --digits" in capsys.readouterr().err
        # A script reads the result alone; who asks for others gets them.
        given = ["--digits", "2", "--json"]
        assert cli.run(["evaluate", "needle-score", *measured.split(), *given]) == 0
        _, line = map(json.loads, capsys.readouterr().out.splitlines())
        assert len(line["number"]) == 2


def test_a_pretraining_tells_its_price_and_begins_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["pretrain", "--preset", "long", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "131,072 tokens" in out and "8 GPUs" in out and "dollars" in out
    assert not list(tmp_path.iterdir())


def test_a_plan_is_shown_before_anything_is_done(home, capsys):
    typed = "reproduce --dry-run --configs a,b --only figure5"
    assert cli.run(typed.split()) == 0
    out = capsys.readouterr().out
    assert "loss by position" in out and "a-0, b-0, a-1, b-1" in out and "about" in out
    assert not (home / "reproduction").exists()


def test_what_needs_no_training_is_judged_at_once(home, capsys):
    typed = "reproduce --only figure1 --only figure3 --out study"
    assert cli.run(typed.split()) == 0
    out = capsys.readouterr().out
    assert "SUPPORTED" in out and "NOT MEASURED" in out and "report.html" in out
    assert cli.run(["report", "study", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {one["verdict"] for one in told["comparisons"]} == {"supported"}
    assert told["verdicts"]["C1"] == "supported" and told["verdicts"]["C5"] == "not measured"
    assert told["page"].endswith("study/report.html")
