"""The fused op against its reference: on the GPU where there is one, else in the interpreter."""

import sys

import pytest
import torch
import torch.nn.functional as F

from ssmax import (
    apply_rope,
    rope_scale,
    rope_ssmax,
    rope_tables,
    ssmax_attention,
    ssmax_factor,
    visible_keys,
)
from ssmax.ops import implementation
from ssmax.ops.rope_scale import api, kernels
from ssmax.ops.rope_scale.reference import rope_scale_reference, rope_scale_step
from ssmax.testing import assert_no_worse_than

# batch, query heads, key heads, tokens, head_dim, rotary width
SHAPES = [
    (2, 4, 2, 7, 16, 16),
    (1, 5, 5, 33, 24, 12),
    (3, 2, 1, 1, 8, 8),
    (1, 3, 1, 70, 20, 6),
    (1, 9, 3, 17, 64, 64),
    (2, 1, 1, 16, 6, 2),
    (19, 2, 1, 5, 8, 8),  # more rows than one program takes, and not a multiple
]


def make(shape, dtype, device, *, seed=0, factor_rows=False):
    batch, heads, kv_heads, tokens, width, rotary = shape
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)

    inputs = {
        "q": randn(batch, tokens, heads, width).transpose(1, 2),  # as a projection leaves it
        "k": randn(batch, kv_heads, tokens, width),
    }
    factor = torch.rand(*((batch,) if factor_rows else ()), heads, tokens, generator=generator)
    inputs["factor"] = factor.to(device, torch.promote_types(dtype, torch.float32))
    tables = rope_tables(torch.arange(3, 3 + tokens, device=device), rotary)
    return (
        inputs,
        tables,
        (randn(batch, heads, tokens, width), randn(batch, kv_heads, tokens, width)),
    )


def run(impl, inputs, tables, weights, dtype=None):
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    q, k = rope_scale(leaves["q"], leaves["k"], *tables, leaves["factor"], impl=impl)
    loss = (q * weights[0]).sum() + (k * weights[1]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    names = (f"d{name}" for name in leaves)
    return {"q": q, "k": k, **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("factor_rows", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fused_is_no_worse_than_eager(dtype, shape, factor_rows, device):
    inputs, tables, weights = make(shape, dtype, device, factor_rows=factor_rows)
    exact = run("reference", inputs, tables, weights, dtype=torch.float64)
    eager = run("reference", inputs, tables, weights)
    fused = run("triton", inputs, tables, weights)
    for name in exact:
        assert_no_worse_than(fused[name], eager[name], exact[name], slack=2.0, name=name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("table_rows", [False, True])
def test_the_form_for_a_decoding_step_is_the_plain_one(shape, table_rows, device):
    """What torch.compile gets for a single token; right for any number of them."""
    inputs, tables, _ = make(shape, torch.float64, device)
    if table_rows:
        positions = torch.arange(shape[0] * shape[3], device=device).view(shape[0], shape[3])
        tables = rope_tables(positions, shape[5])
    arguments = inputs["q"], inputs["k"], *tables, inputs["factor"].unsqueeze(0)
    pairs = zip(rope_scale_step(*arguments), rope_scale_reference(*arguments), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(*shape[:3], 1, *shape[4:]) for shape in SHAPES], ids=str)
def test_a_decoding_step_makes_its_own_factor(shape, dtype, rows, has_bias, device):
    batch, heads = shape[:2]
    inputs, tables, _ = make(shape, dtype, device)
    n = torch.tensor([[10_000_000 - 37 * row] for row in range(batch)], device=device)
    n = n if rows else n[0]
    s, b = torch.linspace(-0.5, 0.5, heads, device=device), torch.rand(heads, device=device)
    b = b if has_bias else None
    if rows:
        tables = rope_tables(n, shape[5])

    def run(impl, dtype):
        q, k = (inputs[name].to(dtype) for name in ("q", "k"))
        wide = [x.to(torch.promote_types(dtype, torch.float32)) for x in (s, b) if x is not None]
        return api.rope_ssmax(q, k, *tables, n, *wide, impl=impl)

    exact, eager = run("reference", torch.float64), run("reference", dtype)
    for ours, plain, true in zip(run("triton", dtype), eager, exact, strict=True):
        assert_no_worse_than(ours, plain, true, slack=2.0)


def test_a_decoding_step_is_one_kernel_unless_a_gradient_is_wanted(device, monkeypatch):
    inputs, tables, _ = make((2, 4, 2, 1, 16, 16), torch.float32, device)
    n, s = torch.tensor([5], device=device), torch.full((4,), 0.3, device=device)
    launched = []
    step = kernels.step
    monkeypatch.setattr(kernels, "step", lambda *x: launched.append("step") or step(*x))

    def turn(**values):
        arguments = {"q_BHTD": inputs["q"], "k_BGTD": inputs["k"], "s": s, **values}
        return api.rope_ssmax(cos=tables[0], sin=tables[1], num_keys=n, impl="triton", **arguments)

    turn()
    assert launched == ["step"]
    learned = s.clone().requires_grad_()
    turn(s=learned)[0].sum().backward()
    assert launched == ["step"] and learned.grad is not None
    wide = {"q_BHTD": inputs["q"].double(), "k_BGTD": inputs["k"].double()}
    for other in ({"s": 0.3}, {"s": s.double()}, wide):
        turn(**other)
    assert launched == ["step"]


def test_the_gradient_reaches_s_and_b(device):
    inputs, tables, weights = make(SHAPES[0], torch.float64, device)
    gradients = []
    for impl in ("reference", "triton"):
        s, b = (
            torch.full((4,), x, dtype=torch.float64, device=device, requires_grad=True)
            for x in (0.3, 0.1)
        )
        factor = ssmax_factor(torch.arange(1, 8, device=device), s, b)
        q, k = rope_scale(inputs["q"], inputs["k"], *tables, factor, impl=impl)
        gradients.append(
            torch.autograd.grad((q * weights[0]).sum() + (k * weights[1]).sum(), (s, b))
        )
    for reference, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, reference, rtol=1e-12, atol=1e-12)


def test_a_fixed_factor_keeps_no_query_alive(device):
    inputs, tables, _ = make(SHAPES[0], torch.float32, device)
    q = inputs["q"].clone().requires_grad_()
    out, _ = rope_scale(q, inputs["k"], *tables, inputs["factor"], impl="triton")
    saved = [x for x in out.grad_fn.saved_tensors if x is not None]
    assert all(x.shape != q.shape for x in saved)
    (dq,) = torch.autograd.grad(out.sum(), q)
    expected = rope_scale(q, inputs["k"], *tables, inputs["factor"], impl="reference")[0]
    torch.testing.assert_close(dq, torch.autograd.grad(expected.sum(), q)[0])


def test_two_runs_give_the_same_bits(device):
    # The interpreter takes one program after the other, and its time.
    shape = (2, 8, 4, 130, 64, 32) if device == "cuda" else (2, 2, 1, 18, 16, 8)
    inputs, tables, weights = make(shape, torch.bfloat16, device)
    first, second = (run("triton", inputs, tables, weights) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_are_left_as_they_were_and_outputs_are_fresh(device):
    inputs, tables, weights = make(SHAPES[1], torch.float32, device)
    before = {name: x.clone() for name, x in inputs.items()}
    out = run("triton", inputs, tables, weights)
    assert all(torch.equal(before[name], inputs[name]) for name in inputs)
    assert out["q"].data_ptr() != inputs["q"].data_ptr()


@pytest.mark.parametrize("shape", [(2, 3, 2, 37, 40, 24), (1, 2, 2, 16, 64, 64)], ids=str)
def test_every_element_is_written_and_none_beyond(shape, device, monkeypatch):
    """Outputs start as NaN, inside a larger NaN-filled memory."""
    inputs, tables, weights = make(shape, torch.float32, device)
    guards = []

    def poisoned(x, *args, **kwargs):
        memory = torch.full((x.numel() + 64,), torch.nan, dtype=x.dtype, device=x.device)
        guards.append(memory)
        return memory[: x.numel()].view(x.shape)

    monkeypatch.setattr(kernels.torch, "empty_like", poisoned)
    q, k = kernels.forward(
        inputs["q"], inputs["k"], *tables, inputs["factor"].expand(inputs["q"].shape[:3])
    )
    dq, dk, dfactor = kernels.backward(
        *(x.contiguous() for x in weights),
        inputs["q"],
        *tables,
        inputs["factor"].expand(q.shape[:3]),
    )
    monkeypatch.undo()
    for x in (q, k, dq, dk, dfactor):
        assert x.isfinite().all()
    for memory in guards:
        assert memory[-64:].isnan().all()
    reference = rope_scale(inputs["q"], inputs["k"], *tables, inputs["factor"], impl="reference")
    torch.testing.assert_close(q, reference[0])
    torch.testing.assert_close(k, reference[1])


def test_strides_of_every_kind(device):
    inputs, tables, _ = make((2, 4, 4, 9, 16, 16), torch.float32, device)
    expected = rope_scale(inputs["q"], inputs["k"], *tables, inputs["factor"], impl="reference")
    fused_projection = (
        torch.cat((inputs["q"], inputs["k"]), dim=1).transpose(1, 2).contiguous().transpose(1, 2)
    )
    sliced = fused_projection[:, :4], fused_projection[:, 4:]
    wide = tuple(torch.stack((x, x), dim=-1)[..., 0] for x in (inputs["q"], inputs["k"]))
    tokens_inside = tuple(
        x.transpose(1, 3).contiguous().transpose(1, 3) for x in (inputs["q"], inputs["k"])
    )
    for q, k in (sliced, wide, tokens_inside):
        out = rope_scale(q, k, *tables, inputs["factor"], impl="triton")
        for x, y in zip(out, expected, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("factor_rows", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 19])
def test_one_table_or_one_per_row(rows, factor_rows, device):
    shape = (max(rows, 2), 2, 2, 5, 8, 8)
    inputs, _, weights = make(shape, torch.float32, device, factor_rows=factor_rows)
    positions = torch.randint(100, (rows, 5), generator=torch.Generator().manual_seed(rows))
    tables = rope_tables(positions.to(device), 8)
    fused, plain = (run(impl, inputs, tables, weights) for impl in ("triton", "reference"))
    for name in plain:
        torch.testing.assert_close(fused[name], plain[name], rtol=1e-5, atol=1e-5)


def test_tables_of_any_layout(device):
    """cos and sin cut out of one tensor, or laid out differently from each other."""
    inputs, (cos, sin), _ = make((2, 2, 2, 5, 8, 8), torch.float32, device)
    both = torch.cat((cos, sin), dim=-1)
    expected = rope_scale(inputs["q"], inputs["k"], cos, sin, inputs["factor"], impl="reference")
    by_column = sin.t().contiguous().t()
    for tables in (
        (both[:, :4], both[:, 4:]),
        (cos, both[:, 4:]),
        (both[:, :4], sin),
        (cos, by_column),
    ):
        out = rope_scale(inputs["q"], inputs["k"], *tables, inputs["factor"], impl="triton")
        for x, y in zip(out, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_a_rotary_width_of_zero_only_scales(device):
    inputs, _, _ = make((2, 2, 1, 5, 8, 8), torch.float32, device)
    tables = rope_tables(torch.arange(5, device=device), 0)
    for impl in ("reference", "triton"):
        q, k = rope_scale(inputs["q"], inputs["k"], *tables, inputs["factor"], impl=impl)
        torch.testing.assert_close(q, inputs["q"] * inputs["factor"].unsqueeze(-1))
        assert torch.equal(k, inputs["k"])


@pytest.mark.parametrize("empty", [(0, 2, 2, 5, 8, 8), (2, 2, 2, 0, 8, 8)], ids=str)
def test_nothing_in_nothing_out(empty, device):
    inputs, tables, weights = make(empty, torch.float32, device)
    out = run("triton", inputs, tables, weights)
    assert out["q"].shape == inputs["q"].shape and out["dfactor"].shape == inputs["factor"].shape


def test_the_factor_broadcasts(device):
    inputs, tables, _ = make((2, 3, 3, 4, 8, 8), torch.float32, device)
    for shape in ((), (1,), (4,), (3, 1), (3, 4), (2, 1, 4), (2, 3, 4)):
        factor = torch.rand(shape, device=device)
        for x, y in zip(
            rope_scale(inputs["q"], inputs["k"], *tables, factor, impl="triton"),
            rope_scale(inputs["q"], inputs["k"], *tables, factor, impl="reference"),
            strict=True,
        ):
            torch.testing.assert_close(x, y)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, from 2.15 on
def test_the_op_passes_torchs_own_checks(device):
    inputs, tables, _ = make((1, 2, 1, 5, 8, 4), torch.float32, device)
    factor = inputs["factor"].expand(1, 2, 5)
    leaves = tuple(x.detach().requires_grad_() for x in (inputs["q"], inputs["k"]))
    torch.library.opcheck(api._rope_scale_op, (*leaves, *tables, factor.clone().requires_grad_()))


@pytest.mark.parametrize("bias", [None, 0.3])
def test_scaling_where_q_is_rotated_or_in_the_attention_is_the_same(bias):
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    s, b = torch.rand(4), None if bias is None else torch.full((4,), bias)
    cos, sin = rope_tables(torch.arange(9), 16)
    rotated = [apply_rope(x, cos, sin) for x in (q, k)]
    expected = ssmax_attention(*rotated, v, s, bias=b, is_causal=True)
    n = visible_keys(9, 9, is_causal=True)
    for scaled in (
        rope_scale(q, k, cos, sin, ssmax_factor(n, s, b)),
        rope_ssmax(q, k, cos, sin, n, s, b),
    ):
        out = F.scaled_dot_product_attention(*scaled, v, is_causal=True)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        twice = ssmax_attention(*scaled, v, s, bias=b, is_causal=True)
        assert (twice - expected).abs().max() > 0.1


def test_the_docstrings_of_rotations_name_the_attention_that_follows():
    assert "plain softmax attention" in rope_scale.__doc__.splitlines()[0]
    assert "plain softmax attention" in rope_ssmax.__doc__.splitlines()[0]
    assert "ssmax_attention" in apply_rope.__doc__.splitlines()[0]


def test_triton_on_the_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(implementation, "INTERPRETED", False)
    inputs, tables, weights = make(SHAPES[0], torch.float32, "cpu")
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu;.*TRITON_INTERPRET=1"):
        run("triton", inputs, tables, weights)


def test_a_missing_triton_is_named_with_its_extra(device, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(api, "_kernels", api._kernels.__wrapped__)
    inputs, tables, weights = make(SHAPES[0], torch.float32, device)
    missing = r"impl='triton' needs the package 'triton'.*pip install 'ssmax\[triton\]'"
    with pytest.raises(ImportError, match=missing):
        run("triton", inputs, tables, weights)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31():
    """The last row starts past the reach of a 32-bit offset."""
    heads, tokens, width = 2, 64, 64
    batch = 2**31 // (heads * tokens * width) + 2
    q = torch.empty(batch, heads, tokens, width, dtype=torch.bfloat16, device="cuda").normal_()
    k = q[:, :1]
    tables = rope_tables(torch.arange(tokens, device="cuda"), width)
    factor = torch.rand(heads, tokens, device="cuda")
    assert q.numel() > 2**31
    out = rope_scale(q, k, *tables, factor, impl="triton")
    expected = rope_scale(q[-2:], k[-2:], *tables, factor, impl="reference")
    for x, y in zip(out, expected, strict=True):
        torch.testing.assert_close(x[-2:], y)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 127, 4097])
@pytest.mark.parametrize("width", [64, 80, 256])
def test_real_sizes_on_the_gpu(tokens, width):
    inputs, tables, weights = make((2, 12, 4, tokens, width, width), torch.bfloat16, "cuda")
    exact = run("reference", inputs, tables, weights, dtype=torch.float64)
    eager = run("reference", inputs, tables, weights)
    fused = run("triton", inputs, tables, weights)
    for name in exact:
        assert_no_worse_than(fused[name], eager[name], exact[name], slack=2.0, name=name)


def test_tables_that_learn_get_their_gradient(device, monkeypatch):
    """`auto` takes the reference implementation then, on a GPU too."""
    monkeypatch.setattr(api, "choose_impl", lambda impl, _: "triton" if impl == "auto" else impl)
    inputs, tables, _ = make(SHAPES[0], torch.float32, device)
    cos, sin = (table.requires_grad_() for table in tables)
    for turned in (rope_scale(inputs["q"], inputs["k"], cos, sin, inputs["factor"]),
                   rope_ssmax(inputs["q"][:, :, :1], inputs["k"][:, :, :1], cos[:1], sin[:1],
                              torch.tensor([5], device=device), torch.ones(4, device=device))
                   ):  # fmt: skip
        gradients = torch.autograd.grad(turned[0].sum() + turned[1].sum(), [cos, sin])
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
