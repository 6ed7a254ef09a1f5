"""Mistakes of published code, each as a test that fails on it.

Where the mistake is more than a line, it is run as well: the test is known to be able to fail.
"""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ssmax
from ssmax.testing import check_attention, check_laws
from ssmax.testing.cases import make_case, named_cases


def causal_mask(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def explicit(q, k, v, factor, mask):
    z = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (z * factor).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def mistaken(count):
    """An attention that is right but for its n."""

    def attention(q, k, v, s, *, is_causal=False, key_padding_mask=None, positions=None):
        mask = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
        if is_causal:
            mask = mask & causal_mask(q.shape[2], k.shape[2])
        if key_padding_mask is not None:
            mask = mask & key_padding_mask[:, None, None]
        n = torch.as_tensor(count(q, k, mask)).double()
        return explicit(q, k, v, s[:, None, None] * n.log().unsqueeze(-1), mask)

    return attention


def verdicts(attention, *names):
    cases = [case for case in named_cases() if not names or case.name in names]
    return {outcome.case: outcome for outcome in check_attention(attention, cases).outcomes}


def assert_ours_is_right(*names):
    assert all(o.verdict == "right" for o in verdicts(ssmax.ssmax_attention, *names).values())


def test_masked_keys_are_not_counted():
    """n as the size of the row, future and all: one temperature for every query."""
    names = ("causal", "chunk of queries against a cache")
    wrong = verdicts(mistaken(lambda q, k, mask: k.shape[2]), *names)
    assert all("the number of keys, seen or not" in wrong[name].finding for name in names)
    assert_ours_is_right(*names)


def test_n_is_not_n_plus_one():
    wrong = verdicts(mistaken(lambda q, k, mask: mask.sum(-1) + 1), "causal", "bidirectional")
    assert all("n + 1" in outcome.finding for outcome in wrong.values())
    assert_ours_is_right("causal", "bidirectional")


def test_queries_are_not_counted_for_keys():
    """Cross attention with one query against many keys became uniform."""
    wrong = verdicts(mistaken(lambda q, k, mask: q.shape[2]), "cross attention")
    assert "the number of queries" in wrong["cross attention"].finding
    assert_ours_is_right("cross attention")


def test_the_positions_of_the_first_row_are_not_everyones():
    keep = torch.tensor([[False] * 2 + [True] * 7, [False] * 4 + [True] * 5])
    case = make_case("left padding", is_causal=True, key_padding_mask=keep)
    first_row = mistaken(lambda q, k, mask: mask.sum(-1).clamp_min(1)[:1])
    (outcome,) = check_attention(
        lambda *x, **options: first_row(*x, **options).nan_to_num(0.0), [case]
    ).outcomes
    assert "the n of the first row" in outcome.finding
    assert check_attention(ssmax.ssmax_attention, [case]).all_right


def test_padding_is_not_counted():
    names = ("right padding", "ragged padding, bidirectional", "padded cross attention")
    wrong = verdicts(mistaken(lambda q, k, mask: k.shape[2]), *names)
    assert all(outcome.verdict == "wrong" for outcome in wrong.values())
    assert_ours_is_right(*names)


def test_a_decoding_step_does_not_see_one_key():
    """n = the place in the chunk: log 1 = 0 at every step, thirteen times too small and worse."""
    name = "decode, one query against a cache"
    wrong = verdicts(mistaken(lambda q, k, mask: torch.arange(1, q.shape[2] + 1)), name)
    assert wrong[name].verdict == "wrong"
    assert_ours_is_right(name, "left-padded decode", "sliding window, decode")


def test_an_unused_cache_is_not_counted():
    name = "preallocated cache, the end unused"
    wrong = verdicts(mistaken(lambda q, k, mask: k.shape[2]), name)
    assert wrong[name].verdict == "wrong"
    assert_ours_is_right(name)


def test_a_window_stops_n_from_growing():
    """Dragon's window of (w, 0) sees w + 1 keys; n clamped to w is off by one."""
    n = ssmax.visible_keys(20, 20, is_causal=True, window=(8, 0))
    assert n.max().item() == 9
    assert ssmax.visible_keys(20, 20, is_causal=True, window=8).max().item() == 8
    assert_ours_is_right("sliding window", "sliding window, decode", "sliding window, packed")


def test_log_n_is_a_factor_not_a_summand():
    """Added to every logit it cancels: an exact no-op with a dead gradient."""
    z, s = torch.randn(4, 9).double(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    no_op = (z + s * math.log(9)).softmax(-1)
    torch.testing.assert_close(no_op, z.softmax(-1))
    (dead,) = torch.autograd.grad(no_op.square().sum(), s)
    (alive,) = torch.autograd.grad(ssmax.ssmax(z, s).square().sum(), s)
    assert abs(dead.item()) < 1e-12 < 1e-3 < abs(alive.item())
    assert not torch.allclose(ssmax.ssmax(z, s), z.softmax(-1))


def test_a_larger_s_is_sharper():
    """The documentation of one package says the opposite."""
    z = torch.randn(512, generator=torch.Generator().manual_seed(0))
    assert ssmax.ssmax(z, 1.0).max() > 5 * ssmax.ssmax(z, 0.1).max()


def test_log_n_is_not_rounded_to_bfloat16():
    n = torch.arange(58_032, 61_775)
    assert n.bfloat16().log().unique().numel() == 1  # the mistake: one scale for 3,743 lengths
    factor = ssmax.ssmax_factor(n, torch.ones(1, dtype=torch.bfloat16))
    assert factor.dtype == torch.float32 and factor.unique().numel() > 3_700
    q, k = torch.ones(1, 1, 1, 8), torch.randn(1, 1, 4, 8)
    outs = [ssmax.ssmax_attention(q, k, k, 0.1, num_keys=m) for m in (58_032, 61_774)]
    assert not torch.equal(*outs)


def test_a_new_length_does_not_compile_anew():
    def lengths_compiled(function):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(function, backend=counter)
        for length in range(5, 17):
            compiled(torch.randn(2, length))
        return counter.frame_count

    assert lengths_compiled(lambda z: (z * math.log(z.shape[-1])).softmax(-1)) > 2
    assert lengths_compiled(lambda z: ssmax.ssmax(z, 0.43)) <= 2


def test_no_nan_at_one_key_or_a_negative_s():
    hidden = torch.tensor([2.0, -torch.inf])
    assert (hidden * 0.43 * math.log(1)).softmax(-1).isnan().any()
    for s in (0.43, 0.0, -0.43):
        assert ssmax.ssmax(hidden, s).tolist() == [1.0, 0.0]
        assert ssmax.ssmax(hidden, s, bias=0.5).tolist() == [1.0, 0.0]


def test_rows_of_any_rank_sum_to_one():
    """One pull request normalised over the whole tensor, without subtracting the largest."""
    z = torch.full((2, 3, 4, 64), 100.0)
    z[..., 0] = 120.0
    torch.testing.assert_close(ssmax.ssmax(z, 1.0).sum(-1), torch.ones(2, 3, 4))


def test_a_factor_of_zero_stays_zero():
    """`factor or 0.43` turned a chosen 0 into 0.43."""
    z = torch.tensor([0.0, 5.0])
    assert ssmax.ssmax(z, 0.0).tolist() == [0.5, 0.5]


def test_the_scale_comes_after_the_norm():
    """Before an RMSNorm a scalar is divided out: the knob does nothing."""
    x, norm = torch.randn(5, 16), torch.nn.RMSNorm(16, eps=0.0)
    torch.testing.assert_close(norm(3.0 * x), norm(x))
    layer = ssmax.nn.SelfAttention(16, 2, train_length=8, qk_norm=True)
    hidden = torch.randn(1, 8, 16)
    before = layer(hidden)
    with torch.no_grad():
        layer.ssmax.s.mul_(5.0)
    assert not torch.allclose(layer(hidden), before, atol=1e-3)


def test_the_kit_knows_right_from_wrong():
    assert check_attention(ssmax.ssmax_attention).all_right
    assert check_laws(ssmax.ssmax_attention) == {}
    broken = check_laws(mistaken(lambda q, k, mask: k.shape[2]))
    assert {"any_split_into_chunks_agrees", "padding_changes_nothing"} <= set(broken)


@pytest.mark.parametrize("length", [1, 2])
def test_rows_of_one_or_two_tokens(length):
    """One evaluation code raised an UnboundLocalError at a single token."""
    case = make_case("short", queries=length, is_causal=True)
    assert check_attention(ssmax.ssmax_attention, [case]).all_right
