"""metrics.jsonl: what a run computed, line by line, and nothing that a clock decides.

A run that was stopped and resumed leaves the same bytes as one that never was: what was written
after the checkpoint is cut off before the run goes on, and what was written before it is compared
with the checksum in the checkpoint. Times and speeds are in events.jsonl.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ssmax.errors import UsageError

EVENTS = "events.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JournalMark:
    """The length and checksum of a journal at a checkpoint."""

    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class Journal:
    """Lines appended to a file, durable when `sync` returns."""

    def __init__(self, path: Path, *, mark: JournalMark | None = None) -> None:
        """Check what is there against `mark` and cut it there; None keeps every finished line."""
        path.touch()
        if mark is None:
            content = path.read_bytes()
            content = content[: content.rfind(b"\n") + 1]
        else:
            content = read_marked(path, mark)
        self._digest = hashlib.sha256(content)
        self._file = path.open("r+b")
        self._file.truncate(len(content))
        self._file.seek(0, os.SEEK_END)

    def append(self, **line: Any) -> None:
        """One line; floats keep every digit."""
        written = json.dumps(line).encode() + b"\n"
        self._digest.update(written)
        self._file.write(written)

    def flush(self) -> None:
        """Hand the lines to the system; they outlive this process, not the machine."""
        self._file.flush()

    def sync(self) -> JournalMark:
        """Put everything on disk; the length and checksum of all lines."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return JournalMark(bytes=self._file.tell(), sha256=self._digest.hexdigest())

    def close(self) -> None:
        """Write what is left and close; what cannot be written was said before."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_marked(path: Path, mark: JournalMark) -> bytes:
    """Read a journal up to a checkpoint; one that is shorter, or was changed, is refused."""
    content = path.read_bytes()
    kept = content[: mark.bytes]
    if len(kept) < mark.bytes:
        fault = f"holds {len(content)} bytes, the checkpoint was written after {mark.bytes}"
    elif hashlib.sha256(kept).hexdigest() != mark.sha256:
        broken = (n for n, line in enumerate(kept.splitlines(), 1) if not _is_json(line))
        line = next(broken, None)
        fault = "was changed after the checkpoint was written: " + (
            "its checksum differs" if line is None else f"line {line} cannot be read"
        )
    else:
        return kept
    raise UsageError(f"{path} {fault}; bring the file back, or start a new run")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
