"""ssmax.jax under JAX's transformations, and at the door."""

import math
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

import ssmax
from ssmax.errors import UsageError

jax = pytest.importorskip("jax", reason="needs jax: pip install 'ssmax[jax]'")
jnp = jax.numpy
sj = pytest.importorskip("ssmax.jax")

from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402 (jax is looked for first)

B, T, H, G, D = 2, 12, 4, 2, 8


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    q = 3 * rng.standard_normal((B, T, H, D), dtype=np.float32)
    k, v = rng.standard_normal((2, B, T, G, D), dtype=np.float32)
    s = 0.2 + rng.random(H, dtype=np.float32)
    return tuple(map(jnp.asarray, (q, k, v, s)))


def same(one, other, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance)


def loaded(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_neither_imports_the_other():
    assert loaded("import sys, ssmax.jax; print('torch' in sys.modules)") == "False"
    code = "import sys, ssmax, ssmax.nn, ssmax.testing; print('jax' in sys.modules)"
    assert loaded(code) == "False"


def test_without_jax_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "try: import ssmax.jax\n"
        "except ImportError as error: print(error)"
    )
    assert "ssmax[jax]" in loaded(code)


def test_softmax_is_a_special_case_bit_for_bit(inputs):
    q, k, v, _ = inputs
    for options in ({}, {"is_causal": True}):
        softmax = jax.nn.dot_product_attention(q, k, v, **options)
        assert (sj.ssmax_attention(q, k, v, 0.0, bias=1.0, **options) == softmax).all()


def test_ssmax_is_that_of_pytorch():
    z = 3 * torch.randn(3, 2, 7, dtype=torch.float64)
    z[0, 0, :3] = -torch.inf
    mask = torch.rand(3, 1, 7) < 0.6
    mask[1] = False
    s, bias = torch.tensor([[0.5], [-1.0]]).double(), 0.25
    with jax.enable_x64(True):
        for axis, value in ((-1, s), (1, 0.7), (0, 0.7)):
            given = value.numpy() if isinstance(value, torch.Tensor) else value
            ours = sj.ssmax(z.numpy(), given, bias=bias, mask=mask.numpy(), axis=axis)
            theirs = ssmax.ssmax(z, value, bias=bias, mask=mask, dim=axis)
            same(ours, theirs, 1e-12)
            assert ours.dtype == jnp.float64
        gradient = jax.grad(lambda z: (sj.ssmax(z, 0.5, mask=mask.numpy()) ** 2).sum())(z.numpy())
    leaf = z.clone().requires_grad_()
    (ssmax.ssmax(leaf, 0.5, mask=mask) ** 2).sum().backward()
    same(gradient, leaf.grad, 1e-12)


def test_the_factor_is_float32_and_log_n_is_never_rounded_to_bfloat16():
    n = jnp.array([58_032, 61_774])
    s = jnp.array([1.0, 2.0], jnp.bfloat16)
    factor = sj.ssmax_factor(n, s, jnp.bfloat16(0.5)[None])
    assert factor.shape == (2, 2) and factor.dtype == jnp.float32
    same(factor, 0.5 + np.log([[58_032], [61_774]]) * [1, 2], 1e-6)
    assert sj.ssmax_factor(8, 2.0) == pytest.approx(2 * math.log(8))
    assert sj.ssmax_factor(n, 1.0).shape == (2,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_queries": 3, "num_keys": 3, "is_causal": True}, [1, 2, 3]),
        ({"num_queries": 1, "num_keys": 9, "is_causal": True}, [9]),
        ({"num_queries": 2, "num_keys": 9, "is_causal": True}, [8, 9]),
        ({"num_queries": 3, "num_keys": 5, "is_causal": False}, [5, 5, 5]),
        ({"num_queries": 3, "num_keys": 1, "is_causal": True}, [1, 1, 1]),
        ({"num_queries": 5, "num_keys": 5, "is_causal": True, "window": 2}, [1, 2, 2, 2, 2]),
        ({"num_queries": 4, "num_keys": 4, "is_causal": False, "window": (1, 1)}, [2, 3, 3, 2]),
    ],
)
def test_n_in_plain_situations(options, expected):
    n = sj.visible_keys(**options)
    assert n.tolist() == expected and n.dtype == jnp.int32


def test_n_with_documents_and_padding():
    count = partial(sj.visible_keys, 5, 5)
    ids, positions = np.array([7, 7, 3, 3, 3]), np.array([0, 1, 0, 1, 2])
    assert count(is_causal=True, segment_ids=ids).tolist() == [1, 2, 1, 2, 3]
    assert count(is_causal=False, segment_ids=ids).tolist() == [2, 2, 3, 3, 3]
    assert count(is_causal=True, positions=positions).tolist() == [1, 2, 1, 2, 3]
    assert count(is_causal=False, positions=positions).tolist() == [2, 2, 3, 3, 3]
    # A left-padded batch has positions 0..T-1 in every row; n comes from the mask.
    keep = np.arange(5) >= np.array([[2], [0]])
    assert count(is_causal=True, key_padding_mask=keep).tolist() == [
        [1, 1, 1, 2, 3],
        [1, 2, 3, 4, 5],
    ]
    # Twice the same number is two documents where another lies between them.
    again = np.array([[1, 2, 2, 1, 1], [0, 0, 0, 0, 0]])
    assert count(is_causal=True, segment_ids=again).tolist() == [[1, 1, 2, 1, 2], [1, 2, 3, 4, 5]]
    assert sj.visible_keys(2, 5, is_causal=True, segment_ids=ids).tolist() == [2, 3]


def situations():
    keep = np.arange(T) >= np.array([[5], [0]])
    ids = np.array([[0] * 4 + [1] * 8, [0] * 7 + [1] * 5])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]] * 2)
    return {
        "causal": {"is_causal": True},
        "all": {},
        "window": {"is_causal": True, "window": 3},
        "padding": {"is_causal": True, "key_padding_mask": keep},
        "segments": {"is_causal": True, "segment_ids": ids, "window": (4, 0)},
        "positions": {"positions": positions},
        "mask": {"mask": np.tri(T, dtype=bool)},
        "additive": {"mask": np.where(np.tri(T), 0.5, -np.inf).astype(np.float32)},
    }


FEW = ("padding", "segments")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in situations()],
)
def test_jit_remat_and_vmap_change_nothing(inputs, name):
    options = situations()[name]
    static = ("is_causal", "window")
    fixed = {k: v for k, v in options.items() if k in static}
    arrays = {k: jnp.asarray(v) for k, v in options.items() if k not in static}

    def attend(q, k, v, s, arrays):
        return sj.ssmax_attention(q, k, v, s, **arrays, **fixed)

    out = attend(*inputs, arrays)
    same(jax.jit(attend)(*inputs, arrays), out)

    def loss(attend, inputs):
        return (attend(*inputs, arrays) ** 2).sum()

    plain = jax.jit(jax.grad(partial(loss, attend)))(inputs)
    again = jax.jit(jax.grad(partial(loss, jax.checkpoint(attend))))(inputs)
    for one, other in zip(plain, again, strict=True):
        same(one, other, 1e-4)
    # Rows of the batch as an axis of their own, and values of s beside each other.
    *qkv, s = inputs
    by_row = {k: v for k, v in arrays.items() if v.shape[0] == B}
    shared = {k: v for k, v in arrays.items() if k not in by_row}
    rows = jax.jit(jax.vmap(lambda qkv, by_row: attend(*qkv, s, {**by_row, **shared})))(
        [x[:, None] for x in qkv], {k: v[:, None] for k, v in by_row.items()}
    )
    same(rows[:, 0], out)
    several = jax.jit(jax.vmap(lambda s: attend(*qkv, s, arrays)))(jnp.stack((s, 2 * s)))
    same(several[0], out)


def test_a_fully_masked_row_gives_zeros_and_finite_gradients(inputs):
    keep = np.ones((B, T), bool)
    keep[0, :4] = False

    def loss(q, k, v, s):
        out = sj.ssmax_attention(q, k, v, s, is_causal=True, key_padding_mask=keep)
        return (out**2).sum(), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*inputs)
    assert (out[0, :4] == 0).all() and (out[0, 4:] != 0).any()
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][0, :4] == 0).all() and (gradients[1][0, :4] == 0).all()
    assert sj.ssmax_attention(*(x[:, :0] for x in inputs[1:2] * 3), 1.0).shape == (B, 0, G, D)
    nothing = sj.ssmax_attention(inputs[0], inputs[1][:, :0], inputs[2][:, :0], 1.0)
    assert (nothing == 0).all()


def test_float16_does_not_overflow():
    """60,000 times a factor of 10 is no number of float16; D is 1, so that the logits are none."""
    q = jnp.full((1, 2, 1, 1), 6e4, jnp.float16)
    k = jnp.array([0.0, 1e-3], jnp.float16).reshape(1, 2, 1, 1)
    out = sj.ssmax_attention(q, k, 1000 * k, 1.0, num_keys=22_026)
    assert jnp.isfinite(out).all() and (out > 0.999).all()


@pytest.mark.parametrize("axis", ["batch", "tokens", "heads"])
def test_sharded_arrays_give_the_same(inputs, axis):
    """n is that of the whole array wherever its parts are; heads need nothing of each other."""
    mesh = jax.make_mesh((2,), (axis,), (AxisType.Auto,), devices=jax.devices()[:2])
    names = [name if name == axis else None for name in ("batch", "tokens", "heads")]
    of_tokens = NamedSharding(mesh, PartitionSpec(*names))
    of_heads = NamedSharding(mesh, PartitionSpec("heads" if axis == "heads" else None))
    *qkv, s = inputs
    qkv = [jax.device_put(x, of_tokens) for x in qkv]
    s = jax.device_put(s, of_heads)
    keep = jax.device_put(
        np.arange(T) >= np.array([[5], [0]]), NamedSharding(mesh, PartitionSpec(*names[:2]))
    )

    def loss(q, k, v, s):
        out = sj.ssmax_attention(q, k, v, s, is_causal=True, key_padding_mask=keep)
        return (out**2).sum(), out

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    compiled = step.lower(*qkv, s).compile()
    gradients, out = compiled(*qkv, s)
    keep = jax.device_get(keep)
    expected, alone = step(*inputs)
    same(out, alone)
    for one, other in zip(gradients, expected, strict=True):
        same(one, other, 1e-4)
    if axis != "tokens":
        assert out.sharding.is_equivalent_to(of_tokens, out.ndim)
        assert "all-gather" not in compiled.as_text()


def test_a_rotation_and_the_factor_are_one_pass(inputs, monkeypatch):
    """XLA writes the query once: nothing between what makes it and its factor keeps them apart."""
    q, k, v, s = inputs
    monkeypatch.setattr(sj, "_attend", lambda q, *_: q)

    def rotated(q):
        angles = jnp.arange(T)[:, None, None] / jnp.arange(1, D // 2 + 1)
        (a, b), cos, sin = jnp.split(q, 2, axis=-1), jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def passes(function):
        compiled = jax.jit(function).lower(q).compile().as_text()
        main = compiled[compiled.index("ENTRY") :]
        return len(re.findall(rf"= \w+\[{B},{T},{H},{D}\]\S* (?!parameter|bitcast)", main))

    assert passes(rotated) == 1
    assert passes(lambda q: sj.ssmax_attention(rotated(q), k, v, s, is_causal=True)) == 1


def test_a_new_length_needs_no_new_values(inputs):
    """Traced arguments are not read: one program serves all padding."""
    traces = []

    @jax.jit
    def attend(keep):
        traces.append(keep)
        return sj.ssmax_attention(*inputs, is_causal=True, key_padding_mask=keep)

    for length in range(3):
        attend(jnp.arange(T)[None].repeat(B, 0) >= length)
    assert len(traces) == 1


ATTENTION = {
    "q must be an array": {"q": [[1.0]]},
    "q must have 4 dimensions": {"q": np.ones((T, H, D), np.float32)},
    "q must be floating": {"q": np.ones((B, T, H, D), np.int32)},
    "k and v must have one shape": {"v": np.ones((B, T + 1, G, D), np.float32)},
    "batch and head_dim": {"q": np.ones((B, T, H, D + 1), np.float32)},
    "one dtype": {"q": np.ones((B, T, H, D), np.float16)},
    "multiple of key heads": {"q": np.ones((B, T, 3, D), np.float32)},
    "one value per query head": {"s": np.ones(G, np.float32)},
    "s must be floating": {"s": np.ones(H, np.int32)},
    "scale must be a finite": {"scale": math.nan},
    "implementation must be": {"implementation": "flash"},
    "not with mask": {"is_causal": True, "mask": np.ones((T, T), bool)},
    "mask must be boolean": {"mask": np.ones((T, T), np.int32)},
    "mask must have 2 to 4": {"mask": np.ones((T, T + 1), bool)},
    "key_padding_mask must be boolean": {"key_padding_mask": np.ones((B, T), np.int32)},
    "covers the cached keys": {"key_padding_mask": np.ones((B, T - 1), bool)},
    "segment_ids must be integers": {"segment_ids": np.ones(T, np.float32)},
    "segment_ids must be (": {"segment_ids": np.ones(T + 1, np.int32)},
    "positions must be (": {"positions": np.ones((3, T), np.int32)},
    "num_keys must be at least 1": {"num_keys": 0},
    "num_keys must be a number or": {"num_keys": np.ones(T + 1, np.int32)},
    "window must be at least 1": {"window": 0},
    "is_causal must be True or False": {"is_causal": 1},
}  # fmt: skip


@pytest.mark.parametrize("message", ATTENTION)
def test_a_wrong_argument_gets_one_clear_error(inputs, message):
    arguments = dict(zip("qkvs", inputs, strict=True)) | ATTENTION[message]
    with pytest.raises(UsageError) as error:
        sj.ssmax_attention(**arguments)
    assert message in str(error.value)


def test_the_other_doors():
    z = np.ones((2, 3), np.float32)
    for call in (
        lambda: sj.ssmax(z, 1.0, axis=2),
        lambda: sj.ssmax(z, 1.0, mask=z),
        lambda: sj.ssmax(z, 1.0, mask=np.ones((3, 2), bool)),
        lambda: sj.ssmax(z, np.ones(3, np.float32)),
        lambda: sj.ssmax_factor(0, 1.0),
        lambda: sj.ssmax_factor(True, 1.0),
        lambda: sj.ssmax_factor(3, np.ones((2, 2), np.float32)),
        lambda: sj.visible_keys(-1, 3, is_causal=True),
        lambda: sj.visible_keys(4, 3, is_causal=True, segment_ids=np.ones(3, np.int32)),
        lambda: sj.visible_keys(2, 3, is_causal=False, positions=np.arange(2)),
    ):
        with pytest.raises(UsageError):
            call()


def test_a_flax_module_learns_s_in_float32(inputs):
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install 'ssmax[jax]'")
    from ssmax.jax_nnx import SSMaxScale

    scale = SSMaxScale(H, train_length=T, bias=True)
    assert {scale.s.dtype, scale.bias.dtype} == {jnp.dtype("float32")}
    n = sj.visible_keys(T, T, is_causal=True)
    assert scale(n).shape == (T, H)
    assert scale(n).mean() == pytest.approx(1.0, abs=1e-6)
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs)

    def attend(scale):
        return sj.ssmax_attention(q, k, v, scale.s, bias=scale.bias, is_causal=True)

    by_hand = (q * scale(n)[..., None]).astype(q.dtype)
    assert (attend(scale) == jax.nn.dot_product_attention(by_hand, k, v, is_causal=True)).all()

    def loss(scale):
        return (attend(scale).astype(jnp.float32) ** 2).sum()

    gradient = nnx.grad(loss)(scale)
    assert set(gradient) == {"s", "bias"} and gradient["s"].dtype == jnp.float32
    assert (gradient["s"][...] != 0).all()
    assert SSMaxScale(H, train_length=T).bias is None
    with pytest.raises(UsageError, match="num_heads"):
        SSMaxScale(0, train_length=T)
