"""Windows, and what an additive mask hides by: numbers alone, without torch."""

from numbers import Integral

from ssmax.errors import UsageError

Window = int | tuple[int, int] | None
UNBOUNDED = -1
MASKED = -5e3
"""An additive mask hides a key by this or any lower number: BERT's -1e4, -1e9, a dtype's lowest
finite number, -inf. In float32 exp is 0 from -104 on, so such a key has no weight."""


def window_pair(window: Window) -> tuple[int, int]:
    """Turn a window into (left, right), -1 for unbounded: W is (W - 1, 0)."""
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if isinstance(window, Integral) and not isinstance(window, bool):
        if int(window) <= 0:
            raise UsageError(
                f"window must be at least 1 (the query itself), got {window}; "
                "pass None for no window"
            )
        return int(window) - 1, 0
    if isinstance(window, tuple | list) and len(window) == 2:
        left, right = window
        are_ints = all(type(side) is int for side in (left, right))
        if are_ints and min(left, right) >= UNBOUNDED:
            return left, right
    raise UsageError(
        "window must be an int W (the query and the W - 1 keys before it) or a pair (left, right) "
        f"of ints, -1 for unbounded, got {window!r}"
    )
