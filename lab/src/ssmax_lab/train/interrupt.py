"""Ctrl-C, SIGTERM and a closed terminal are requests: the step is finished and saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
def graceful_shutdown() -> Iterator[Interrupts]:
    """Within, SIGINT, SIGTERM and SIGHUP are requests."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        # Signals are the main thread's alone; a run in another is stopped by whoever started it.
        yield interrupts
        return
    heeded = [signal.SIGINT, signal.SIGTERM]
    # Under nohup it is ignored, and stays so.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        heeded.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupts._handle) for number in heeded}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
