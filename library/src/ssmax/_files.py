"""Write files and folders whole or not at all; hold folders for one process."""

import contextlib
import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from ssmax.errors import UsageError

LOCK = ".lock"
_UNUSABLE = {
    errno.EACCES,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""Errors that another path mends; a full disk is none of them."""


def check_folder(folder: Path) -> None:
    """Refuse a path where no folder can be, since it or one above it is a file."""
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            if not path.is_dir():
                raise UsageError(f"{folder} must be a folder, but {path} is a file; give another")
            return


def check_empty(folder: Path) -> None:
    """Refuse a path where something is that would be lost, or where no folder can be."""
    check_folder(folder.parent)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; give another one")


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, where it is missing."""
    check_folder(folder)
    with _usable(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        raise UsageError(
            f"{folder} cannot be written to: {error.strerror}; give another folder"
        ) from None


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name once it is whole and on disk, or never."""
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
    """Write a text file that is the old one or the new one, also after a loss of power."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Make a folder to fill that takes its place once it is full; what is there must be empty.

    Or it is replaced. Nothing is left behind by an error, nor by SIGTERM or SIGHUP.
    """
    # Also where it is "." or a link.
    folder = folder.resolve()
    partial = folder.with_name(f".{folder.name}.partial")
    make_folder(folder.parent)
    with ending_by_exception():
        shutil.rmtree(partial, ignore_errors=True)
        with _usable(folder):
            partial.mkdir()
        try:
            yield partial
            if replace:
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.exists():
                folder.rmdir()
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def ending_by_exception() -> Iterator[None]:
    """Let a signal that would end the process at once raise SystemExit instead."""
    if threading.current_thread() is not threading.main_thread():
        # Signals are the main thread's alone.
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # One that is handled or ignored already stays so.
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            # A second one must not stop the cleaning up.
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a folder that another process is writing; the lock goes with its process."""
    import fcntl  # only where there is POSIX, which reading does not need

    with _usable(folder):
        file = (folder / LOCK).open("wb")
    with file:
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
