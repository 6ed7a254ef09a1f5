"""Ctrl-C and SIGTERM are requests to finish the step; a run's folder is for one process."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

LOCK = "lock"


class Interrupts:
    """Remembers the first request to stop; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.name: str | None = None

    @property
    def asked(self) -> bool:
        """True once somebody wants the run to stop."""
        return self.name is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


@contextmanager
def heeded_interrupts() -> Iterator[Interrupts]:
    """Within, SIGINT and SIGTERM are requests."""
    interrupts = Interrupts()
    before = {
        number: signal.signal(number, interrupts._handle)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def locked(folder: Path, *, is_owner: bool = True) -> Iterator[None]:
    """Refuse a folder that another process is writing; the lock goes with the process.

    Of several ranks one is the owner, for all of them.
    """
    if not is_owner:
        yield
        return
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise ValueError(
                f"{folder} is in use by another process ({owner}); wait for it, or stop it"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()}")
        file.flush()
        yield
