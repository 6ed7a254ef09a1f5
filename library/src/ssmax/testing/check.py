"""check_attention: whether an attention counts n right, case by case, or what it counts instead."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ssmax.testing.cases import Case, named_cases

Attention = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an attention made of one case."""

    case: str
    verdict: Literal["right", "wrong", "refused", "failed"]
    error: float
    """Largest deviation from the oracle; NaN where nothing came."""
    finding: str
    """What it counts instead, or why nothing came."""


@dataclass(frozen=True)
class Report:
    """Outcomes of all cases; printed as a table."""

    outcomes: list[Outcome]

    @property
    def all_right(self) -> bool:
        """True where every case was served and none was wrong."""
        return all(outcome.verdict == "right" for outcome in self.outcomes)

    def wrong(self) -> list[Outcome]:
        """Select the cases that came out wrong."""
        return [outcome for outcome in self.outcomes if outcome.verdict == "wrong"]

    def __str__(self) -> str:
        width = max((len(outcome.case) for outcome in self.outcomes), default=0)
        return "\n".join(
            f"{o.case:<{width}}  {o.verdict:<7}  {o.error:8.1e}  {o.finding}".rstrip()
            for o in self.outcomes
        )


def check_attention(
    attention: Attention, cases: Iterable[Case] | None = None, *, tolerance: float | None = None
) -> Report:
    """Call `attention(q, k, v, s, **options)` on every case and compare it with the oracle.

    The cases are `named_cases()` in float64 unless given; s is one value per query head. Options
    are those of `ssmax.ssmax_attention`. For attention under context parallelism, call it on every
    rank with `split_cases(rank, size)`: options are then those of
    `ssmax.distributed.context_parallel_attention`. An attention that does not take an option, or
    raises ValueError or NotImplementedError, has refused the case: no answer is better than a wrong
    one. Any other exception is a failure. `tolerance` is by default about the error of eager code
    in the dtype of the case, at least 1e-6.
    """
    cases = named_cases() if cases is None else cases
    return Report(
        [_judge(attention, c, c.tolerance() if tolerance is None else tolerance) for c in cases]
    )


def is_refusal(error: Exception) -> bool:
    """True for an option that is not taken and for a call that is turned down, not for a bug."""
    unknown_option = isinstance(error, TypeError) and "unexpected keyword" in str(error)
    return unknown_option or isinstance(error, ValueError | NotImplementedError)


def _judge(attention: Attention, case: Case, tolerance: float) -> Outcome:
    exact = case.exact()
    try:
        out = attention(case.q, case.k, case.v, case.s, **case.options)
    except Exception as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        verdict = "refused" if is_refusal(error) else "failed"
        return Outcome(case=case.name, verdict=verdict, error=float("nan"), finding=message)
    if not isinstance(out, Tensor) or out.shape != exact.shape:
        came = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        finding = f"{came} instead of a tensor of shape {tuple(exact.shape)}"
        return Outcome(case=case.name, verdict="wrong", error=float("nan"), finding=finding)
    error = _distance(out, exact)
    if error <= tolerance:
        return Outcome(case=case.name, verdict="right", error=error, finding="")
    finding = _diagnose(case, out, tolerance)
    return Outcome(case=case.name, verdict="wrong", error=error, finding=finding)


def _diagnose(case: Case, out: Tensor, tolerance: float) -> str:
    """Find the first known mistake that explains the output."""
    if out.isnan().any():
        return "NaN"
    for mistake, num_keys in case.mistaken_counts().items():
        if _distance(out, case.exact(num_keys=num_keys)) <= tolerance:
            return f"n is taken for {mistake}"
    if _distance(out, case.exact(s=0.0, bias=1.0)) <= tolerance:
        return "softmax: the logits are not scaled"
    return "unexplained"


def _distance(out: Tensor, exact: Tensor) -> float:
    distance = (out.detach().double() - exact.detach()).abs()
    return distance.nan_to_num(torch.inf).max().item() if distance.numel() else 0.0
