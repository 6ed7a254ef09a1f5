"""What a measurement came to, as a person reads it."""

import itertools
from collections.abc import Sequence

import numpy as np

from ssmax.eval.needle_score import top_heads
from ssmax.eval.retrieval import accuracy
from ssmax.records import to_json_line
from ssmax.study.measurement import FADING, NEEDLE, NEEDLE_SCORE, POSITION_LOSS, Measurement
from ssmax.train.watch import LiveLine


class Counter:
    """A live line that counts; silent where a script reads."""

    def __init__(self, *, is_shown: bool) -> None:
        self._line = LiveLine(is_shown=is_shown)

    def __call__(self, what: str, done: int, total: int) -> None:
        """So many are done."""
        self._line.show(f"{what} {done:,}/{total:,}", is_last=done == total)
        if done == total:
            self._line.close()


def position_loss(
    here: Measurement, *, length: int, documents: int, batch: int, as_json: bool
) -> None:
    """Figure 5's numbers of one run."""
    record = here.position_loss(
        length=length, documents=documents, batch=batch, on_progress=Counter(is_shown=not as_json)
    )
    if as_json:
        return _print_lines([record])
    for (start, stop), column in zip(
        itertools.pairwise(record.edges), zip(*record.binned, strict=True), strict=True
    ):
        print(f"positions {start:6,} to {stop:6,}  loss {sum(column) / len(column):.4f}")
    print(f"{record.count} documents; {here.results / POSITION_LOSS}")


def needle(
    here: Measurement,
    *,
    lengths: list[int] | None,
    depths: int,
    trials: int,
    digits: int,
    batch: int,
    seed: int,
    as_json: bool,
) -> None:
    """Figure 6's numbers of one run."""
    lengths = lengths or [here.usual_length * factor for factor in (1, 2, 4)]
    places = [0.5] if depths == 1 else np.linspace(0, 1, max(depths, 0)).round(4).tolist()
    found = here.needle(
        lengths=lengths,
        depths=places,
        trials=trials,
        digits=digits,
        batch=batch,
        seed=seed,
        on_progress=Counter(is_shown=not as_json),
    )
    if as_json:
        return _print_lines(found)
    for length in lengths:
        cells = [trial for trial in found if trial.length == length]
        first = sum(trial.first_digit for trial in cells) / len(cells)
        print(f"context {length:6,}  whole number {accuracy(cells):.3f}  first digit {first:.3f}")
    print(here.results / NEEDLE)


def needle_score(
    here: Measurement,
    *,
    length: int | None,
    trials: int,
    depth: float | None,
    digits: int,
    seed: int,
    as_json: bool,
) -> None:
    """Figure 8's numbers of one run."""
    scores = here.needle_scores(
        length=length or 2 * here.usual_length,
        trials=trials,
        depth=depth,
        digits=digits,
        seed=seed,
        on_progress=Counter(is_shown=not as_json),
    )
    if as_json:
        return _print_lines(scores)
    mean = np.mean([score.number_scores for score in scores], axis=0).tolist()
    for layer, head, score in top_heads(mean, 5):
        print(f"layer {layer:2} head {head:2}  mean needle score {score:.4f}")
    found = sum(score.is_whole for score in scores)
    print(f"{found} of {trials} numbers found; {here.results / NEEDLE_SCORE}")


def fading(here: Measurement, *, length: int, documents: int, as_json: bool) -> None:
    """Figure 1 in the wild, of one run."""
    record = here.fading(
        length=length, documents=documents, on_progress=Counter(is_shown=not as_json)
    )
    if as_json:
        return _print_lines([record])
    for index, keys in enumerate(record.num_keys):
        largest = np.mean([head[index] for layer in record.largest for head in layer])
        entropy = np.mean([head[index] for layer in record.entropy for head in layer])
        print(f"n {keys:6,}  largest weight {largest:.4f}  entropy {entropy:.3f}")
    print(here.results / FADING)


def _print_lines(records: Sequence[object]) -> None:
    """For a script: the records, a line each."""
    print("".join(map(to_json_line, records)), end="")
