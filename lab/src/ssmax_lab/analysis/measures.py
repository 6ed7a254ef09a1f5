"""What figures and tables show, computed from records once."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ssmax_lab.analysis.findings import ByReplica, Record
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, Sharpness

Item = TypeVar("Item")

Curve = tuple[list[int], list[float]]
"""Steps and losses."""

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


def paired(by_replica: ByReplica[Item]) -> dict[str, list[tuple[Item, Item]]]:
    """Pair what (a) has with what each configuration has, of every replica that both have."""
    base = by_replica.get("a", {})
    return {
        name: [(base[replica], found[replica]) for replica in sorted(base.keys() & found.keys())]
        for name, found in by_replica.items()
    }


def mean_curves(curves: ByReplica[Curve]) -> dict[str, Curve]:
    """Average training losses over runs, as far as all of them are."""
    means = {}
    for name, found in curves.items():
        shortest = min(len(losses) for _, losses in found.values())
        losses = np.mean([losses[:shortest] for _, losses in found.values()], axis=0)
        means[name] = (next(iter(found.values()))[0][:shortest], losses.tolist())
    return means


def less_softmax(pairs: Sequence[tuple[Curve, Curve]]) -> Curve:
    """Subtract (a)'s training loss at every step that all have, the mean over pairs of runs."""
    both = [(dict(zip(*base, strict=True)), dict(zip(*own, strict=True))) for base, own in pairs]
    steps = sorted(set.intersection(*(base.keys() & own.keys() for base, own in both)))
    return steps, [float(np.mean([own[n] - base[n] for base, own in both])) for n in steps]


def smoothed(steps: Sequence[int], losses: Sequence[float]) -> tuple[list[int], np.ndarray]:
    """Average losses over the fiftieth of the steps that ends at each."""
    width = max(1, len(losses) // 50)
    return list(steps)[width - 1 :], np.convolve(losses, np.ones(width) / width, mode="valid")


def last_tenth(curve: Curve) -> float:
    """Average a training loss over its last tenth."""
    return float(np.mean(curve[1][-max(1, len(curve[1]) // 10) :]))


def by_position(records: Sequence[PositionLoss]) -> tuple[list[int], np.ndarray]:
    """Average losses over runs, in bins of about a hundredth of the positions."""
    return _in_bins(np.mean([record.mean for record in records], axis=0))


def less_softmax_by_position(
    pairs: Sequence[tuple[PositionLoss, PositionLoss]],
) -> tuple[list[int], np.ndarray]:
    """Subtract (a)'s loss at every position, the mean over pairs of runs, in such bins."""
    shortest = min(len(record.mean) for pair in pairs for record in pair)
    differences = [np.subtract(own.mean[:shortest], base.mean[:shortest]) for base, own in pairs]
    return _in_bins(np.mean(differences, axis=0))


def _in_bins(mean: np.ndarray) -> tuple[list[int], np.ndarray]:
    width = max(1, len(mean) // 100)
    count = len(mean) // width
    bins = mean[: count * width].reshape(count, width).mean(1)
    return [place * width + width // 2 for place in range(count)], bins


def mean_loss(length: int, *, is_long: bool) -> Callable[[PositionLoss], float]:
    """Make the function that averages a loss within the training length, or beyond it."""
    return mean_between(length, None) if is_long else mean_between(0, length)


def mean_between(start: int, stop: int | None) -> Callable[[PositionLoss], float]:
    """Make the function that averages a loss over these positions; nan where there are none."""

    def mean(record: PositionLoss) -> float:
        kept = record.mean[start:stop]
        return float(np.mean(kept)) if kept else math.nan

    return mean


def retrieval_accuracy(length: int, *, is_long: bool) -> Callable[[list[NeedleTrial]], float]:
    """Make the function that gives the accuracy within the training length, or beyond it."""

    def accuracy(trials: list[NeedleTrial]) -> float:
        found = [one.is_whole for one in trials if (one.length > length) == is_long]
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
