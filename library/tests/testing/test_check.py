"""The kit itself: verdicts, findings, and what it prints."""

import random

import pytest
import torch
from random_cases import random_case

import ssmax
from ssmax.testing import (
    Case,
    assert_no_worse_than,
    check_attention,
    check_laws,
    naive_attention,
    named_cases,
    oracle_attention,
    oracle_mask,
)
from ssmax.testing.cases import make_case


def test_the_oracle_is_the_definition_on_three_numbers():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 1.0, 2.0]).reshape(1, 1, 3, 1)
    out = oracle_attention(q, k, k, 0.5, scale=1.0)
    powers = [3 ** (0.5 * z) for z in (0.0, 1.0, 2.0)]
    assert out.item() == pytest.approx((powers[1] + 2 * powers[2]) / sum(powers), abs=1e-12)


def test_the_oracle_takes_a_number_as_it_is():
    """0.1 and 10.1 are not what float32 makes of them."""
    case = make_case("number")
    options = {"s": 0.1, "bias": 0.3, "num_keys": 10.1}
    wide = {name: torch.tensor(value, dtype=torch.float64) for name, value in options.items()}
    out, exact = (oracle_attention(case.q, case.k, case.v, **given) for given in (options, wide))
    assert torch.equal(out, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_oracle_ops_and_converted_models_hide_by_one_threshold(dtype):
    from ssmax.hf.masks import count_mask

    lowest = torch.finfo(dtype).min
    hidden = [-torch.inf, lowest, lowest / 2, -1e9, -1e8, -3e4, -1e4, -5e3]
    visible = [-4.9e3, -1e3, -100.0, 0.0, 5.0]
    # Beside each lies a visible key: n is 1 where it hides and 2 where it does not.
    values = [[value, 0.0] for value in (*hidden, *visible)]
    mask = torch.tensor(values, dtype=torch.float64).to(dtype)
    expected = [1] * len(hidden) + [2] * len(visible)
    assert oracle_mask(len(values), 2, attn_mask=mask)[0, 0].sum(-1).tolist() == expected
    assert ssmax.num_visible_keys(mask).tolist() == expected
    assert count_mask(mask[None, None], 2)[0].tolist() == expected


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("attention", [oracle_attention, naive_attention])
def test_the_lowest_number_hides_like_minus_infinity(attention, hidden):
    case = make_case("lowest", dtype=torch.float32)
    visible = torch.ones(9, 9).tril().bool()
    visible[0] = False
    low, infinite = (torch.where(visible, 0.5, value) for value in (hidden, -torch.inf))
    inputs = (case.q.requires_grad_(), case.k, case.v, case.s)
    out, exact = (attention(*inputs, attn_mask=mask) for mask in (low, infinite))
    assert torch.equal(out, exact) and not out[:, :, 0].any()
    assert torch.autograd.grad(out.sum(), case.q)[0].isfinite().all()


def test_the_oracle_mask_of_a_packed_window():
    mask = oracle_mask(5, 5, is_causal=True, window=2, cu_seqlens=torch.tensor([0, 2, 5]))
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_refused_and_failed_are_told_from_wrong():
    def only_causal(q, k, v, s, *, is_causal):
        if not is_causal:
            raise ValueError("causal only")
        raise RuntimeError("boom")

    report = check_attention(only_causal)
    kinds = {outcome.case: outcome.verdict for outcome in report.outcomes}
    assert kinds["causal"] == "failed"
    assert kinds["sliding window"] == "refused"
    assert not report.all_right and not report.wrong()
    assert "boom" in str(report)


def test_a_bug_is_not_a_refusal_and_no_cases_are_none():
    def buggy(q, k, v, s, **options):
        return torch.log(3)

    assert {o.verdict for o in check_attention(buggy).outcomes} == {"failed"}
    assert check_attention(ssmax.ssmax_attention, []).outcomes == []

    def causal_only(q, k, v, s, *, is_causal=False):
        return ssmax.ssmax_attention(q, k, v, s, is_causal=is_causal)

    assert check_laws(causal_only) == {}, "what is not taken is not broken"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_tolerance_is_that_of_the_dtype(dtype):
    """What is right is right in any; a wrong n is found where it moves more than rounding."""
    wrong = (lambda n: 3 * n) if dtype == torch.bfloat16 else (lambda n: n + 1)
    cases = named_cases(dtype)
    assert check_attention(ssmax.ssmax_attention, cases).all_right
    assert not check_attention(ssmax.ssmax_attention, cases, tolerance=1e-9).all_right

    def mistaken(q, k, v, s, **options):
        case = Case(name="", q=q, k=k, v=v, s=s, options=options)
        n = wrong(case.mask().sum(-1).clamp_min(1))
        return naive_attention(q, k, v, s, **{**options, "num_keys": n})

    # Its one key has all the weight, whatever n is.
    found = [one for one in check_attention(mistaken, cases).outcomes if one.case != "one token"]
    assert {one.verdict for one in found} == {"wrong"}


def test_the_oracle_knows_more_queries_than_keys():
    mask = oracle_mask(4, 2, is_causal=True)
    assert mask[0, 0].int().tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]


def test_softmax_and_nan_are_recognised():
    def softmax(q, k, v, s, **options):
        return ssmax.ssmax_attention(q, k, v, 0.0, **{**options, "bias": 1.0})

    report = check_attention(softmax, [make_case("causal", is_causal=True)])
    assert report.outcomes[0].finding == "softmax: the logits are not scaled"
    report = check_attention(lambda q, *_, **__: q * torch.nan, [make_case("causal")])
    assert report.outcomes[0].finding == "NaN"
    report = check_attention(lambda q, *_, **__: q[:1], [make_case("causal")])
    expected = "shape (1, 4, 9, 8) instead of a tensor of shape (2, 4, 9, 8)"
    assert report.outcomes[0].finding == expected


def test_weights_beside_the_output_are_told_from_a_tensor():
    report = check_attention(lambda q, *_, **__: (q, None), [make_case("causal")])
    assert report.outcomes[0].verdict == "wrong"
    assert report.outcomes[0].finding.startswith("a tuple instead of a tensor")


def test_the_same_random_state_draws_the_same_case():
    first, second = (random_case(random.Random(5)) for _ in range(2))
    assert str(first) == str(second)
    assert torch.equal(first.q, second.q)


def test_every_named_case_tells_a_wrong_n_from_the_right_one():
    """A case in which n + 1 gave the same output would test nothing."""
    for case in named_cases():
        if case.name == "one token":
            continue
        exact = oracle_attention(case.q, case.k, case.v, case.s, **case.options)
        n = case.mask().sum(-1).clamp_min(1)
        wrong = oracle_attention(
            case.q, case.k, case.v, case.s, **{**case.options, "num_keys": n + 1}
        )
        assert (exact - wrong).abs().max() > 1e-2, case.name


def test_the_budget_can_be_overdrawn():
    exact = torch.ones(4, dtype=torch.float64)
    assert_no_worse_than(torch.ones(4), torch.ones(4), exact)
    with pytest.raises(AssertionError, match="budget"):
        assert_no_worse_than(torch.ones(4) + 1e-5, torch.ones(4), exact)
    with pytest.raises(AssertionError, match="budget"):
        assert_no_worse_than(torch.full((4,), torch.nan), torch.ones(4), exact)


def test_a_case_prints_what_is_in_it():
    case = make_case("window", window=3)
    assert isinstance(case, Case) and "window=3" in str(case)
