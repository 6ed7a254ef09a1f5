"""The order of training samples: every window once an epoch, the same for every onlooker."""

import itertools
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from ssmax.errors import UsageError
from ssmax_lab.data.shards import ShardSet, Vocabulary, write_index, write_shard
from ssmax_lab.data.stream import TokenStream, prefetched

NUMBERS = Vocabulary(name="numbers", hash="", size=70_000, end_of_document=69_999)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """7 shards, one document each: 1001 tokens in which every token says its own place."""
    folder = tmp_path_factory.mktemp("numbers")
    places, shards = np.arange(1001), []
    for index, part in enumerate(np.split(places, [1, 40, 41, 300, 555, 900])):
        # The end of a document is put in by the writer, so its place is left to it.
        with write_shard(folder / f"{index}.shard", NUMBERS) as writer:
            writer.add(part[:-1])
        shards.append(writer.info())
    write_index(folder, NUMBERS, shards, details={})
    return ShardSet.open(folder)


class Stand:
    """A set of so many tokens, for laws that read none."""

    folder = "stand"

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens


def order(num_windows, *, seed=0, epoch=0):
    stream = TokenStream(Stand(num_windows + 1), length=1, seed=seed)
    return stream._windows(epoch * num_windows, num_windows)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 1000, 4097])
@pytest.mark.parametrize("seed", [0, 1, 2**70])
def test_every_epoch_visits_every_window_once(size, seed):
    for epoch in (0, 1, 7):
        assert sorted(order(size, seed=seed, epoch=epoch)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(order(64, seed=s, epoch=e)) for s in range(4) for e in range(8)]
    assert len(set(orders)) == len(orders)


def test_small_sets_take_every_order_about_equally_often():
    for size, orders in ((2, 2), (3, 6), (4, 24)):
        seen = [tuple(order(size, epoch=epoch)) for epoch in range(1200)]
        counts = np.unique(seen, axis=0, return_counts=True)[1]
        assert len(counts) == orders
        assert counts.max() < 2 * counts.min()


@pytest.mark.parametrize("size", [1000, 4096, 5000])
def test_the_order_looks_random(size):
    # Deviations of five sigma; rotations, reversals and sorted blocks are hundreds away.
    sent, places = order(size).astype(float), np.arange(size)
    displacement = np.abs(sent - places).mean() / size
    assert displacement == pytest.approx(1 / 3, abs=5 * 0.24 / size**0.5)
    assert abs(np.corrcoef(sent, places)[0, 1]) < 5 / size**0.5
    steps = np.diff(sent) % size
    assert np.unique(steps).size == pytest.approx((1 - np.exp(-1)) * size, rel=0.1)
    table, _, _ = np.histogram2d(places, sent, bins=10)
    assert ((table - size / 100) ** 2 / (size / 100)).sum() < 81 + 5 * (2 * 81) ** 0.5
    fixed_points = (sent == places).sum()
    assert fixed_points < 10


def test_the_order_is_the_same_on_every_machine():
    stream = TokenStream(Stand(1001), length=1, seed=1)
    assert [stream.window_of(sample) for sample in (0, 1, 999, 1000, 10**15)] == [
        915,
        700,
        273,
        809,
        682,
    ]


def test_a_far_sample_is_as_near_as_the_first():
    stream = TokenStream(Stand(10**13), length=1024, seed=0)
    took = {}
    for sample in (0, 10**15, 10**30):
        start = time.perf_counter()
        for offset in range(20):
            assert 0 <= stream.window_of(sample + offset) < stream.num_windows
        took[sample] = time.perf_counter() - start
    assert max(took.values()) < 1.0


def test_windows_cross_the_borders_of_shards(numbers):
    stream = TokenStream(numbers, length=13, seed=3)
    inputs, targets = stream.batch(0, stream.num_windows)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.shape == targets.shape == (76, 13)
    assert inputs.flags.c_contiguous and targets.flags.c_contiguous
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    ends = {0, 39, 40, 299, 554, 899, 1000}
    expected = [69_999 if place in ends else place for place in range(1001)]
    windows = [stream.window_of(sample) for sample in range(76)]
    for window, row, target in zip(windows, inputs.tolist(), targets.tolist(), strict=True):
        assert row == expected[window * 13 : window * 13 + 13]
        assert target == expected[window * 13 + 1 : window * 13 + 14]


def test_an_epoch_trains_on_every_token_but_the_first_and_the_cut_end(numbers):
    stream = TokenStream(numbers, length=10, seed=0)
    _, targets = stream.batch(5 * stream.num_windows, stream.num_windows)
    assert stream.num_windows == 100
    assert sorted(targets.flatten().tolist()) == sorted(numbers.slice(1, 1001).tolist())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_together_see_the_batch_however_they_share_it(numbers, ranks):
    stream, first, size = TokenStream(numbers, length=13, seed=3), 70, 12
    whole, _ = stream.batch(first, size)
    part = size // ranks
    contiguous = [stream.batch(first + rank * part, part)[0] for rank in range(ranks)]
    assert np.array_equal(np.concatenate(contiguous), whole)
    for rank in range(ranks):
        mine = [stream.batch(first + sample, 1)[0] for sample in range(rank, size, ranks)]
        assert np.array_equal(np.concatenate(mine), whole[rank::ranks])


def test_a_stream_resumed_at_any_step_is_the_stream_that_never_stopped(numbers):
    never_stopped = TokenStream(numbers, length=13, seed=3)
    batches = [never_stopped.batch(step * 5, 5) for step in range(40)]
    for step in (0, 1, 15, 16, 39):
        resumed = TokenStream(ShardSet.open(numbers.folder), length=13, seed=3).batch(step * 5, 5)
        assert all(map(np.array_equal, resumed, batches[step]))


def test_a_batch_may_span_many_epochs(numbers):
    stream = TokenStream(numbers, length=500, seed=0)
    inputs, _ = stream.batch(1, 9)
    assert stream.num_windows == 2
    single = [stream.batch(sample, 1)[0] for sample in range(1, 10)]
    assert np.array_equal(np.concatenate(single), inputs)


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(UsageError, match="stand holds 10 tokens, .* 10 [+] 1"):
        TokenStream(Stand(10), length=10, seed=0)


def test_prefetched_steps_come_in_order_from_the_start():
    with closing(prefetched(lambda step: step * step, start=3)) as made:
        assert list(itertools.islice(made, 50)) == [step * step for step in range(3, 53)]


def test_what_is_prefetched_is_two_ahead_and_no_more():
    made, several = [], threading.Event()

    def make(step):
        made.append(step)
        if len(made) == 3:
            several.set()
        return step

    with closing(prefetched(make)) as steps:
        for used in range(20):
            assert len(made) <= used + 2
            assert next(steps) == used
            assert used or several.wait(5)


def test_an_error_of_the_thread_is_raised_at_its_step():
    def make(step):
        if step == 2:
            raise ValueError("shard 7 is missing")
        return step

    steps = prefetched(make)
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(ValueError, match="shard 7 is missing"):
        next(steps)


@pytest.mark.parametrize("count", [1, 3])
def test_inputs_and_targets_share_no_memory(numbers, count):
    inputs, targets = TokenStream(numbers, length=10, seed=0).batch(0, count)
    before = inputs.copy()
    targets[:] = -1
    assert np.array_equal(inputs, before)
