"""The command line: argv to one call."""

import sys


def main() -> None:
    """What `ssmax` runs."""
    try:
        from ssmax.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name != "typer":
            raise
        sys.exit("ssmax: the command line needs its extra; install it: pip install 'ssmax[lab]'")
    sys.exit(run(sys.argv[1:]))
