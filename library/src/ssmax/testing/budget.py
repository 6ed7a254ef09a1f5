"""Tolerances: an implementation may err about as much as eager code does."""

import torch
from torch import Tensor


def error_budget(eager: Tensor, exact: Tensor, dtype: torch.dtype, *, slack: float = 2.0) -> float:
    """Compute what an output may err: `slack` times as much as eager code, and four roundings.

    The roundings are for the cases in which eager code is lucky. As the largest error of a handful
    of values says little, below 64 of them the slack is four times as wide.
    """
    allowed = (eager.detach().double().cpu() - exact).abs().max().item()
    rounding = torch.finfo(dtype).eps * exact.abs().max().item()
    return (slack if exact.numel() >= 64 else 4 * slack) * allowed + 4 * rounding


def assert_no_worse_than(
    out: Tensor, eager: Tensor, exact: Tensor, *, slack: float = 2.0, name: str = "out"
) -> None:
    """Assert that `out` errs, against float64, about as much as eager code at most."""
    assert out.shape == exact.shape, f"{name}: {tuple(out.shape)} instead of {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    exact = exact.detach().double().cpu()
    error = (out.detach().double().cpu() - exact).abs().max().item()
    budget = error_budget(eager, exact, out.dtype, slack=slack)
    assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e} by eager code's own"
