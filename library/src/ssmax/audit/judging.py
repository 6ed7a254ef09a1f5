"""Judge what an engine computed by what the reference computes with the scale on and off."""

# T tokens, K tokens whose log-probabilities are compared

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from torch import Tensor

from ssmax.audit.reference import Progress, Reference

Finding = Literal["applied", "dropped", "another n", "not comparable"]
ROUNDING, SHARE = 1e-3, 0.01
"""Allowed differences: of float32 over thousands of keys, and of what the scale changes."""
VISIBLE = 3 * ROUNDING
"""A median change below it is lost in the rounding."""
EXPLAINED = 0.25
"""Of a difference, at most what is left with the n that explains it; chance leaves nearly all."""
TRIED, FEW = 8, 0.01
"""How many positions that differ are tried for an n that explains them. Where none does, and they
are few, something else rounded otherwise, as a router between two experts."""


Miss = Callable[[int | None], float]
"""How far the query is from what was computed, scaled as one that sees n keys, or not at all."""


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
    found = Verdict(engine=name, version=rows.version, finding="not comparable", why="")
    total = tokens_T.shape[0] - 1
    if rows.ids.shape[0] != total:
        return replace(found, why=f"it gave {rows.ids.shape[0]} rows of {total}")
    if not bool(rows.logprobs.isfinite().all()):
        return replace(found, why="it computed NaN or infinity")
    on, off = (
        reference.logprobs(tokens_T, rows.ids, scaled=scaled, progress=progress)
        for scaled in (True, False)
    )
    error_T, from_off_T, change_T = (
        _distance(a, b) for a, b in ((rows.logprobs, on), (rows.logprobs, off), (on, off))
    )
    begins = reference.scale.begins
    of_scale = change_T[begins:].median().item() if begins < total else 0.0
    found = replace(found, difference=error_T.max().item(), of_scale=of_scale)
    if of_scale < VISIBLE:
        why = (
            f"over {total:,} positions the scale, which begins at {begins:,}, changes "
            f"log-probabilities by {of_scale:.1g}, too little to be seen"
        )
        return replace(found, why=why)
    # A position where the scale changes much is sensitive to rounding as well.
    allowed_T = ROUNDING + SHARE * change_T.clamp_min(of_scale)
    differing = (error_T > allowed_T).nonzero()[:, 0].tolist()
    if not differing:
        return replace(found, finding="applied")
    if bool((from_off_T <= allowed_T).all()):
        found = replace(found, position=differing[0], declared_n=differing[0] + 1)
        why = f"all {total:,} positions are those without the scale"
        return replace(found, finding="dropped", why=why)
    share = len(differing) / total
    for position in differing[:TRIED]:
        compute = reference.after(tokens_T, position, rows.ids[position])
        allowed = min(allowed_T[position].item(), EXPLAINED * error_T[position].item())
        told = _implied(compute, rows.logprobs[position], position, total, allowed)
        if told is not None:
            implied, how = told
            return replace(
                found, finding="another n", position=position, declared_n=position + 1,
                implied_n=implied, why=f"{how}; {share:.1%} of all positions differ",
            )  # fmt: skip
    if share < FEW:
        why = f"{len(differing)} of {total:,} positions differ, which no n explains"
        return replace(found, finding="applied", why=why)
    why = (
        f"{share:.1%} of all positions differ from the reference, the first at {differing[0]:,}, "
        f"by up to {found.difference:.2g}, and no n explains it: something else differs"
    )
    return replace(found, why=why)


def _implied(
    compute: Callable[[int | None], Tensor],
    wanted_K: Tensor,
    position: int,
    total: int,
    allowed: float,
) -> tuple[tuple[int, int] | None, str] | None:
    """Find the n, None for no scale, that explains a position, and say it; None: no n does."""

    def miss(n: int | None) -> float:
        return _distance(compute(n), wanted_K).item()

    best, tried = _nearest(miss, position + 1, total)
    if tried[best] > allowed:
        return None
    said = f"position {position:,}, n = {position + 1:,}, is computed"
    if best is None:
        return None, f"{said} without the scale"
    low, high = _alike(miss, best, tried, max(2 * tried[best], 0.1 * allowed))
    return (low, high), f"{said} as n = {low:,}" + (f" to {high:,}" if high > low else "")


def _nearest(miss: Miss, declared: int, length: int) -> tuple[int | None, dict[int | None, float]]:
    """Find the n whose factor comes nearest, or None: no scale; and all that were tried."""
    tried: dict[int | None, float] = {None: miss(None)}
    grid = {declared + shift for shift in range(-3, 4)} | {1, 2, 3, length, 2 * length}
    grid |= {round(2.0 ** (k / 4)) for k in range(4 * (4 * length).bit_length())}
    for n in sorted(n for n in grid if n >= 1):
        tried[n] = miss(n)
    while True:
        # Between the nearest and its neighbours, halving.
        known = sorted(n for n in tried if n is not None)
        best = min(known, key=lambda n: tried[n])
        index = known.index(best)
        middles = {(best + other) // 2 for other in known[max(index - 1, 0) : index + 2]} - {*known}
        if not middles:
            break
        for n in middles:
            tried[n] = miss(n)
    # Before it begins the factor is 1 as well: no scale is the simpler word for it.
    return (None if tried[None] <= tried[best] else best), tried


def _alike(miss: Miss, best: int, tried: dict[int | None, float], near: float) -> tuple[int, int]:
    """Find the first and the last n about the best one that come as near."""
    known = sorted(n for n in tried if n is not None)
    farther = [0, *(n for n in known if tried[n] > near), known[-1] + 1]
    edges = []
    for outside in (max(n for n in farther if n < best), min(n for n in farther if n > best)):
        inside = best
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if miss(middle) <= near else (inside, middle)
        edges.append(inside)
    return edges[0], edges[1]


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Compute the root mean square over tokens, of every row."""
    return (a.double() - b.double()).square().mean(-1).sqrt()
