"""Lengths of training sequences, and the values of s that start from one. Without torch."""

import functools
import math
from numbers import Real

from ssmax.errors import UsageError


def initial_s(length: int) -> float:
    """L / log(L!): the s for which s log n is 1 on average over n = 1..L."""
    check_length(length)
    return length / math.lgamma(length + 1)


def check_length(length: int, name: str = "length") -> None:
    """Raise on what is no length of a training sequence."""
    is_whole = isinstance(length, Real) and math.isfinite(length) and length == int(length)
    if isinstance(length, bool) or not is_whole or length < 2:
        raise UsageError(
            f"{name} must be a whole number of at least 2 tokens, got {length!r}; "
            "give the length of the training sequences"
        )


@functools.cache
def initial_sqrt_log_s(length: int) -> float:
    """The s for which s sqrt(log n) is 1 on average over n = 1..L."""
    check_length(length)
    # Without tensors: a model may be built of shapes alone.
    return length / math.fsum(math.sqrt(math.log(n)) for n in range(1, int(length) + 1))
