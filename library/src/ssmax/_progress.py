"""Progress of long work, in one line."""

import math
import shutil
import sys
import time

SECONDS_BETWEEN_LINES = 5.0


class ProgressLine:
    """Progress in one line: written over on a terminal, elsewhere a new one every few seconds."""

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._is_live = is_shown and sys.stdout.isatty()
        self._is_open = False
        self._last = -math.inf

    def show(self, text: str, *, is_last: bool = False) -> None:
        """How far it is."""
        now = time.monotonic()
        is_soon = not is_last and now - self._last < SECONDS_BETWEEN_LINES
        if not self._is_shown or (is_soon and not self._is_live):
            return
        self._last = now
        if self._is_live:
            # A line that wraps could not be written over.
            text = text[: shutil.get_terminal_size().columns - 1]
            self._print(f"\r\x1b[K{text}", end="")
            self._is_open = True
        else:
            self._print(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._is_shown:
            self._print(f"\r\x1b[K{text}" if self._is_live else text)
            self._is_open = False

    def close(self) -> None:
        """Leave the last line standing."""
        if self._is_open:
            self._print("")
            self._is_open = False

    def _print(self, text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, flush=True)
        except OSError:
            # Nobody reads it any more; the work goes on.
            self._is_shown = False


def clock(seconds: float) -> str:
    """m:ss, h:mm:ss, or days."""
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours}:{minutes:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


def roughly(seconds: float) -> str:
    """Minutes, hours or days, for what is only estimated."""
    minutes = max(1, round(seconds / 60))
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{hours} hours" if hours < 48 else f"{hours / 24:.1f} days"
