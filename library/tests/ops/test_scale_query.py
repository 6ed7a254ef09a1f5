"""The kernel that scales a query by s log n + b, and the plans of calls that were seen before."""

import sys
from pathlib import Path

import pytest
import torch

import ssmax
from ssmax import ssmax_attention, ssmax_factor
from ssmax.ops import launch, plans
from ssmax.ops.scale_query import api
from ssmax.ops.scale_query.reference import scale_query
from ssmax.ops.visible import Ramp, mask_spec
from ssmax.testing import assert_no_worse_than, oracle_attention


def counts(*size):
    return torch.randint(1, 50, size, generator=torch.Generator().manual_seed(0))


# batch, heads, tokens, head_dim; n
CALLS = {
    "by position": ((2, 3, 70, 20), Ramp(5, 60)),
    "one query": ((1, 4, 1, 64), Ramp(1000, 1000)),
    "n of every row": ((3, 2, 33, 8), counts(3, 33)),
    "n of all rows": ((3, 2, 5, 64), counts(1, 5)),
    "n of every query": ((2, 2, 9, 256), counts(9)),
}


@pytest.fixture
def fused(monkeypatch):
    """Takes the kernel on any device: on the CPU it runs in Triton's interpreter."""
    monkeypatch.setattr(api, "choose_impl", lambda *_: "triton")
    monkeypatch.setattr(api, "_scalings", {})
    monkeypatch.setattr(plans, "known", {})


def scale_by_kernel(q, s, b, n, multiplier=1.0):
    return api.apply_scaling(api.scaling_of(q, s, b, n), q, s, b, n, multiplier)


def make(shape, dtype, device, *, has_bias=True):
    batch, heads, tokens, width = shape
    q = torch.randn(batch, tokens, heads, width, device=device).to(dtype).transpose(1, 2)
    s, b = (torch.randn(heads, device=device) for _ in range(2))
    return [x.requires_grad_() for x in ((q, s, b) if has_bias else (q, s))]


def gradients(function, leaves):
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    found = torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves)
    return dict(zip(("out", "dq", "ds", "db"), (out, *found), strict=False))


def plain(q, s, b=None, *, n, multiplier=1.0):
    n = n.counts(q.shape[2]) if isinstance(n, Ramp) else n
    return scale_query(q, ssmax_factor(n.to(q.device), s, b) * multiplier)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_no_worse_than_eager(call, dtype, has_bias, device, fused):
    shape, n = CALLS[call]
    leaves = make(shape, dtype, device, has_bias=has_bias)
    n = n if isinstance(n, Ramp) else n.to(device)
    kernel = gradients(lambda q, s, b=None: scale_by_kernel(q, s, b, n, multiplier=-0.5), leaves)
    eager = gradients(lambda *x: plain(*x, n=n, multiplier=-0.5), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = gradients(lambda *x: plain(*x, n=n, multiplier=-0.5), wide)
    for name in exact:
        assert_no_worse_than(kernel[name], eager[name], exact[name], slack=2.0, name=name)


def test_a_gradient_of_a_gradient_is_that_of_plain_code(device, fused):
    leaves = make((2, 3, 7, 8), torch.float32, device)

    def twice(function):
        out = function(*leaves)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    kernel = twice(lambda q, s, b: scale_by_kernel(q, s, b, Ramp(2, 9)))
    eager = twice(lambda q, s, b: plain(q, s, b, n=Ramp(2, 9)))
    for x, y in zip(kernel, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)


def test_fixed_s_and_b_keep_no_query_for_the_backward_pass(device, fused):
    q, s, b = make((2, 3, 7, 8), torch.float32, device)
    out = scale_by_kernel(q, s.detach(), b.detach(), Ramp(1, 7))
    assert out.grad_fn.saved_tensors[0] is None
    (dq,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(dq, plain(torch.ones_like(q), s, b, n=Ramp(1, 7)).detach())


@pytest.mark.parametrize("value", [0.4, torch.tensor(0.4), torch.tensor([0.4])], ids=str)
def test_one_number_serves_all_heads(value, device, fused):
    q = torch.randn(2, 4, 9, 16, device=device)
    value = value.to(device) if isinstance(value, torch.Tensor) else value
    out = ssmax_attention(q, q, q, value, is_causal=True)
    again = ssmax_attention(q, q, q, value, is_causal=True)
    expected = oracle_attention(q.cpu(), q.cpu(), q.cpu(), torch.full((4,), 0.4), is_causal=True)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(out, again)


@pytest.mark.parametrize("options", [{"is_causal": True}, {}, {"is_causal": True, "window": 3},
                                     {"is_causal": True, "scale": -0.2}], ids=str)  # fmt: skip
def test_the_fused_scaling_of_ssmax_attention_is_the_plain_one(options, device, monkeypatch):
    q, k, v = (torch.randn(2, 4, 9, 16, device=device) for _ in range(3))
    s = torch.rand(4, device=device)
    found = []
    for impl in ("reference", "triton"):
        monkeypatch.setattr(api, "choose_impl", lambda *_, impl=impl: impl)
        monkeypatch.setattr(api, "_scalings", {})
        monkeypatch.setattr(plans, "known", {})
        for _ in range(2):  # the second call goes by a plan
            leaves = [x.clone().requires_grad_() for x in (q, k, v, s)]
            out = ssmax_attention(*leaves, **options)
            found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for first, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


def test_the_fused_scaling_does_not_overflow_in_float16(device, fused):
    q, k, v = (torch.randn(1, 2, 9, 64, device=device) for _ in range(3))
    leaves = [x.half().requires_grad_() for x in (3e4 * q.sign(), 1e-5 * k, v)]
    s = torch.full((2,), 4.0, device=device, requires_grad=True)
    exact = oracle_attention(*(x.detach().cpu() for x in (*leaves, s)), is_causal=True)
    for _ in range(2):
        out = ssmax_attention(*leaves, s, is_causal=True)
        torch.testing.assert_close(out.detach().double().cpu(), exact, rtol=0, atol=5e-3)
        gradients = torch.autograd.grad(1e-2 * out.sum(), (*leaves, s))
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_plan_is_for_calls_of_its_kind_alone(device):
    """All that decides n, the kernel or a refusal is in a plan's key."""
    plans.known.clear()
    base = {"is_causal": True, "enable_gqa": True}
    q, k = torch.randn(2, 4, 6, 8, device=device), torch.randn(2, 2, 6, 8, device=device)
    variants = [
        (q, k, 0.4, base),
        (q, k, 0.5, base),
        (q, k, torch.full((4,), 0.3, device=device), base),
        (q[:, :, :3], k, 0.4, base),
        (q[:, :, :1], k, 0.4, base),
        (q, k[:, :, :4], 0.4, base),
        (q, k, 0.4, {**base, "is_causal": False}),
        (q, k, 0.4, {**base, "window": 2}),
        (q, k, 0.4, {**base, "scale": 0.7}),
        (q, k, 0.4, {**base, "bias": 0.2}),
        (q.double(), k.double(), 0.4, base),
        (q.transpose(1, 3).contiguous().transpose(1, 3), k, 0.4, base),
    ]
    for q, k, s, options in variants * 2:
        out = ssmax_attention(q, k, k, s, **options)
        s = s if isinstance(s, torch.Tensor) else torch.full((4,), s)
        if "bias" in options:
            options = {**options, "bias": torch.full((4,), options["bias"])}
        exact = oracle_attention(q.cpu(), k.cpu(), k.cpu(), s.cpu(), **options)
        torch.testing.assert_close(out.double().cpu(), exact, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="enable_gqa"):
        ssmax_attention(q, k, k, 0.4, is_causal=True)


def test_values_are_checked_in_every_call(device):
    if device == "cuda":
        pytest.skip("on a GPU values are not read")
    q, s = torch.randn(1, 2, 5, 8), torch.full((2,), 0.4)
    ssmax_attention(q, q, q, s, bias=s, is_causal=True)
    broken = torch.tensor([0.4, float("nan")])
    with pytest.raises(ValueError, match="s holds NaN"):
        ssmax_attention(q, q, q, broken, bias=s, is_causal=True)
    with pytest.raises(ValueError, match="bias holds NaN"):
        ssmax_attention(q, q, q, s, bias=broken, is_causal=True)


def test_plans_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(plans, "MOST_KEPT", 3)
    plans.known.clear()
    for keys in range(1, 20):
        x = torch.randn(1, 1, keys, 4)
        ssmax_attention(x, x, x, 0.4, is_causal=True)
        assert len(plans.known) <= 3


@pytest.mark.parametrize(("learns", "most"), [(False, 13), (True, 14)])
def test_a_call_that_was_seen_takes_a_short_way(learns, most, fused, monkeypatch):
    """Calls of our own functions, a cost that no machine changes; a windowed call took 84."""
    monkeypatch.setattr(launch.Prepared, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    q, s = torch.randn(1, 2, 4, 8, requires_grad=learns), torch.rand(2, requires_grad=learns)
    ssmax_attention(q, q, q, s, is_causal=True)
    assert count_calls(lambda: ssmax_attention(q, q, q, s, is_causal=True)) <= most


def test_a_call_on_the_cpu_that_was_seen_takes_a_short_way():
    q, s = torch.randn(1, 2, 4, 8), torch.rand(2)
    for options in ({"is_causal": True}, {}):
        ssmax_attention(q, q, q, s, **options)
        calls = count_calls(lambda options=options: ssmax_attention(q, q, q, s, **options))
        assert calls <= 18


def count_calls(function):
    """Count the calls of this package's own functions."""
    calls = []
    home = str(Path(ssmax.__file__).parent)

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("queries", "keys", "is_causal"),
    [(7, 7, True), (3, 9, True), (1, 9, True), (5, 9, False), (9, 5, True)],
)
def test_two_numbers_say_the_n_of_positions_and_windows(queries, keys, is_causal, window):
    spec = mask_spec(queries, keys, is_causal=is_causal, window=window)
    ramp = spec.ramp()
    if ramp is None:
        assert queries > keys or (window is not None and not is_causal)
    else:
        counts = spec.num_visible()
        assert torch.equal(ramp.counts(queries), counts.expand(queries))


def test_queries_and_gradients_of_any_layout(fused):
    """Also where channels do not stand side by side, which kernels ask for."""
    s = torch.rand(4)
    q = torch.randn(2, 8, 6, 4).transpose(1, 3).requires_grad_()
    dy = torch.randn(2, 8, 6, 4).transpose(1, 3)
    exact = plain(q, s, n=Ramp(1, 6))
    scaled = scale_by_kernel(q, s, None, Ramp(1, 6))
    torch.testing.assert_close(scaled, exact)
    (dq,), (exact_dq,) = (torch.autograd.grad(y, q, dy) for y in (scaled, exact))
    torch.testing.assert_close(dq, exact_dq)


def test_every_value_of_a_module_can_be_looked_into():
    """vLLM does so at its start, with every module that is loaded, to replace kernels."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "ssmax":
            values = list(vars(module).items())
            odd = [key for key, value in values if hasattr(value, "__dict__")
                   and not hasattr(vars(value), "get")]  # fmt: skip
            assert not odd, (name, odd)
