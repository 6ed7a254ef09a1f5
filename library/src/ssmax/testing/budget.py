"""Tolerances: an implementation may err about as much as eager code does."""

import torch
from torch import Tensor


def assert_no_worse_than(
    out: Tensor, eager: Tensor, exact: Tensor, *, slack: float = 2.0, name: str = "out"
) -> None:
    """Assert that `out` errs, against float64, at most `slack` times as much as eager code.

    To it come four roundings of the largest value, for the cases in which eager code is lucky; and
    as the largest error of a handful of values says little, below 64 of them the slack is four
    times as wide.
    """
    assert out.shape == exact.shape, f"{name}: {tuple(out.shape)} instead of {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    exact = exact.detach().double().cpu()
    error = (out.detach().double().cpu() - exact).abs().max().item()
    allowed = (eager.detach().double().cpu() - exact).abs().max().item()
    rounding = torch.finfo(out.dtype).eps * exact.abs().max().item()
    slack = slack if exact.numel() >= 64 else 4 * slack
    budget = slack * allowed + 4 * rounding
    assert error <= budget, f"{name}: error {error:.2e}, eager {allowed:.2e}, budget {budget:.2e}"
