"""Judge what an engine computed by what the reference computes with the scale on and off."""

# T tokens, K tokens whose log-probabilities are compared

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from ssmax.audit.reference import Progress, Reference

Finding = Literal["applied", "dropped", "another n", "not comparable"]
SHARE = 0.1
"""Of what the scale changes: a smaller difference is none."""
SMALLEST = 1e-4
"""A median change below it is lost in the rounding of float32."""
TRIED = 8
"""Positions that differ without a scale that explains it, before nothing is said."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What an engine computed: log-probabilities of some tokens after every token but the last."""

    version: str
    ids: Tensor
    """(T - 1, K)"""
    logprobs: Tensor
    """(T - 1, K)"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found of one engine."""

    engine: str
    version: str
    finding: Finding
    why: str
    position: int | None = None
    """The first where another scale than the declared one explains what was computed."""
    declared_n: int | None = None
    implied_n: tuple[int, int] | None = None
    """From and to: all whose factor is the same. None where no scale at all explains it best."""
    difference: float | None = None
    """Largest difference from the reference with the scale on, root mean square of a position."""
    of_scale: float | None = None
    """What the scale changes: the median of the positions where it does."""


def judge(
    name: str, rows: Rows, reference: Reference, tokens_T: Tensor, progress: Progress | None = None
) -> Verdict:
    """Compare an engine with the reference, position by position."""
    total = tokens_T.shape[0] - 1
    if rows.ids.shape[0] != total:
        return _incomparable(name, rows, f"it gave {rows.ids.shape[0]} rows of {total}")
    if not bool(rows.logprobs.isfinite().all()):
        return _incomparable(name, rows, "it computed NaN or infinity")
    on, off = (
        reference.logprobs(tokens_T, rows.ids, scaled=scaled, progress=progress)
        for scaled in (True, False)
    )
    error_T, from_off_T, change_T = (
        _distance(a, b) for a, b in ((rows.logprobs, on), (rows.logprobs, off), (on, off))
    )
    begins = reference.scale.begins
    of_scale = change_T[begins:].median().item() if begins < total else 0.0
    sizes = {"difference": error_T.max().item(), "of_scale": of_scale}
    if of_scale < SMALLEST:
        why = (
            f"over {total:,} positions the scale, which begins at {begins:,}, changes "
            f"log-probabilities by {of_scale:.1g}, too little to be seen"
        )
        return _incomparable(name, rows, why, **sizes)
    # A position where the scale changes much is sensitive to rounding as well.
    allowed_T = SHARE * change_T.clamp_min(of_scale)
    differs_T = error_T > allowed_T
    if not differs_T.any():
        return Verdict(
            engine=name, version=rows.version, finding="applied", why="", **sizes
        )
    if bool((from_off_T <= allowed_T).all()):
        first = int(differs_T.nonzero()[0])
        return Verdict(
            engine=name, version=rows.version, finding="dropped",
            why=f"all {total:,} positions are those without the scale",
            position=first, declared_n=first + 1, **sizes,
        )  # fmt: skip
    return _another_n(name, rows, reference, tokens_T, differs_T, allowed_T, sizes)


def _another_n(
    name: str,
    rows: Rows,
    reference: Reference,
    tokens_T: Tensor,
    differs_T: Tensor,
    allowed_T: Tensor,
    sizes: dict[str, float],
) -> Verdict:
    """Find the first position that another n, or none, explains."""
    share = differs_T.float().mean().item()
    positions = differs_T.nonzero()[:, 0].tolist()
    for position in positions[:TRIED]:
        wanted_K, allowed = rows.logprobs[position], allowed_T[position].item()
        compute = reference.after(tokens_T, position, rows.ids[position])

        def miss(n: int | None, compute=compute, wanted_K=wanted_K) -> float:
            return _distance(compute(n), wanted_K).item()

        best, distances = _nearest(miss, position + 1, tokens_T.shape[0])
        if distances[best] > allowed:
            continue
        about = f"position {position:,}, n = {position + 1:,}, is computed "
        implied = None
        if best is None:
            about += "without the scale"
        else:
            near = max(2 * distances[best], 0.1 * allowed)
            same = sorted(n for n, d in distances.items() if n is not None and d <= near)
            implied = _around(best, same, distances, near)
            low, high = implied
            about += f"as n = {low:,}" + (f" to {high:,}" if high > low else "")
        about += f"; {share:.1%} of all positions differ"
        return Verdict(
            engine=name, version=rows.version, finding="another n", why=about,
            position=position, declared_n=position + 1, implied_n=implied, **sizes,
        )  # fmt: skip
    why = (
        f"{share:.1%} of all positions differ from the reference, the first at {positions[0]:,}, "
        f"by up to {sizes['difference']:.2g}, and no n explains it: something else differs"
    )
    return _incomparable(name, rows, why, **sizes)


def _nearest(miss, declared: int, length: int) -> tuple[int | None, dict[int | None, float]]:
    """Find the n whose factor comes nearest, or None: no scale; and all that were tried."""
    tried: dict[int | None, float] = {None: miss(None)}
    grid = {declared + shift for shift in range(-3, 4)} | {1, 2, 3, length, 2 * length}
    grid |= {round(2.0 ** (k / 4)) for k in range(4 * (4 * length).bit_length())}
    for n in sorted(n for n in grid if n >= 1):
        tried[n] = miss(n)
    # Between its neighbours of the grid, halving.
    for _ in range(length.bit_length() + 2):
        known = sorted(n for n in tried if n is not None)
        best = min(known, key=lambda n: tried[n])
        index = known.index(best)
        middles = {(best + other) // 2 for other in known[max(index - 1, 0) : index + 2]} - {*known}
        if not middles:
            break
        for n in middles:
            tried[n] = miss(n)
    nearest = min((n for n in tried if n is not None), key=lambda n: tried[n])
    # Before the scale begins its factor is 1 as well: no scale is the simpler word for it.
    return (None if tried[None] <= tried[nearest] else nearest), tried


def _around(
    best: int, same: list[int], distances: dict[int | None, float], near: float
) -> tuple[int, int]:
    """Widen n to those beside it that are as near, with none between that is not."""
    known = sorted(n for n in distances if n is not None)
    low = high = known.index(best)
    while low > 0 and known[low - 1] in same:
        low -= 1
    while high + 1 < len(known) and known[high + 1] in same:
        high += 1
    return known[low], known[high]


def _incomparable(name: str, rows: Rows, why: str, **sizes: float) -> Verdict:
    return Verdict(
        engine=name, version=rows.version, finding="not comparable", why=why, **sizes
    )


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Compute the root mean square over tokens, of every row."""
    return (a.double() - b.double()).square().mean(-1).sqrt()
