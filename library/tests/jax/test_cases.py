"""ssmax.jax.ssmax_attention against the oracle that PyTorch's is judged by."""

import dataclasses
import random
from functools import partial

import numpy as np
import pytest
import torch
from random_cases import random_case
from torch import Tensor

from ssmax.testing import (
    Case,
    assert_no_worse_than,
    check_attention,
    check_laws,
    naive_attention,
    named_cases,
    oracle_attention,
)

jax = pytest.importorskip("jax", reason="needs jax: pip install 'ssmax[jax]'")
jnp = jax.numpy
sj = pytest.importorskip("ssmax.jax")

SITUATIONS = 64
DRAWS = 16
"""64 drawn situations, each with 16 drawings of all that may change without a new program: 1,024
cases for 64 compilations, which are what takes time. Outside slow tests, the first 16."""


def to_numpy(x):
    if not isinstance(x, Tensor):
        return x
    return x.float().numpy().astype(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def to_torch(x) -> Tensor:
    return torch.from_numpy(np.array(x, dtype=np.float64))


def heads_last(x: Tensor):
    return to_numpy(x.transpose(1, 2).contiguous())


def heads_first(x) -> Tensor:
    return to_torch(x).transpose(1, 2)


def in_jax(options: dict, num_keys: int) -> dict:
    """The options of PyTorch's attention as those of JAX's."""
    options = {name: value for name, value in options.items() if name != "enable_gqa"}
    if "attn_mask" in options:
        options["mask"] = options.pop("attn_mask")
    if (bounds := options.pop("cu_seqlens", None)) is not None:
        key = torch.arange(num_keys)
        options["segment_ids"] = torch.searchsorted(bounds[1:].contiguous(), key, right=True)
    return {name: to_numpy(value) for name, value in options.items()}


def attention(q, k, v, s, implementation=None, **options) -> Tensor:
    """As ssmax.testing calls it."""
    options = in_jax(options, k.shape[2])
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    fixed = {name: x for name, x in options.items() if name not in arrays}
    attend = partial(sj.ssmax_attention, **fixed, implementation=implementation)
    # A program compiles in less time than its operations one by one. That of float16 is for
    # accelerators alone: dot_product_attention needs a product that CPUs have not.
    if q.dtype != torch.float16:
        attend = jax.jit(attend)
    return heads_first(attend(*(heads_last(x) for x in (q, k, v)), to_numpy(s), **arrays))


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def test_every_named_case_is_right(float64):
    report = check_attention(attention, tolerance=1e-12)
    assert report.all_right, report


def test_every_named_case_is_right_through_dot_product_attention():
    """In float32, and its softmax is float32 for float64 too."""

    def through_xla(*inputs, **options):
        return attention(*inputs, implementation="xla", **options)

    report = check_attention(through_xla, named_cases(torch.float32), tolerance=2e-5)
    assert report.all_right, report


def test_it_keeps_the_laws(float64):
    assert check_laws(attention) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "every"), [(torch.bfloat16, 1), (torch.float16, 5)])
def test_a_narrow_dtype_errs_at_most_twice_as_much_as_the_reference(dtype, every):
    for case in named_cases(dtype)[::every]:
        inputs = (case.q, case.k, case.v, case.s)
        out = attention(*inputs, **case.options).to(dtype)
        exact, eager = (
            reference(*inputs, **case.options) for reference in (oracle_attention, naive_attention)
        )
        assert_no_worse_than(out, eager, exact, slack=2.0, name=str(case))


def redrawn(case: Case, seed: int) -> Case:
    """Other values of the same shapes: tensors, padding, documents, masks."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)

    def shuffled(x: Tensor) -> Tensor:
        return x.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)

    def normal(x: Tensor) -> Tensor:
        return torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype)

    options = dict(case.options)
    for name in ("key_padding_mask", "attn_mask", "bias"):
        if name in options:
            options[name] = shuffled(options[name])
    if "cu_seqlens" in options:
        keys, inner = case.k.shape[2], options["cu_seqlens"].numel() - 2
        cuts = sorted(rng.randint(0, keys) for _ in range(inner))
        options["cu_seqlens"] = torch.tensor([0, *cuts, keys], dtype=torch.int32)
    if "positions" in options:
        # A document may begin anywhere: what came before it stays.
        begins = torch.rand(options["positions"].shape, generator=generator) < 0.25
        index = torch.arange(begins.shape[-1])
        last = torch.where(begins, index, -1).cummax(-1).values
        options["positions"] = torch.where(last < 0, options["positions"], index - last)
    return dataclasses.replace(
        case, q=3 * normal(case.q), k=normal(case.k), v=normal(case.v), s=shuffled(case.s),
        options=options, seed=seed,
    )  # fmt: skip


def gradients_of(reference, case: Case, weight: Tensor) -> list[Tensor]:
    """The output, and its gradients in q, k, v, s and b, by autograd."""
    bias = case.options.get("bias", torch.zeros(case.q.shape[1]))
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, case.s, bias)]
    out = reference(*leaves[:4], **{**case.options, "bias": leaves[4]})
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def program(case: Case):
    """One compiled program for all drawings of a situation, its values and gradients."""
    options = in_jax(case.options, case.k.shape[2])
    fixed = {name: value for name, value in options.items() if not isinstance(value, np.ndarray)}
    fixed.pop("num_keys", None)

    @jax.jit
    def run(leaves, arrays, weight):
        def attend(q, k, v, s, bias):
            return sj.ssmax_attention(q, k, v, s, bias=bias, **arrays, **fixed)

        out, backward = jax.vjp(attend, *leaves)
        return out, *backward(weight)

    def call(case: Case, weight: Tensor) -> list[Tensor]:
        given = in_jax(case.options, case.k.shape[2])
        bias = given.pop("bias", np.zeros(case.q.shape[1], np.float32))
        arrays = {name: value for name, value in given.items() if name not in fixed}
        leaves = (*(heads_last(x) for x in (case.q, case.k, case.v)), to_numpy(case.s), bias)
        out, dq, dk, dv, ds, db = run(leaves, arrays, heads_last(weight))
        assert out.dtype == leaves[0].dtype
        return [*map(heads_first, (out, dq, dk, dv)), to_torch(ds), to_torch(db)]

    return call


@pytest.mark.parametrize(
    "situation",
    [pytest.param(i, marks=() if i < 16 else pytest.mark.slow) for i in range(SITUATIONS)],
)
def test_values_and_gradients_are_those_of_the_definition(situation):
    # Not float16: see above.
    dtype = (torch.float64, torch.float64, torch.float32, torch.bfloat16)[situation % 4]
    first = random_case(random.Random(situation), dtype=dtype)
    with jax.enable_x64(dtype == torch.float64):
        run, drawn = program(first), []
        for draw in range(DRAWS):
            case = redrawn(first, DRAWS * situation + draw) if draw else first
            generator = torch.Generator().manual_seed(draw)
            weight = torch.randn(case.q.shape, generator=generator).to(dtype)
            wide = {name: getattr(case, name).double() for name in "qkvs"}
            exact = gradients_of(
                naive_attention, dataclasses.replace(case, **wide), weight.double()
            )
            oracle = oracle_attention(case.q, case.k, case.v, case.s, **case.options)
            torch.testing.assert_close(exact[0], oracle, rtol=1e-9, atol=1e-9)
            drawn.append((run(case, weight), gradients_of(naive_attention, case, weight), exact))
    for part, name in enumerate(("out", "dq", "dk", "dv", "ds", "db")):
        # All draws together: of so many, eager code is lucky in some.
        ours, eager, exact = (
            torch.stack([one[part] for one in each]) for each in zip(*drawn, strict=True)
        )
        if dtype == torch.float64:
            # b is drawn in float32, and so is its gradient.
            bound = 1e-6 if name == "db" else 1e-8
            torch.testing.assert_close(
                ours, exact.double(), rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            ours = ours.to(eager.dtype)
            assert_no_worse_than(ours, eager, exact, slack=2.0, name=f"{name} of {first}")
