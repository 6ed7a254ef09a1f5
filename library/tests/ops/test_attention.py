"""ssmax_attention: backends agree, names are promises, and no queries x keys tensor is made."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from ssmax import attention_rows, ssmax_attention
from ssmax.ops import attention as attention_module
from ssmax.ops.backends import choose_backend
from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.visible import mask_spec
from ssmax.testing import (
    LAWS,
    LargestTensor,
    assert_no_worse_than,
    check_attention,
    naive_attention,
    oracle_attention,
)
from ssmax.testing.cases import make_case, named_cases

LONG = 1500
SITUATIONS = {
    "causal": {"is_causal": True},
    "bidirectional": {},
    "decode": {"queries": 1, "is_causal": True},
    "chunk": {"queries": 700, "is_causal": True},
    "window": {"is_causal": True, "window": 200},
    "pair": {"window": (100, 50)},
    "packed": {"is_causal": True, "cu_seqlens": torch.tensor([0, 1, 600, 1500], dtype=torch.int32)},
    "padded": {"is_causal": True, "key_padding_mask": torch.arange(LONG).expand(2, LONG) >= 37},
    "positions": {"is_causal": True, "positions": torch.arange(LONG) % 400},
}  # fmt: skip


def long_case(name: str, **extra):
    return make_case(name, keys=LONG, **{"queries": LONG, **SITUATIONS[name], **extra})


@pytest.mark.parametrize("law", LAWS)
def test_law(law):
    LAWS[law](ssmax_attention)


@pytest.mark.parametrize("backend", ["auto", "math", "flash", "eager"])
def test_every_named_case_is_right_or_refused(backend):
    def attention(*inputs, **options):
        return ssmax_attention(*inputs, backend=backend, **options)

    report = check_attention(attention)
    assert report.all_right, str(report)


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("backend", ["auto", "math", "flash"])
def test_long_rows_agree_with_eager(name, backend):
    """Past one block of queries, where masks come in pieces."""
    case = long_case(name, width=16)
    eager = ssmax_attention(case.q, case.k, case.v, case.s, **case.options, backend="eager")
    out = ssmax_attention(case.q, case.k, case.v, case.s, **case.options, backend=backend)
    torch.testing.assert_close(out, eager, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("extra", [{}, {"kv_heads": 2}, {"dropout_p": 0.1}], ids=str)
@pytest.mark.parametrize("name", sorted(SITUATIONS.keys() - {"decode"}))
def test_no_square_tensor_is_made_forward_or_backward(name, extra):
    case = long_case(
        name,
        batch=1 if "padded" not in name else 2,
        heads=2 if not extra.get("kv_heads") else 4,
        dtype=torch.float32,
        **extra,
    )
    leaves = [x.requires_grad_() for x in (case.q, case.k, case.v, case.s)]
    square = case.q.shape[0] * case.q.shape[2] * case.k.shape[2]
    with LargestTensor() as watch:
        ssmax_attention(*leaves, **case.options).sum().backward()
    heads = case.q.shape[1] if extra.get("dropout_p") else 1
    assert watch.elements < 0.6 * heads * square


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "chunk", "window", "packed", "padded"])
def test_every_dtype_is_no_worse_than_eager(dtype, name):
    situation = {**SITUATIONS[name]}
    case = make_case(name, keys=LONG, width=32, dtype=dtype, **{"queries": LONG, **situation})
    rows = torch.arange(0, case.q.shape[2], 97)
    inputs = (case.q, case.k, case.v, case.s)
    out = ssmax_attention(*inputs, **case.options)
    assert out.dtype == dtype
    exact = ssmax_attention(*(x.double() for x in inputs), **case.options, backend="eager")
    # Explicit logits in the dtype itself set the budget.
    weights = attention_rows(case.q, case.k, case.s, rows, **case.options).to(dtype)
    eager = weights @ case.v
    assert_no_worse_than(out[:, :, rows], eager, exact[:, :, rows], slack=2.0)


def test_named_backends_are_refused_where_they_cannot_serve():
    case = make_case("causal", is_causal=True)
    inputs = (case.q, case.k, case.v, case.s)
    for backend, reason in (
        ("cudnn", "CUDA"),
        ("efficient", "CUDA"),
        ("varlen", "CUDA"),
    ):
        with pytest.raises(ValueError, match=reason):
            ssmax_attention(*inputs, is_causal=True, backend=backend)
    with pytest.raises(ValueError, match="no such kernel"):
        # SDPA's fused CPU kernel has no dropout: math must not be taken instead.
        ssmax_attention(*inputs, dropout_p=0.5, backend="flash")


def test_auto_leaves_the_choice_to_sdpa_on_the_cpu():
    case = make_case("causal")
    spec = mask_spec(9, 9, is_causal=True)
    inputs = AttentionInputs(case.q, case.k, case.v, spec, None, 0.0)
    assert choose_backend("auto", inputs) == "auto"


def test_neutral_values_are_softmax_bit_for_bit():
    q, k, v = (torch.randn(2, 4, 64, 16) for _ in range(3))
    softmax = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(ssmax_attention(q, k, v, 0.0, bias=1.0, is_causal=True), softmax)


def test_num_keys_overrides_the_count():
    case = make_case("override", is_causal=True)
    inputs = (case.q, case.k, case.v, case.s)
    for num_keys in (
        7,
        torch.arange(3, 12),
        torch.arange(1, 19).reshape(2, 9),
        torch.arange(1, 73).reshape(2, 4, 9),
    ):
        out = ssmax_attention(*inputs, is_causal=True, num_keys=num_keys)
        exact = oracle_attention(*inputs, is_causal=True, num_keys=num_keys)
        torch.testing.assert_close(out, exact, rtol=1e-10, atol=1e-10)


def test_n_of_ten_million_keys():
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    out = ssmax_attention(q, k, v, 0.2, num_keys=10_000_000)
    exact = oracle_attention(q, k, v, 0.2, num_keys=10_000_000)
    assert_no_worse_than(out, naive_attention(q, k, v, 0.2, num_keys=10_000_000), exact)


@pytest.mark.parametrize("backend", ["auto", "math", "eager"])
def test_a_query_that_sees_nothing_gives_zeros(backend):
    case = make_case("fully masked", is_causal=True)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :5] = False
    keep[1] = False
    out = ssmax_attention(
        case.q, case.k, case.v, case.s, is_causal=True, key_padding_mask=keep, backend=backend
    )
    assert (out[0, :, :5] == 0).all() and (out[1] == 0).all()
    assert (out[0, :, 5:] != 0).any()
    more_queries = ssmax_attention(
        case.q, case.k[:, :, :4], case.v[:, :, :4], case.s, is_causal=True, backend=backend
    )
    assert (more_queries[:, :, :5] == 0).all() and more_queries.isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "math", "eager"])
def test_fully_masked_rows_have_finite_gradients(backend):
    case = make_case("fully masked", is_causal=True)
    keep = torch.zeros(2, 9, dtype=torch.bool)
    keep[0, 6:] = True
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, case.s)]
    ssmax_attention(
        *leaves, is_causal=True, key_padding_mask=keep, backend=backend
    ).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert (leaves[0].grad[1] == 0).all()


@pytest.mark.parametrize("s", [0.0, -0.4, 1e-30, 5.0])
def test_any_s_gives_finite_weights(s):
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    out = ssmax_attention(q, k, v, s, is_causal=True)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])  # n = 1


@pytest.mark.parametrize("backend", ["auto", "math", "eager"])
def test_logits_of_ten_thousand_are_finite(backend):
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    q, k = 100 * q, 100 * k
    out = ssmax_attention(q, k, v, 0.5, is_causal=True, scale=1.0, backend=backend)
    assert out.isfinite().all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0), (1, 1), (1, 5)])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_empty_and_single_rows(queries, keys, backend):
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 4, keys, 8), torch.randn(2, 4, keys, 8)
    for is_causal in (True, False):
        out = ssmax_attention(q, k, v, 0.3, is_causal=is_causal, backend=backend)
        assert out.shape == (2, 4, queries, 8)
        assert out.isfinite().all()
        if keys == 0:
            assert (out == 0).all()
    assert ssmax_attention(q[:0], k[:0], v[:0], 0.3, is_causal=True).shape == (0, 4, queries, 8)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_an_empty_call_still_reaches_the_gradients(queries, keys):
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (queries, keys, keys))
    gradients = torch.autograd.grad(ssmax_attention(q, k, v, 0.3).sum(), (q, k, v))
    assert all((g == 0).all() for g in gradients)


def test_no_keys_give_zeros_whatever_the_query_holds():
    q = torch.full((1, 2, 3, 8), 6e4, dtype=torch.float16)
    q[0, 0, 0, 0] = torch.inf
    nothing = torch.empty(1, 2, 0, 8, dtype=torch.float16)
    assert (ssmax_attention(q, nothing, nothing, 0.3) == 0).all()


def test_values_may_be_of_another_width():
    case = make_case("values", is_causal=True)
    v = torch.randn(2, 4, 9, 5, dtype=torch.float64)
    out = ssmax_attention(case.q, case.k, v, case.s, is_causal=True)
    torch.testing.assert_close(out, oracle_attention(case.q, case.k, v, case.s, is_causal=True))


def test_strided_inputs_are_read_as_they_lie():
    case = make_case("strided", is_causal=True, width=8)
    packed = torch.stack((case.q, case.k, case.v), dim=-1)  # channels 3 apart
    q, k, v = packed.unbind(-1)
    out = ssmax_attention(q, k, v, case.s, is_causal=True)
    torch.testing.assert_close(out, ssmax_attention(case.q, case.k, case.v, case.s, is_causal=True))
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v)]
    torch.testing.assert_close(ssmax_attention(*transposed, case.s, is_causal=True), out)


def test_inputs_are_left_as_they_were():
    case = named_cases()[0]
    before = [x.clone() for x in (case.q, case.k, case.v, case.s)]
    ssmax_attention(case.q, case.k, case.v, case.s, **case.options)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (case.q, case.k, case.v, case.s), strict=True)
    )


def test_autocast_lowers_the_dtype_as_for_sdpa_on_every_backend():
    case = make_case("autocast", dtype=torch.float32, is_causal=True)
    inputs = (case.q, case.k, case.v, case.s)
    exact = oracle_attention(*inputs, is_causal=True)
    eager = naive_attention(*(x.bfloat16() for x in inputs[:3]), case.s, is_causal=True)
    for backend in ("auto", "math", "flash", "eager"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = ssmax_attention(*inputs, is_causal=True, backend=backend)
        assert out.dtype == torch.bfloat16
        assert_no_worse_than(out, eager, exact, name=backend)


@pytest.mark.parametrize("backend", ["auto", "math", "eager"])
@pytest.mark.parametrize("name", ["causal", "padded", "window"])
def test_dropout_keeps_the_mean(name, backend):
    case = long_case(name, batch=2, heads=1, width=8, dtype=torch.float32)
    torch.manual_seed(0)
    # Of values that are all 1 the output is the sum of the weights.
    inputs = (case.q, case.k, torch.ones_like(case.v), case.s)
    plain = ssmax_attention(*inputs, **case.options, backend=backend)
    dropped = ssmax_attention(*inputs, **case.options, dropout_p=0.3, backend=backend)
    again = ssmax_attention(*inputs, **case.options, dropout_p=0.3, backend=backend)
    assert not torch.equal(dropped, again)
    assert dropped.mean().item() == pytest.approx(plain.mean().item(), abs=0.03)


@pytest.mark.parametrize("backend", ["auto", "math", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_mask_on_half_precision_heads_is_not_rounded(dtype, backend):
    """Positions times a slope: rounded to bfloat16, neighbours 256 keys out would be one."""
    case = make_case("alibi", queries=512, dtype=dtype)
    slope = torch.arange(512.0) * 0.7
    inputs = (case.q, case.k, case.v, case.s)
    out = ssmax_attention(*inputs, attn_mask=slope[None], backend=backend)
    wide = [x.double() for x in inputs]
    exact = ssmax_attention(*wide, attn_mask=slope[None].double(), backend="eager")
    rounded = ssmax_attention(*wide, attn_mask=slope[None].bfloat16().double(), backend="eager")
    error = (out.double() - exact).abs().max()
    assert error < 0.1 * (rounded - exact).abs().max()


def test_attention_rows_are_float32_under_autocast():
    case = make_case("autocast", dtype=torch.float32, is_causal=True)
    plain = attention_rows(case.q, case.k, case.s, [3, 8], is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = attention_rows(case.q, case.k, case.s, [3, 8], is_causal=True)
    assert torch.equal(weights, plain)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(1, 1, 1, LONG).bool(), torch.zeros(1, LONG), torch.ones(LONG, 1).bool()],
    ids=["boolean", "additive", "by query"],
)
def test_a_mask_that_broadcasts_is_not_written_out(mask):
    case = make_case("broadcast", batch=1, heads=2, queries=LONG, dtype=torch.float32)
    with LargestTensor() as watch:
        ssmax_attention(case.q, case.k, case.v, case.s, attn_mask=mask)
        attention_rows(case.q, case.k, case.s, [5], attn_mask=mask)
    assert watch.elements < 0.6 * LONG * LONG


def test_channels_that_are_strides_apart_stay_on_the_fused_kernel():
    case = make_case("strided", batch=1, heads=2, queries=LONG, dtype=torch.float32)
    q, k, v = torch.stack((case.q, case.k, case.v), dim=-1).unbind(-1)
    with LargestTensor() as watch:
        ssmax_attention(q, k, v, case.s, is_causal=True)
    assert watch.elements < 0.6 * LONG * LONG


def test_shapes_can_be_had_without_data():
    q = torch.empty(2, 4, 9, 8, device="meta")
    assert ssmax_attention(q, q, q, 0.3, is_causal=True).shape == q.shape


def test_a_batch_of_s_by_vmap():
    q = torch.randn(1, 2, 5, 8)
    values = torch.tensor([0.1, 0.5, 2.0])
    together = torch.vmap(lambda s: ssmax_attention(q, q, q, s, is_causal=True, backend="math"))(
        values
    )
    for s, out in zip(values, together, strict=True):
        torch.testing.assert_close(out, ssmax_attention(q, q, q, s.item(), is_causal=True))


def test_scale_is_sdpas():
    case = make_case("scale", is_causal=True)
    out = ssmax_attention(case.q, case.k, case.v, case.s, is_causal=True, scale=0.11)
    exact = oracle_attention(case.q, case.k, case.v, case.s, is_causal=True, scale=0.11)
    torch.testing.assert_close(out, exact)


def value_and_gradients(attention, leaves, weight=1.0, **options):
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attention(*leaves, is_causal=True, **options)
    weight = torch.linspace(-weight, weight, out.numel(), dtype=out.dtype).view_as(out)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("backend", ["auto", "math", "flash", "eager"])
def test_a_scale_that_is_not_positive_has_the_values_of_the_definition(backend, scale):
    case = make_case("scale")
    leaves = (case.q, case.k, case.v, case.s)
    found = value_and_gradients(ssmax_attention, leaves, scale=scale, backend=backend)
    exact = value_and_gradients(naive_attention, leaves, scale=scale)
    for name, x, y in zip(("out", "dq", "dk", "dv", "ds"), found, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(found[0], oracle_attention(*leaves, is_causal=True, scale=scale))


@pytest.mark.parametrize("backend", ["auto", "math", "flash", "eager"])
def test_a_large_scaled_query_does_not_overflow_in_float16(backend):
    """q * s log n is far above 65504, the logits are not."""
    case = make_case("float16", width=64, dtype=torch.float16)
    q, k, s = 8e3 * case.q.sign(), 1e-4 * case.k, 20 * case.s
    leaves = (q, k, case.v, s)
    weight = 1e-2  # dk, which is as large as the scaled query, has to be a float16 too
    found = value_and_gradients(ssmax_attention, leaves, weight, backend=backend)
    exact = value_and_gradients(naive_attention, [x.double() for x in leaves], weight)
    # In bfloat16, which has the range but fewer digits, plain code sets the budget.
    half = [x.bfloat16() for x in leaves[:3]]
    budget = value_and_gradients(naive_attention, [*half, s], weight)
    for name, x, y, z in zip(("out", "dq", "dk", "dv", "ds"), found, budget, exact, strict=True):
        assert_no_worse_than(x, y, z, name=name)


def test_a_large_scaled_query_does_not_overflow_under_autocast_to_float16():
    case = make_case("float16", width=64, dtype=torch.float32, is_causal=True)
    inputs = (8e3 * case.q.sign(), 1e-4 * case.k, case.v, 20 * case.s)
    with torch.autocast("cpu", dtype=torch.float16):
        out = ssmax_attention(*inputs, is_causal=True)
    assert out.dtype == torch.float16
    exact = oracle_attention(*inputs, is_causal=True)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.02)


def test_where_the_factor_is_not_read_float16_reaches_a_factor_of_16(monkeypatch):
    """As on a GPU, where reading it would wait for the device."""
    monkeypatch.setattr(attention_module, "can_read_without_sync", lambda _: False)
    q = torch.full((1, 1, 4, 64), 6e4, dtype=torch.float16)
    k = 1e-6 * torch.randn(1, 1, 4, 64, dtype=torch.float16)
    v = torch.randn(1, 1, 4, 64, dtype=torch.float16)
    inputs = (q, k, v, 16 / math.log(4))
    out = ssmax_attention(*inputs, is_causal=True)
    exact = oracle_attention(*inputs, is_causal=True)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("backend", ["auto", "math", "eager"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_of_width_0_give_the_mean_of_the_visible_values(is_causal, backend):
    q, k, v = torch.empty(2, 4, 5, 0), torch.empty(2, 2, 5, 0), torch.randn(2, 2, 5, 8)
    out = ssmax_attention(q, k, v, 0.3, is_causal=is_causal, enable_gqa=True, backend=backend)
    n = torch.arange(1.0, 6.0).unsqueeze(-1)
    mean = v.cumsum(2) / n if is_causal else v.mean(2, keepdim=True).expand_as(v)
    torch.testing.assert_close(out, mean.repeat_interleave(2, dim=1))
    weights = attention_rows(q, k, 0.3, [1], is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 1))


def test_an_additive_bias_is_added_after_the_scaling():
    case = make_case("alibi")
    added = -0.3 * (torch.arange(9)[:, None] - torch.arange(9)).abs().double()
    out = ssmax_attention(case.q, case.k, case.v, case.s, attn_mask=added)
    torch.testing.assert_close(
        out, oracle_attention(case.q, case.k, case.v, case.s, attn_mask=added)
    )


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9])
def test_a_mask_of_the_lowest_number_hides_like_minus_infinity(hidden):
    case = make_case("lowest", dtype=torch.float32)
    visible = torch.ones(9, 9).tril().bool()
    visible[0] = False
    low, infinite = (torch.where(visible, 0.0, value) for value in (hidden, -torch.inf))
    inputs = (case.q, case.k, case.v, case.s)
    out = ssmax_attention(*inputs, attn_mask=low)
    torch.testing.assert_close(out, ssmax_attention(*inputs, attn_mask=infinite), rtol=0, atol=0)
    torch.testing.assert_close(
        out, ssmax_attention(*inputs, attn_mask=visible), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("backend", ["auto", "math", "eager"])
def test_gradcheck(backend):
    options = [
        {"is_causal": True},
        {"is_causal": True, "queries": 2, "keys": 4},
        {"is_causal": True, "window": 2},
        {"is_causal": True, "cu_seqlens": torch.tensor([0, 1, 4])},
        {"key_padding_mask": torch.tensor([[True, False, True, True]])},
    ]
    for option in options:
        case = make_case(
            "gradcheck",
            batch=1,
            heads=2,
            kv_heads=1,
            width=3,
            **{"queries": 4, "keys": 4, **option},
        )
        bias = torch.tensor([0.1, -0.2], dtype=torch.float64)
        leaves = tuple(x.clone().requires_grad_() for x in (case.q, case.k, case.v, case.s, bias))

        def attention(q, k, v, s, b, case=case):
            return ssmax_attention(q, k, v, s, **{**case.options, "bias": b}, backend=backend)

        assert torch.autograd.gradcheck(attention, leaves)


def test_attention_rows_take_negative_indices_and_sum_to_one():
    case = make_case("rows", is_causal=True)
    weights = attention_rows(case.q, case.k, case.s, [-1, 0], is_causal=True)
    assert weights.shape == (2, 4, 2, 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 2).double())
    assert (weights[:, :, 1, 1:] == 0).all()


def test_transforms_work_without_a_graph_too():
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    s = torch.rand(3, 2)

    def attend(s):
        return ssmax_attention(q, k, v, s, is_causal=True, backend="eager")

    expected = torch.stack([attend(one) for one in s])
    _, slope = torch.func.jvp(attend, (s[0],), (s[1],))
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(attend)(s), expected)
        torch.testing.assert_close(torch.func.jvp(attend, (s[0],), (s[1],))[1], slope)
        with forward_ad.dual_level():
            dual = attend(forward_ad.make_dual(s[0], s[1]))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, slope)
