"""Every kernel of the GPU against float64, forward and backward, at sizes that people use."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from ssmax import ssmax_attention
from ssmax.ops.backends import attend, choose_backend, windowed
from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.visible import mask_spec
from ssmax.testing import assert_no_worse_than

pytestmark = pytest.mark.gpu

# queries, keys, options
SITUATIONS = {
    "causal": (257, 257, {"is_causal": True}),
    "bidirectional": (130, 130, {}),
    "cross": (33, 300, {}),
    "decode": (1, 515, {"is_causal": True}),
    "chunk": (65, 320, {"is_causal": True}),
    "window": (300, 300, {"is_causal": True, "window": 50}),
    "long window": (2100, 2100, {"is_causal": True, "window": 600}),
    "pair": (200, 200, {"window": (30, 10)}),
    "packed": (256, 256, {"is_causal": True, "cu_seqlens": [0, 3, 131, 256]}),
    "packed, both ways": (256, 256, {"cu_seqlens": [0, 3, 131, 256]}),
    "left padding": (128, 128, {"is_causal": True, "pads": 40}),
    "long rows, both paddings": (1100, 1100, {"is_causal": True, "pads": 300}),
    "long rows, left padding": (1100, 1100, {"is_causal": True, "left": 300}),
    "long rows, right padding": (1100, 1100, {"is_causal": True, "right": 300}),
    "long rows, padding with holes": (1100, 1100, {"is_causal": True, "left": 300, "hole": 700}),
    "padded decode": (1, 300, {"is_causal": True, "pads": 40}),
    "positions": (128, 128, {"is_causal": True, "positions": 50}),
    "boolean mask": (64, 96, {"mask": True}),
}
CAN = {
    "cudnn": {"causal", "bidirectional", "cross", "decode"},
    "flash": {"causal", "bidirectional", "cross", "decode"},
    "varlen": {
        "causal",
        "bidirectional",
        "cross",
        "decode",
        "chunk",
        "window",
        "long window",
        "pair",
        "packed",
        "packed, both ways",
    },
}


def make(name, dtype, *, kv_heads=4):
    queries, keys, options = SITUATIONS[name]
    options = dict(options)
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(heads, tokens):
        x = torch.randn(2, tokens, heads, 64, device="cuda", generator=generator)
        return x.to(dtype).transpose(1, 2)

    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor(
            options["cu_seqlens"], dtype=torch.int32, device="cuda"
        )
    if pads := options.pop("pads", 0):
        index = torch.arange(keys, device="cuda")
        options["key_padding_mask"] = torch.stack((index >= pads, index < keys - 7))
    for side in ("left", "right"):
        if pads := options.pop(side, 0):
            index = torch.arange(keys, device="cuda").expand(2, -1)
            pads = torch.tensor([[pads], [0]], device="cuda")
            keep = index >= pads if side == "left" else index < keys - pads
            options["key_padding_mask"] = keep
    if hole := options.pop("hole", 0):
        options["key_padding_mask"][:, hole] = False
    if period := options.pop("positions", 0):
        options["positions"] = torch.arange(queries, device="cuda") % period
    if options.pop("mask", False):
        options["attn_mask"] = (
            torch.rand(2, 1, queries, keys, device="cuda", generator=generator) > 0.3
        )
    inputs = (3 * randn(4, queries), randn(kv_heads, keys), randn(kv_heads, keys))
    s = 0.2 + torch.rand(4, device="cuda", generator=generator)
    b = torch.rand(4, device="cuda", generator=generator)
    return (*inputs, s, b), {**options, "enable_gqa": kv_heads != 4}


def run(inputs, options, weight, *, dtype=None, backend):
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    if backend == "plain":
        out = plain(*leaves, options)
    else:
        out = ssmax_attention(*leaves[:4], bias=leaves[4], **options, backend=backend)
    gradients = torch.autograd.grad(out, leaves, weight.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv", "ds", "db"), (out, *gradients), strict=True))


def plain(q, k, v, s, b, options):
    """Explicit logits in the dtype itself: the budget."""
    options = {key: value for key, value in options.items() if key != "enable_gqa"}
    spec = mask_spec(q.shape[2], k.shape[2], **{"is_causal": False, **options}, device="cuda")
    n = spec.count().clamp_min(1)
    n = n if n.dim() == 3 else n.unsqueeze(-2)
    q = (q * (s[:, None] * n.log() + b[:, None]).unsqueeze(-1)).to(q.dtype)
    k, v = (x.repeat_interleave(4 // x.shape[1], dim=1) for x in (k, v))
    visible = spec.visible_mask()
    blind = ~visible.any(-1, keepdim=True)
    z = (q @ k.transpose(-1, -2) / 8).masked_fill(~(visible | blind), -torch.inf)
    return z.softmax(-1).masked_fill(blind, 0.0) @ v


BACKENDS = ["auto", "cudnn", "flash", "efficient", "math", "varlen", "eager"]
# Every backend in bfloat16 with grouped heads; the other dtypes where kernels differ by dtype.
RUNS = [
    *((backend, torch.bfloat16, 2) for backend in BACKENDS),
    ("auto", torch.bfloat16, 4),
    ("auto", torch.float16, 4),
    ("auto", torch.float32, 4),
    ("cudnn", torch.float32, 4),
    ("varlen", torch.float32, 4),
]


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize(("backend", "dtype", "kv_heads"), RUNS)
def test_no_worse_than_plain_code(backend, dtype, kv_heads, name):
    inputs, options = make(name, dtype, kv_heads=kv_heads)
    weight = torch.randn(
        inputs[0].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    half_only = backend in ("cudnn", "flash", "varlen") and dtype == torch.float32
    if half_only or name not in CAN.get(backend, SITUATIONS):
        try:
            run(inputs, options, weight, backend=backend)
        except ValueError as refusal:
            assert "cannot serve this call" in str(refusal)
            return
    fast = run(inputs, options, weight, backend=backend)
    exact = run(inputs, options, weight, dtype=torch.float64, backend="eager")
    budget = run(inputs, options, weight, backend="plain")
    assert fast["out"].dtype == dtype
    # Fused kernels take exp to about 20 ulp of float32, which only float32 inputs can show.
    slack = 8.0 if dtype == torch.float32 else 2.0
    for quantity in exact:
        assert_no_worse_than(
            fast[quantity],
            budget[quantity],
            exact[quantity],
            slack=slack,
            name=f"{name}: {quantity}",
        )


def test_auto_takes_varlen_where_others_need_a_mask():
    for name, expected in (
        ("window", "varlen"),
        ("chunk", "varlen"),
        ("packed", "varlen"),
        ("causal", "auto"),
        ("left padding", "auto"),
    ):
        inputs, options = make(name, torch.bfloat16)
        options.pop("enable_gqa")
        spec = mask_spec(
            inputs[0].shape[2], inputs[1].shape[2], **{"is_causal": False, **options}, device="cuda"
        )
        assert choose_backend("auto", AttentionInputs(*inputs[:3], spec, None, 0.0)) == expected, (
            name
        )


def test_long_windows_are_cut_into_blocks():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's triangles are the fastest from Hopper on")
    inputs, _ = make("long window", torch.bfloat16)
    spec = mask_spec(2100, 2100, is_causal=True, window=600, device="cuda")
    assert windowed.serves(AttentionInputs(*inputs[:3], spec, None, 0.0))


def test_a_bound_on_the_documents_changes_nothing():
    inputs, options = make("packed", torch.bfloat16)
    free, bound = (
        attend(*inputs[:3], mask_spec(256, 256, is_causal=True, max_seqlen=longest, device="cuda",
                                       cu_seqlens=options["cu_seqlens"]))
        for longest in (None, 128)
    )  # fmt: skip
    assert torch.equal(free, bound)


def test_neutral_values_are_softmax_bit_for_bit():
    inputs, _ = make("causal", torch.bfloat16)
    q, k, v = inputs[:3]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        softmax = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(ssmax_attention(q, k, v, 0.0, bias=1.0, is_causal=True), softmax)


def test_autocast():
    inputs, options = make("causal", torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = ssmax_attention(*inputs[:4], **options)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name.startswith("long rows")])
def test_long_padded_rows_wait_for_the_device_once(name):
    """And read a mask anew when it was changed in place."""
    inputs, options = make(name, torch.bfloat16)
    first = ssmax_attention(*inputs[:4], **options)
    try:
        with warnings.catch_warnings():
            # That the mode itself is a prototype.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        again = ssmax_attention(*inputs[:4], **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
    options["key_padding_mask"][:, :500] = False
    changed = ssmax_attention(*inputs[:4], **options)
    assert (changed[:, :, :500] == 0).all() and not torch.equal(changed, first)


def test_a_long_padded_row_makes_no_square_mask():
    """65,536 keys: the mask of all queries would be 4 GiB, twice."""
    q = torch.randn(1, 1, 65536, 64, device="cuda", dtype=torch.bfloat16)
    keep = torch.ones(1, 65536, dtype=torch.bool, device="cuda")
    keep[:, :100] = False
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        ssmax_attention(q, q, q, 0.1, is_causal=True, key_padding_mask=keep)
    assert torch.cuda.max_memory_allocated() < 3 * 2**30
