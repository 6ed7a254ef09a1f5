"""Files that are whole or not there, and folders that one process has to itself."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ssmax.errors import UsageError

LOCK = ".lock"


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that gets its name once it is whole and on disk, or never."""
    # What a killed process left under this name is overwritten.
    partial = path.with_name(path.name + ".partial")
    file = partial.open("wb")
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    finally:
        # On a full disk closing fails once more; the first error is the one to show.
        with contextlib.suppress(OSError):
            file.close()
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """A text file that is the old one or the new one, also after a loss of power."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of an empty one, or of none, once it is full."""
    # Also where it is "." or a link.
    folder = folder.resolve()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """The names in a folder, on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a folder that another process is writing; the lock goes with its process."""
    import fcntl  # only where there is POSIX, which reading does not need

    with (folder / LOCK).open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{folder} is in use by another process; wait for it, or give another folder"
            ) from None
        yield


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here with this folder; where there is POSIX."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
