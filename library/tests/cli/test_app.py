"""`ssmax` from the command line: bad usage is one line, a bug a traceback, logs go apart."""

import io
import logging
import subprocess
import sys

import pytest

from ssmax import cli
from ssmax._progress import log_progress, logging_to_terminal
from ssmax.errors import MachineError, NonfiniteError, UsageError

# What is typed, and what the one line must say.
BAD = [
    ("frob", "No such command 'frob'"),
    ("convert nowhere out", "there is no"),
    ("convert afile/x out", "there is no"),
    ("export nowhere out --to hf", "there is no folder nowhere"),
    ("export texts out --to hf", "config.json"),
    ("export texts afile --to hf", "not an empty folder"),
    ("export texts out --to gguff", "gguff"),
    ("export texts out --to hf --check-tokens 1", "--check-tokens"),
]


@pytest.mark.parametrize(("typed", "message"), BAD, ids=[typed for typed, _ in BAD])
def test_bad_usage_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, typed, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").touch()
    (tmp_path / "texts").mkdir()
    assert cli.run(typed.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("ssmax: ") and err.count("\n") == 1 and "Errno" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["afile", "texts"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("give another"), 2),
        (MachineError(28, "no room"), 1),
        (NonfiniteError("nan at step 7"), 1),
        (PermissionError(13, "not yours"), 1),
    ],
)
def test_what_is_no_bug_is_one_line(monkeypatch, capsys, error, code):
    def raises():
        raise error

    monkeypatch.setattr("ssmax.cli.doctor.examine", raises)
    assert cli.run(["doctor"]) == code
    err = capsys.readouterr().err
    assert err.startswith("ssmax: ") and err.count("\n") == 1 and "Errno" not in err


@pytest.mark.parametrize("bug", [ValueError("not a word"), KeyError("x"), FileNotFoundError("y")])
def test_a_bug_keeps_its_traceback(monkeypatch, bug):
    def raises():
        raise bug

    monkeypatch.setattr("ssmax.cli.doctor.examine", raises)
    with pytest.raises(type(bug)) as raised:
        cli.run(["doctor"])
    assert raised.value is bug


def test_a_bug_exits_with_1():
    code = (
        "from ssmax.cli import doctor, main\n"
        "def raises(): raise ValueError('not a word')\n"
        "doctor.examine = raises\n"
        "import sys; sys.argv = ['ssmax', 'doctor']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.endswith("ValueError: not a word\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def logged(stream):
    logger = logging.getLogger("ssmax.somewhere")
    with logging_to_terminal(stream):
        logger.info("begins")
        for step in range(1, 5):
            log_progress(logger, "step", step, 4, f"loss {step}.5")
        logger.warning("an s is below 0")
    logger.info("nobody reads this")
    return stream.getvalue()


def test_progress_is_one_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = logged(Terminal())
    shown = [line.split("\r\x1b[K")[-1] for line in out.split("\n")]
    # The last one stays, cut where it would wrap.
    assert shown == ["begins", "[####################] step 4/4  loss 4", "an s is below 0", ""]
    bars = [part for part in out.split("\r\x1b[K") if part.startswith("[")]
    assert len(bars) == 4 and bars[1] == "[##########----------] step 2/4  loss 2"


def test_elsewhere_progress_is_a_line_every_few_seconds():
    lines = logged(io.StringIO()).splitlines()
    assert lines == ["begins", "step 1/4  loss 1.5", "step 4/4  loss 4.5", "an s is below 0"]


def test_a_library_that_nobody_configured_is_silent(capsys):
    logging.getLogger("ssmax.somewhere").warning("an s is below 0")
    assert logging.getLogger("ssmax").handlers
    assert capsys.readouterr() == ("", "")


def test_the_application_decides_where_a_librarys_lines_go(caplog):
    log_progress(logging.getLogger("ssmax.somewhere"), "step", 1, 2)
    logging.getLogger("ssmax.somewhere").warning("an s is below 0")
    assert caplog.messages == ["an s is below 0"]


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert logged(io.StringIO()) == ""


def test_a_reader_that_leaves_stops_nothing():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    logged(Closed())


@pytest.mark.parametrize("name", ["nomodel", "./a/b", "/nowhere", "a/b/", "a/b/c"])
def test_what_is_no_name_on_the_hub_is_not_looked_for_there(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    asked = "transformers.PretrainedConfig.get_config_dict"
    monkeypatch.setattr(asked, lambda _: pytest.fail("it was asked"))
    assert cli.run(["convert", name, "out"]) == 2
    assert "there is no" in (told := capsys.readouterr().err) and told.count("\n") == 1
