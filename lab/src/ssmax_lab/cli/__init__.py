"""The command line of the laboratory."""

from ssmax.cli import command

_PROGRAM, _APP = "ssmax-lab", "ssmax_lab.cli.app"


def main() -> None:
    """Run `ssmax-lab`."""
    command.main(_PROGRAM, _APP)


def run(arguments: list[str]) -> int:
    """Run one verb in this process; the exit code."""
    return command.run(_APP, arguments, _PROGRAM)
