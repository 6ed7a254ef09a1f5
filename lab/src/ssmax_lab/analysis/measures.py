"""What figures and tables show, computed from records once."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ssmax_lab.analysis.findings import ByReplica, Record
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, Sharpness

Item = TypeVar("Item")
Result = TypeVar("Result")

Curve = tuple[list[int], list[float]]
"""Steps and losses."""

FIRST_POSITION = 16
"""Losses before it are of few tokens, and in no figure."""
TOP_HEADS = 25
"""So many heads are in figure 7, as in the paper."""
TOP_SHARE = 25 / 144
"""The share of the paper's heads that these are."""


def values_of(home: ByReplica[Record], value: Callable[[Record], float]) -> dict[str, list[float]]:
    """Compute a value of every run of every configuration."""
    return {name: list(map(value, by_replica.values())) for name, by_replica in home.items()}


def pooled(by_replica: ByReplica[list[Item]]) -> dict[str, list[Item]]:
    """Put the items of all runs of a configuration together."""
    return {
        name: [item for replica in sorted(found) for item in found[replica]]
        for name, found in by_replica.items()
    }


def paired(by_replica: ByReplica[Item], base_name: str = "a") -> dict[str, list[tuple[Item, Item]]]:
    """Pair what (a) has with what each configuration has, of every replica that both have."""
    base = by_replica.get(base_name, {})
    return {
        name: [(base[replica], found[replica]) for replica in sorted(base.keys() & found.keys())]
        for name, found in by_replica.items()
    }


def differences(
    by_replica: ByReplica[Item], less: Callable[[Item, Item], Result], base_name: str = "a"
) -> dict[str, list[Result]]:
    """Subtract what (a) has from what each configuration has, over the replicas that both have.

    Runs of other seeds, or of other machines, differ by more than configurations do. Nothing where
    there is no second configuration to compare.
    """
    shown = {name: pairs for name, pairs in paired(by_replica, base_name).items() if pairs}
    if len(shown) < 2:
        return {}
    return {name: [less(base, own) for base, own in pairs] for name, pairs in shown.items()}


def smoothed(steps: Sequence[int], losses: Sequence[float]) -> tuple[list[int], np.ndarray]:
    """Average losses over the fiftieth of the steps that ends at each."""
    width = max(1, len(losses) // 50)
    return list(steps)[width - 1 :], np.convolve(losses, np.ones(width) / width, mode="valid")


def last_tenth(curve: Curve) -> float:
    """Average a training loss over its last tenth."""
    return float(np.mean(curve[1][-max(1, len(curve[1]) // 10) :]))


def by_octave(mean: Sequence[float] | np.ndarray) -> tuple[list[int], np.ndarray]:
    """Average losses over bins of an eighth of an octave, from position `FIRST_POSITION` on."""
    last = math.log2(len(mean) + 1)
    edges = 2 ** np.arange(math.log2(FIRST_POSITION), last - 1 / 16, 1 / 8)
    starts = np.unique(np.append(edges, len(mean) + 1).round().astype(int)) - 1
    places = np.sqrt((starts[:-1] + 1) * starts[1:]).round().astype(int)
    sums = np.add.reduceat(np.asarray(mean, float)[: starts[-1]], starts[:-1])
    return places.tolist(), sums / np.diff(starts)


def octave_differences(base: PositionLoss, own: PositionLoss) -> tuple[list[int], np.ndarray]:
    """Subtract (a)'s loss at every position that both have, in such bins."""
    both = min(len(base.mean), len(own.mean))
    return by_octave(np.subtract(own.mean[:both], base.mean[:both]))


def mean_loss(length: int, *, is_long: bool) -> Callable[[PositionLoss], float]:
    """Make the function that averages a loss within the training length, or beyond it."""
    return mean_between(length, None) if is_long else mean_between(0, length)


def mean_between(start: int, stop: int | None) -> Callable[[PositionLoss], float]:
    """Make the function that averages a loss over these positions; nan where there are none."""

    def mean(record: PositionLoss) -> float:
        kept = record.mean[start:stop]
        return float(np.mean(kept)) if kept else math.nan

    return mean


def mean_differences(
    losses: ByReplica[PositionLoss], start: int, stop: int | None
) -> dict[str, list[float]]:
    """Average over these positions what each configuration loses less than (a) does."""
    mean = mean_between(start, stop)
    return differences(losses, lambda base, own: mean(own) - mean(base))


def retrieval_accuracy(length: int, *, is_long: bool) -> Callable[[list[NeedleTrial]], float]:
    """Make the function that gives the accuracy within the training length, or beyond it."""
    return _accuracy(lambda one: (one.length > length) == is_long)


def accuracy_at(length: int) -> Callable[[list[NeedleTrial]], float]:
    """Make the function that gives the accuracy in contexts of one size."""
    return _accuracy(lambda one: one.length == length)


def _accuracy(counts: Callable[[NeedleTrial], bool]) -> Callable[[list[NeedleTrial]], float]:
    def accuracy(trials: list[NeedleTrial]) -> float:
        found = [one.is_whole for one in trials if counts(one)]
        return float(np.mean(found)) if found else math.nan

    return accuracy


def accuracy_map(trials: Sequence[NeedleTrial]) -> tuple[list[int], list[float], np.ndarray]:
    """Compute context sizes, depths, and the needle retrieval accuracy: (depths, sizes)."""
    lengths = sorted({trial.length for trial in trials})
    depths = sorted({trial.depth for trial in trials})
    total = np.zeros((2, len(depths), len(lengths)))
    for trial in trials:
        place = depths.index(trial.depth), lengths.index(trial.length)
        total[0][place] += trial.is_whole
        total[1][place] += 1
    return lengths, depths, total[0] / np.maximum(total[1], 1)


def said_word(trial: NeedleScore | NeedleTrial) -> str:
    """Tell in words what a trial came to."""
    if trial.is_whole:
        return "whole number"
    return "first digit" if trial.first_digit else "wrong"


def usual_word(trials: Sequence[NeedleScore]) -> str:
    """Tell what most trials came to; of several the first in the order of the alphabet."""
    every = sorted(map(said_word, trials))
    return max(dict.fromkeys(every), key=every.count)


def ranked_scores(trial: NeedleScore) -> list[float]:
    """Sort the needle scores of all heads, the largest first."""
    return sorted((value for row in trial.number_scores for value in row), reverse=True)


def top_score(trial: NeedleScore) -> float:
    """Find the largest needle score of all heads."""
    return ranked_scores(trial)[0]


def top_heads_score(trial: NeedleScore) -> float:
    """Average the largest needle scores, of the share of heads that figure 7 shows."""
    ranked = ranked_scores(trial)
    return float(np.mean(ranked[: max(1, round(TOP_SHARE * len(ranked)))]))


def by_rank(scores: Sequence[NeedleScore]) -> np.ndarray:
    """Average the needle scores of the top heads over trials, by rank."""
    return np.mean(list(map(ranked_scores, scores)), axis=0)[:TOP_HEADS]


def last_seen_and_last(record: Sharpness, train_length: int) -> tuple[int, int]:
    """Find the places of the last n that training has seen, and of the last of all."""
    seen = [place for place, n in enumerate(record.num_keys) if n <= train_length]
    return seen[-1], len(record.num_keys) - 1


def weight_changes(record: Sharpness, train_length: int) -> list[float]:
    """Compute how every head's largest weight changes from the training length to the last n."""
    before, after = last_seen_and_last(record, train_length)
    weights = np.asarray(record.largest)
    return (weights[:, :, after] - weights[:, :, before]).ravel().tolist()


def lost_sharpness(record: Sharpness, train_length: int, n: int) -> float:
    """Compute the share of heads whose largest weight loses half or more from training to n."""
    before, _ = last_seen_and_last(record, train_length)
    weights = np.asarray(record.largest)
    return float(np.mean(weights[:, :, record.num_keys.index(n)] <= weights[:, :, before] / 2))


def learned(values: Mapping[str, Sequence[float]], parameter: str) -> list[Sequence[float]]:
    """Pick a parameter of every layer, a number per head."""
    return [row for name, row in values.items() if name.endswith(f".{parameter}")]
