"""The command line of the library."""

from ssmax.cli import command

_PROGRAM, _APP = "ssmax", "ssmax.cli.app"


def main() -> None:
    """Run `ssmax`."""
    command.main(_PROGRAM, _APP)


def run(arguments: list[str]) -> int:
    """Run one verb in this process; the exit code."""
    return command.run(_APP, arguments, _PROGRAM)
