"""journal.jsonl: what a run computed, line by line, and nothing that a clock decides.

A run that was stopped and resumed leaves the same bytes as one that never was: what was written
after the checkpoint is cut off before the run goes on. Times and speeds are in events.jsonl.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ssmax.errors import UsageError

EVENTS = "events.jsonl"


class Journal:
    """Lines appended to a file, durable when `sync` returns."""

    def __init__(self, path: Path, *, keep_bytes: int | None = None) -> None:
        """Cut to `keep_bytes` what is there; None keeps every line that was finished."""
        path.touch()
        if keep_bytes is None:
            keep_bytes = path.read_bytes().rfind(b"\n") + 1
        if (size := path.stat().st_size) < keep_bytes:
            raise UsageError(
                f"{path} holds {size} bytes, the checkpoint was written after {keep_bytes}; "
                "bring the file back, or start a new run"
            )
        self._file = path.open("r+b")
        self._file.truncate(keep_bytes)
        self._file.seek(0, os.SEEK_END)

    def append(self, **line: Any) -> None:
        """One line; floats keep every digit."""
        self._file.write(json.dumps(line).encode() + b"\n")

    def flush(self) -> None:
        """Hand the lines to the system; they outlive this process, not the machine."""
        self._file.flush()

    def sync(self) -> int:
        """Everything on disk; the number of bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Write what is left and close; what cannot be written was said before."""
        with contextlib.suppress(OSError):
            self._file.close()
