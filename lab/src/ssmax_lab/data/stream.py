"""The order of training: a function of the seed and the sample's number, and of nothing else."""

import hashlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax_lab.data.shards import ShardSet

T = TypeVar("T")


class TokenStream:
    """Windows of a set's tokens in an endless order, each window once in every epoch."""

    num_windows: int
    """Window i is the tokens from i * length, length + 1 of them: inputs and targets overlap."""

    shards: ShardSet
    length: int
    seed: int

    def __init__(self, shards: ShardSet, *, length: int, seed: int) -> None:
        if length < 1:
            raise UsageError(f"length must be at least 1, got {length}")
        if shards.num_tokens < length + 1:
            raise UsageError(
                f"{shards.folder} holds {shards.num_tokens} tokens, too few for one window of "
                f"{length} + 1; prepare more text or shorten the windows"
            )
        self.shards, self.length, self.seed = shards, length, seed
        self.num_windows = (shards.num_tokens - 1) // length

    def window_of(self, sample: int) -> int:
        """The window that is the sample; as quick for the last sample as for the first."""
        return int(self._windows(sample, 1)[0])

    def batch(self, first_sample: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of count samples, each (count, length), int64."""
        tokens = np.empty((count, self.length + 1), np.int64)
        for row, window in zip(tokens, self._windows(first_sample, count).tolist(), strict=True):
            start = window * self.length
            row[:] = self.shards.slice(start, start + self.length + 1)
        # Two tensors of their own: as views, those of a single row would share their memory.
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())

    def _windows(self, first_sample: int, count: int) -> np.ndarray:
        if first_sample < 0:
            raise UsageError(f"samples are numbered from 0, got {first_sample}")
        if count < 1:
            raise UsageError(f"a batch has at least one sample, got {count}")
        windows = np.empty(count, np.int64)
        done = 0
        while done < count:
            epoch, place = divmod(first_sample + done, self.num_windows)
            stop = min(place + count - done, self.num_windows)
            part = _permute(np.arange(place, stop), self.num_windows, seed=self.seed, epoch=epoch)
            windows[done : done + part.size] = part
            done += part.size
        return windows


def _permute(places: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of range(size), chosen by seed and epoch, sends each place."""
    # A Feistel network permutes the numbers of an even count of bits; those that it sends past
    # the end are sent on until they come back.
    half = ((size - 1).bit_length() + 1) // 2
    keys = np.frombuffer(hashlib.sha512(f"{seed},{epoch}".encode()).digest(), "<u8")
    windows = _feistel(places.astype(np.uint64), half, keys)
    while (outside := windows >= size).any():
        windows[outside] = _feistel(windows[outside], half, keys)
    return windows


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    mask, shift = np.uint64(2**half - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right + key) & mask)
    return left << shift | right


def _scramble(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every bit of the result hangs on every bit of the value."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Prefetch(Generic[T]):
    """make(start), make(start + 1) and so on, made by a thread up to two ahead of their use."""

    def __init__(self, make: Callable[[int], T], start: int = 0) -> None:
        self._make = make
        self._made: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]]
        self._made = queue.SimpleQueue()
        self._room = threading.Semaphore(2)
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop making; waits for what is being made."""
        self._closed = True
        self._room.release()
        self._thread.join()

    def __iter__(self) -> "Prefetch[T]":
        return self

    def __next__(self) -> T:
        if self._closed:
            raise UsageError("this Prefetch is closed; make a new one that starts where it ended")
        made, error = self._made.get()
        if error is not None:
            self.close()
            raise error
        self._room.release()
        return made  # pyright: ignore[reportReturnType] (without an error it was made)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, step: int) -> None:
        while True:
            self._room.acquire()
            if self._closed:
                return
            try:
                self._made.put((self._make(step), None))
            except BaseException as error:
                self._made.put((None, error))
                return
            step += 1
