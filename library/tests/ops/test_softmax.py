"""The function itself: its laws, its bounds, its critical lead."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssmax import ssmax, ssmax_power

S = st.floats(0.05, 3.0)
N = st.integers(2, 400)
SEED = st.integers(0, 2**30)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return 3 * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@given(S, N, SEED)
def test_it_is_the_power_of_n(s, n, seed):
    z = draw(seed, 3, n)
    torch.testing.assert_close(ssmax(z, s), ssmax_power(z, s), rtol=1e-10, atol=1e-14)


@given(st.floats(-2.0, 2.0), N, SEED, st.integers(0, 1))
def test_it_is_the_power_of_n_under_a_mask_along_any_dim(s, n, seed, dim):
    z = draw(seed, n, 5)
    mask = torch.rand(n, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
    out = ssmax(z, s, mask=mask, dim=dim)
    torch.testing.assert_close(out, ssmax_power(z, s, mask=mask, dim=dim), rtol=1e-9, atol=1e-13)
    assert (out[~mask] == 0).all()
    row_sums = out.sum(dim)
    torch.testing.assert_close(row_sums, mask.any(dim).double(), rtol=1e-12, atol=0.0)


@given(S, N, SEED, st.floats(-50.0, 50.0))
def test_adding_a_constant_changes_nothing(s, n, seed, constant):
    z = draw(seed, n)
    torch.testing.assert_close(ssmax(z + constant, s), ssmax(z, s), rtol=1e-9, atol=1e-13)


@given(S, N, SEED)
def test_hidden_entries_are_as_absent_ones(s, n, seed):
    z = draw(seed, n)
    mask = torch.zeros(n + 7, dtype=torch.bool)
    mask[:n] = True
    padded = torch.cat((z, torch.full((7,), 99.0, dtype=torch.float64)))
    assert torch.equal(ssmax(padded, s, mask=mask)[:n], ssmax(z, s))


@given(st.floats(0.01, 4.0), st.integers(2, 2_000), st.floats(0.0, 30.0))
def test_the_bounds_meet_where_all_leads_are_equal(s, n, lead):
    z = torch.zeros(n, dtype=torch.float64)
    z[-1] = lead
    assert ssmax(z, s).max().item() == pytest.approx(1 / (1 + (n - 1) * n ** (-s * lead)), rel=1e-9)


@given(st.floats(0.01, 4.0), st.integers(2, 500), SEED)
def test_the_largest_output_lies_between_the_bounds_of_the_paper(s, n, seed):
    z = draw(seed, n).sort(descending=True).values
    largest = ssmax(z, s).max().item()
    lower = 1 / ((n - 1) * n ** (-s * (z[0] - z[1]).item()) + 1)
    upper = 1 / ((n - 1) * n ** (-s * (z[0] - z[-1]).item()) + 1)
    assert lower * (1 - 1e-9) <= largest <= upper * (1 + 1e-9)


@given(st.floats(0.1, 4.0), st.floats(0.02, 1.0), st.integers(100, 4_000))
def test_the_critical_lead_is_one_over_s_whatever_n_is(s, margin, n):
    """A lead above 1/s grows towards all the weight with n, one below it fades."""
    above, below = (1 + margin) / s, (1 - margin) / s
    outputs = {}
    for lead in (above, below):
        for length in (n, 8 * n):
            z = torch.zeros(length, dtype=torch.float64)
            z[0] = lead
            outputs[lead, length] = ssmax(z, s)[0].item()
    assert outputs[above, 8 * n] > outputs[above, n] > 0.5
    assert outputs[below, 8 * n] < outputs[below, n] < 0.5 + 1e-12


def test_figure_1_softmax_fades_and_ssmax_does_not():
    for n in (2, 10, 100, 1_000, 65_536):
        z = torch.full((n,), -2.0, dtype=torch.float64)
        z[-1] = 3.0
        assert ssmax(z, 0.43).max().item() > 0.8
    assert z.softmax(-1).max().item() < 0.003


def test_figure_3_focus_starts_at_a_lead_of_one_over_s():
    s = 0.43
    for n in (100, 10_000):
        rest = torch.arange(n - 1, dtype=torch.float64) / (n - 2)
        focused = torch.cat((rest, torch.tensor([1.0 + 3.5 / s]).double()))
        spread = torch.cat((rest, torch.tensor([1.0]).double()))
        assert ssmax(focused, s).max().item() > 0.99
        assert ssmax(spread, s).max().item() < 0.05


@pytest.mark.parametrize("s", [0.5, 0.0, -0.5, torch.tensor(0.3)])
def test_one_visible_entry_gets_all_the_weight(s):
    assert ssmax(torch.tensor([4.2]), s).tolist() == [1.0]
    mask = torch.tensor([False, True, False])
    assert ssmax(torch.tensor([1.0, 2.0, 3.0]), s, mask=mask).tolist() == [0.0, 1.0, 0.0]
    assert ssmax(torch.tensor([-torch.inf, 2.0]), s).tolist() == [0.0, 1.0]


def test_a_fully_hidden_row_gives_zeros_and_a_finite_gradient():
    z = torch.randn(2, 3, requires_grad=True)
    s = torch.tensor(0.7, requires_grad=True)
    mask = torch.tensor([[False] * 3, [True] * 3])
    out = ssmax(z, s, mask=mask)
    (out * torch.tensor([1.0, 2.0, 5.0])).sum().backward()
    assert out[0].tolist() == [0.0, 0.0, 0.0]
    assert z.grad.isfinite().all() and s.grad.isfinite().all()
    assert (z.grad[0] == 0).all()
    assert (ssmax_power(z.detach().double(), 0.7, mask=mask)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_large_logits_neither_overflow_nor_become_nan(dtype):
    z = torch.tensor([1e4, -1e4, 9.9e3, 0.0], dtype=dtype)
    out = ssmax(z, 0.5)
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert out[0].item() == pytest.approx(1.0, abs=1e-6)


def test_the_definition_has_finite_gradients_under_a_mask():
    z = torch.tensor([-1e4, -1e4 + 1, 0.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False])
    (gradient,) = torch.autograd.grad(ssmax_power(z, 1.0, mask=mask)[0], z)
    (expected,) = torch.autograd.grad(ssmax(z, 1.0, mask=mask)[0], z)
    torch.testing.assert_close(gradient, expected)


def test_s_zero_is_uniform_and_a_negative_s_inverts():
    z = torch.tensor([0.0, 1.0, 2.0]).double()
    torch.testing.assert_close(ssmax(z, 0.0), torch.full((3,), 1 / 3).double())
    assert ssmax(z, -0.7).argmax().item() == 0


def test_the_bias_is_added_to_the_factor():
    z = torch.tensor([0.0, 1.0, 2.0]).double()
    torch.testing.assert_close(ssmax(z, 0.4, bias=0.3), ((0.4 * math.log(3) + 0.3) * z).softmax(-1))
    torch.testing.assert_close(ssmax(z, 0.0, bias=1.0), z.softmax(-1), rtol=0, atol=0)


def test_one_s_per_head():
    z = torch.randn(2, 3, 4, 5).double()
    s = torch.tensor([0.1, 0.5, 2.0]).double()
    out = ssmax(z, s[:, None, None])
    for head in range(3):
        torch.testing.assert_close(out[:, head], ssmax(z[:, head], s[head].item()))


def test_nan_in_z_is_not_hidden():
    assert ssmax(torch.tensor([float("nan"), 1.0]), 0.5).isnan().all()


@settings(max_examples=25)
@given(SEED)
def test_gradients(seed):
    z = draw(seed, 2, 5).requires_grad_()
    s = torch.tensor([[0.4], [-0.3]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 5, generator=torch.Generator().manual_seed(seed)) < 0.7
    torch.autograd.gradcheck(lambda *x: ssmax(x[0], x[1], bias=x[2], mask=mask), (z, s, b))
