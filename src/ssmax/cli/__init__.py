"""The command line: argv to one call."""

import os
import signal
import sys
from types import FrameType

from ssmax._extras import how_to_install

STOPPED = 128 + signal.SIGINT


def main() -> None:
    """What `ssmax` runs."""
    # In the background a shell may have told us to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        code = _run()
    except KeyboardInterrupt:
        code = STOPPED
    if signal.getsignal(signal.SIGINT) is _interrupted:
        # While Python ends, an exception would be a traceback.
        signal.signal(signal.SIGINT, lambda *_: os._exit(STOPPED))
    sys.exit(code)


def _run() -> int | str:
    try:
        from ssmax.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name != "typer":
            raise
        return f"ssmax: the command line needs the extra 'lab': {how_to_install('lab')}"
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough, as `head` has. At its end Python would try once more to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    return code


def _interrupted(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt; in the midst of an import, which may swallow that, the end at once."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"ssmax: stopped at once\n")
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt
