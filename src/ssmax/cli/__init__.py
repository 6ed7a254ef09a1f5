"""The command line: argv to one call."""

import os
import sys

from ssmax._extras import how_to_install


def main() -> None:
    """What `ssmax` runs."""
    try:
        from ssmax.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name != "typer":
            raise
        sys.exit(f"ssmax: the command line needs the extra 'lab': {how_to_install('lab')}")
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough, as `head` has. At its end Python would try once more to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
