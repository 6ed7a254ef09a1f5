"""What a caller can mend, told apart from what only we can."""


class UsageError(ValueError):
    """Bad input; the message says what was wanted, what came, and what to do.

    The command line shows it as one line and exits with 2. Every other exception is a bug or a
    failure of the machine, and keeps its traceback.
    """
