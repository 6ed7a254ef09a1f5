"""What follows from the training length: first values of s, the RoPE limit. Without torch."""

import functools
import math
from collections.abc import Sequence
from numbers import Integral, Real

from ssmax.errors import UsageError


def initial_s(length: int) -> float:
    """Compute L / log(L!): the s for which s log n is 1 on average over n = 1..L."""
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
    """Compute the s for which s sqrt(log n) is 1 on average over n = 1..L."""
    check_length(length)
    # Without tensors: a model may be built of shapes alone.
    return length / math.fsum(math.sqrt(math.log(n)) for n in range(1, int(length) + 1))


def rope_limit(train_length: int, base: float, head_dim: int, *, base_factor: float = 1.0) -> float:
    """Compute the position from which on RoPE shows an angle that training did not.

    Pairs of channels that make a full turn within `train_length` have shown every angle. Of the
    others the fastest meets an unseen one first, at train_length * base_factor^(2i / head_dim) for
    pair i, with `base * base_factor` as the base at test time: the critical dimension of Liu et
    al., "Scaling Laws of RoPE-based Extrapolation", arXiv 2310.05209. It is infinite where every
    pair makes a full turn. `head_dim` counts the channels that RoPE rotates.
    """
    check_length(train_length, "train_length")
    if isinstance(head_dim, bool) or not isinstance(head_dim, Integral):
        raise UsageError(f"head_dim must be a whole number, got {head_dim!r}")
    if head_dim < 2 or head_dim % 2:
        raise UsageError(f"head_dim must be even and at least 2, got {head_dim}")
    for name, value, least in (("base", base, 0.0), ("base_factor", base_factor, 1.0)):
        is_number = isinstance(value, Real) and math.isfinite(value)
        if not is_number or value < least or value == 0:
            raise UsageError(
                f"{name} must be a finite number {'of at least 1' if least else 'above 0'}, "
                f"got {value!r}"
            )
    for i in range(0, head_dim, 2):
        if train_length * base ** (-i / head_dim) < math.tau:
            return train_length * base_factor ** (i / head_dim)
    return math.inf


def frequency_limit(train_length: int, trained: Sequence[float], used: Sequence[float]) -> float:
    """Compute the RoPE limit of any frequencies: those of training, and those of now.

    Both are radians a token, one a pair. `rope_limit` is the same for a raised base alone.
    """
    check_length(train_length, "train_length")
    return min(
        (
            train_length * before / now
            for before, now in zip(trained, used, strict=True)
            if train_length * before < math.tau
        ),
        default=math.inf,
    )
