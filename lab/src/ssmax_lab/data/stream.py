"""The order of training: a function of the seed and the sample's number, and of nothing else."""

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from ssmax.errors import UsageError
from ssmax_lab.data.shards import ShardSet

T = TypeVar("T")
IGNORE = -100
"""A target that has no loss."""


class TokenStream:
    """Windows of a set's tokens in an endless order, each window once in every epoch."""

    num_windows: int
    """Window i is the tokens from i * length, length + 1 of them: inputs and targets overlap."""

    def __init__(self, shards: ShardSet, *, length: int, seed: int) -> None:
        if shards.num_tokens < length + 1:
            raise UsageError(
                f"{shards.folder} holds {shards.num_tokens} tokens, too few for one window of "
                f"{length} + 1; prepare more text or shorten the windows"
            )
        self.shards, self.length, self.seed = shards, length, seed
        self.num_windows = (shards.num_tokens - 1) // length

    def window_of(self, sample: int) -> int:
        """Find the window of a sample; as quick for the last sample as for the first."""
        return int(self._windows(sample, 1)[0])

    def batch(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read inputs and targets of count samples, each (count, length), int64."""
        tokens = np.empty((count, self.length + 1), np.int64)
        for row, window in zip(tokens, self._windows(first_sample, count).tolist(), strict=True):
            start = window * self.length
            row[:] = self.shards.slice(start, start + self.length + 1)
        # Two arrays of their own: as views, those of a single row would share their memory.
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()

    def _windows(self, first_sample: int, count: int) -> np.ndarray:
        assert first_sample >= 0
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
    """Permute range(size), by seed and epoch; give where each place goes."""
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
    """Mix by the finalizer of SplitMix64: every bit of the result depends on every bit given."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def prefetched(make: Callable[[int], T], start: int = 0) -> Generator[T, None, None]:
    """Make make(start), make(start + 1) and so on in a thread, up to two ahead of their use."""
    steps = itertools.count(start)
    with ThreadPoolExecutor(1) as thread:
        made = deque(thread.submit(make, next(steps)) for _ in range(2))
        try:
            while True:
                one = made.popleft().result()
                made.append(thread.submit(make, next(steps)))
                yield one
        finally:
            thread.shutdown(cancel_futures=True)
