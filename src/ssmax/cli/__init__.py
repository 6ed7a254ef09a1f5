"""The command line: argv to one call."""

import os
import sys


def main() -> None:
    """What `ssmax` runs."""
    try:
        from ssmax.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name != "typer":
            raise
        sys.exit("ssmax: the command line needs its extra; install it: pip install 'ssmax[lab]'")
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough, as `head` has. At its end Python would try once more to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
