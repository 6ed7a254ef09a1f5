"""What the figures show, from records: one computation for the drawings and for the page."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ssmax_lab.records import Fading, NeedleScore, NeedleTrial, PositionLoss
from ssmax_lab.report.findings import ByReplica

Item = TypeVar("Item")

Curve = tuple[list[int], list[float]]
"""Steps and losses."""

TOP_HEADS = 25
"""So many heads are in figure 7, as in the paper."""


def pooled(by_replica: ByReplica[list[Item]]) -> dict[str, list[Item]]:
    """The items of all runs of a configuration together."""
    return {
        name: [item for replica in sorted(found) for item in found[replica]]
        for name, found in by_replica.items()
    }


def mean_curves(curves: ByReplica[Curve]) -> dict[str, Curve]:
    """Steps and training losses, the mean over runs as far as all of them are."""
    means = {}
    for name, found in curves.items():
        shortest = min(len(losses) for _, losses in found.values())
        losses = np.mean([losses[:shortest] for _, losses in found.values()], axis=0)
        means[name] = (next(iter(found.values()))[0][:shortest], losses.tolist())
    return means


def paired(by_replica: ByReplica[Item]) -> dict[str, list[tuple[Item, Item]]]:
    """What (a) has and what each configuration has, of every replica that both have."""
    base = by_replica.get("a", {})
    return {
        name: [(base[replica], found[replica]) for replica in sorted(base.keys() & found.keys())]
        for name, found in by_replica.items()
    }


def less_softmax(pairs: Sequence[tuple[Curve, Curve]]) -> Curve:
    """Steps and how far the training loss is above (a)'s, the mean over pairs of runs."""
    both = [(dict(zip(*base, strict=True)), dict(zip(*own, strict=True))) for base, own in pairs]
    steps = sorted(set.intersection(*(base.keys() & own.keys() for base, own in both)))
    return steps, [float(np.mean([own[n] - base[n] for base, own in both])) for n in steps]


def smoothed(steps: Sequence[int], losses: Sequence[float]) -> tuple[list[int], np.ndarray]:
    """Losses over the fiftieth of the steps that ends at each."""
    width = max(1, len(losses) // 50)
    return list(steps)[width - 1 :], np.convolve(losses, np.ones(width) / width, mode="valid")


def by_position(records: Sequence[PositionLoss]) -> tuple[list[int], np.ndarray]:
    """Positions and losses, the mean over runs, in bins of about a hundredth."""
    return _in_bins(np.mean([record.mean for record in records], axis=0))


def less_softmax_by_position(
    pairs: Sequence[tuple[PositionLoss, PositionLoss]],
) -> tuple[list[int], np.ndarray]:
    """Positions and how far the loss is above (a)'s, the mean over pairs of runs, in such bins."""
    reach = min(len(record.mean) for pair in pairs for record in pair)
    differences = [np.subtract(own.mean[:reach], base.mean[:reach]) for base, own in pairs]
    return _in_bins(np.mean(differences, axis=0))


def _in_bins(mean: np.ndarray) -> tuple[list[int], np.ndarray]:
    width = max(1, len(mean) // 100)
    count = len(mean) // width
    bins = mean[: count * width].reshape(count, width).mean(1)
    return [place * width + width // 2 for place in range(count)], bins


def by_rank(scores: Sequence[NeedleScore]) -> np.ndarray:
    """The needle scores of the top heads of each trial, the mean over trials by rank."""
    ranked = [
        sorted((value for row in score.number_scores for value in row), reverse=True)
        for score in scores
    ]
    return np.mean(ranked, axis=0)[:TOP_HEADS]


def places_beyond(record: Fading, train_length: int) -> tuple[int, int]:
    """Where the last n that training has seen stands, and the last of all."""
    seen = [place for place, n in enumerate(record.num_keys) if n <= train_length]
    return seen[-1], len(record.num_keys) - 1


def top_score(trial: NeedleScore) -> float:
    """The largest needle score of all heads."""
    return max(score for row in trial.number_scores for score in row)


def said_word(trial: NeedleScore | NeedleTrial) -> str:
    """What a trial came to, in words."""
    if trial.is_whole:
        return "whole number"
    return "first digit" if trial.first_digit else "wrong"


def usual_word(trials: Sequence[NeedleScore]) -> str:
    """What most trials came to; of several the first in the order of the alphabet."""
    every = sorted(map(said_word, trials))
    return max(dict.fromkeys(every), key=every.count)


def accuracy_map(trials: Sequence[NeedleTrial]) -> tuple[list[int], list[float], np.ndarray]:
    """Context sizes, depths, and the share of whole numbers: (depths, sizes)."""
    lengths = sorted({trial.length for trial in trials})
    depths = sorted({trial.depth for trial in trials})
    total = np.zeros((2, len(depths), len(lengths)))
    for trial in trials:
        place = depths.index(trial.depth), lengths.index(trial.length)
        total[0][place] += trial.is_whole
        total[1][place] += 1
    return lengths, depths, total[0] / np.maximum(total[1], 1)
