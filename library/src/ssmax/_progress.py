"""Show what long work says: log lines by `logging`, and one progress bar on a terminal.

Every module logs to the logger of its name. The loggers `ssmax` and `ssmax_lab` are silent until
somebody configures them; the command lines do so with `logging_to_terminal`.
"""

import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

SECONDS_BETWEEN_LINES = 5.0
BAR = 20
"""Characters of the progress bar."""


def log_progress(
    logger: logging.Logger, what: str, done: int, total: int, details: str = ""
) -> None:
    """Log that `done` of `total` are done; `logging_to_terminal` draws a bar of it."""
    text = f"{what} {done:,}/{total:,}" + (f"  {details}" if details else "")
    logger.info("%s", text, extra={"progress": done / max(total, 1)})


@contextmanager
def logging_to_terminal(stream: TextIO | None = None) -> Iterator[None]:
    """Write what `ssmax` and `ssmax_lab` log to a stream, by default standard error.

    Of several ranks the first alone writes.
    """
    handler = TerminalHandler(stream or sys.stderr)
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL
    loggers = [logging.getLogger(name) for name in ("ssmax", "ssmax_lab")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
        # The root's handlers are the application's, which here is the command line.
        logger.propagate = False
    try:
        yield
    finally:
        handler.close()
        for logger, (old_level, old_propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(old_level)
            logger.propagate = old_propagate


class TerminalHandler(logging.Handler):
    """Draws progress in one line on a terminal; elsewhere writes a line every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream: TextIO = stream
        self._is_terminal: bool = stream.isatty()
        self._is_read: bool = True
        self._has_bar: bool = False
        self._last: float = -math.inf
        self._said: str = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; progress overwrites earlier progress."""
        text, share = self.format(record), getattr(record, "progress", None)
        if share is None:
            self._write(f"{text}\n")
            self._has_bar = False
        elif text == self._said:
            return
        elif self._is_terminal:
            filled = "#" * round(BAR * min(share, 1.0))
            # A line that wraps could not be overwritten.
            line = f"[{filled:-<{BAR}}] {text}"[: shutil.get_terminal_size().columns - 1]
            self._has_bar, self._said = share < 1.0, text
            self._write(line if self._has_bar else f"{line}\n")
        elif share >= 1.0 or time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last, self._said = time.monotonic(), text
            self._write(f"{text}\n")

    def close(self) -> None:
        """Leave the bar standing."""
        if self._has_bar:
            self._has_bar = False
            self._write("\n", over="")
        super().close()

    def _write(self, text: str, over: str = "\r\x1b[K") -> None:
        if not self._is_read:
            return
        try:
            self._stream.write(over + text if self._is_terminal else text)
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody reads it any more; the work continues.
            self._is_read = False


def clock(seconds: float) -> str:
    """Format a time as m:ss, h:mm:ss, or days."""
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours}:{minutes:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


def roughly(seconds: float) -> str:
    """Format an estimated time as minutes, hours or days."""
    minutes = max(1, round(seconds / 60))
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{hours} hours" if hours < 48 else f"{hours / 24:.1f} days"
