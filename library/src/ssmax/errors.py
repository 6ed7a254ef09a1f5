"""Errors: those that a caller can mend, and those that only we can."""


class UsageError(ValueError):
    """Bad input; the message says what was wanted, what came, and what to do.

    The command line shows it as one line and exits with 2. Every other exception but those of this
    file is a bug, and keeps its traceback.
    """


class MissingExtraError(UsageError, ImportError):
    """A package of an extra is not installed; the message has the command that installs it."""


class MachineError(OSError):
    """The machine failed, not the program: a full disk, a lost connection, a killed worker.

    The command line shows it as one line and exits with 1.
    """


class NonfiniteError(RuntimeError):
    """A loss or gradient is not finite; shown as one line, exit 1."""
