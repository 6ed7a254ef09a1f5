"""Turn argv into an exit code, as both command lines, `ssmax` and `ssmax-lab`, do."""

import errno
import importlib
import os
import re
import signal
import sys
from types import FrameType
from typing import Any

from ssmax._extras import how_to
from ssmax._progress import logging_to_terminal
from ssmax.errors import MachineError, NonfiniteError, UsageError

STOPPED = 128 + signal.SIGINT
_OF_THE_MACHINE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
}  # fmt: skip
"""No permission, no room, or a path that leads through a file."""


def main(program: str, app_module: str) -> None:
    """Run a program whose typer app is `app` in the module; exits with its code."""
    # In the background a shell may have told us to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        code = _run_and_flush(program, app_module)
    except KeyboardInterrupt:
        code = STOPPED
    if signal.getsignal(signal.SIGINT) is _interrupted:
        # While Python ends, an exception would be a traceback.
        signal.signal(signal.SIGINT, lambda *_: os._exit(STOPPED))
    sys.exit(code)


def _run_and_flush(program: str, app_module: str) -> int:
    try:
        code = run(app_module, sys.argv[1:], program)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough, as `head` has. At its end Python would try once more to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    return code


def run(app_module: str, arguments: list[str], program: str) -> int:
    """Run a verb, return the exit code: 2 and a line for bad usage, 1 for a failed machine.

    Anything else is a bug, and keeps its traceback.
    """
    try:
        app = importlib.import_module(app_module).app
    except ModuleNotFoundError as missing:
        if missing.name != "typer":
            raise
        return _fail(program, f"the command line needs typer: {how_to('ssmax[cli]')}", 1)
    try:
        with logging_to_terminal():
            result = app(arguments, standalone_mode=False, prog_name=program)
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return _fail(program, "stopped at once", STOPPED)
    except UsageError as error:
        return _fail(program, str(error), 2)
    except (MachineError, NonfiniteError) as error:
        return _fail(program, str(error), 1)
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        return _fail(program, str(error), 1)
    except Exception as error:
        if type(error).__name__ == "Abort":
            return _fail(program, "stopped at once", STOPPED)
        # Click's own errors, whichever package carries Click.
        if hasattr(error, "format_message"):
            return _bad_call(error, program)
        raise


def _bad_call(error: Any, program: str) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 2
    command = error.ctx.command_path if error.ctx is not None else program
    return _fail(program, f"{error.format_message().rstrip('.')}; see {command} --help", 2)


def _fail(program: str, text: str, code: int) -> int:
    # Numbers of errors mean nothing to a reader; the words behind them stay.
    text = re.sub(r"\[Errno \d+\] ", "", text)
    rank = os.environ.get("RANK", "0")
    print(f"{program}{'' if rank == '0' else f' (rank {rank})'}: {text}", file=sys.stderr)
    return code


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; amid an import, which may swallow that, exit at once."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            program = os.path.basename(sys.argv[0]).encode()
            os.write(2, program + b": stopped at once\n")
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt
