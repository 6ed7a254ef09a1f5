"""torch.compile: one graph, no breaks, and none more for a new length."""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ssmax import nn, rope_scale, rope_tables, ssmax_attention, ssmax_factor, visible_keys


def attention_block(q, k, v, s, b, impl="auto"):
    """All that a layer does: count n, take the factor, rotate, attend, each from the shapes."""
    tokens = q.shape[2]
    n = visible_keys(tokens, tokens, is_causal=True, device=q.device)
    tables = rope_tables(torch.arange(tokens, device=q.device), q.shape[-1])
    q, k = rope_scale(q, k, *tables, ssmax_factor(n, s, b), impl=impl)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def make(tokens, device, dtype=torch.float32):
    q, k, v = (torch.randn(2, 4, tokens, 16, device=device, dtype=dtype) for _ in range(3))
    s, b = torch.full((4,), 0.3, device=device), torch.full((4,), 0.1, device=device)
    return [x.requires_grad_() for x in (q, k, v, s, b)]


def gradients(function, inputs):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_one_graph_serves_every_length(impl, device):
    """A length read with math.log would compile anew for each; two graphs are the most."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_block, fullgraph=True, backend=counter)
    for tokens in (16, 24, 33, 5, 17, 40):
        inputs = make(tokens, device)
        for ours, eager in zip(
            gradients(lambda *x: compiled(*x, impl), inputs),
            gradients(lambda *x: attention_block(*x, impl), inputs),
            strict=True,
        ):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {}, {"is_causal": True, "window": 7}], ids=str
)
def test_ssmax_attention_is_one_graph_for_every_length(options, device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, s, b):
        return ssmax_attention(q, k, v, s, bias=b, **options)

    for tokens in (16, 24, 33, 40, 57, 64):
        inputs = make(tokens, device)
        ours = gradients(compiled, inputs)
        eager = gradients(
            lambda q, k, v, s, b: ssmax_attention(q, k, v, s, bias=b, **options), inputs
        )
        for x, y in zip(ours, eager, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("is_causal", [True, False])
def test_positions_of_any_length_share_a_graph(is_causal, device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, s, positions):
        return ssmax_attention(q, k, v, s, is_causal=is_causal, positions=positions)

    for tokens in (16, 24, 33, 40, 57):
        q, k, v, s, _ = make(tokens, device)
        positions = torch.arange(tokens, device=device) % 7
        expected = ssmax_attention(q, k, v, s, is_causal=is_causal, positions=positions)
        torch.testing.assert_close(compiled(q, k, v, s, positions), expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


def test_packed_and_padded_rows_compile_without_a_break(device):
    torch.compiler.reset()
    q, k, v, s, _ = make(24, device)
    keep = torch.ones(2, 24, dtype=torch.bool, device=device)
    keep[0, :5] = False
    bounds = torch.tensor([0, 10, 24], dtype=torch.int32, device=device)
    for options in (
        {"is_causal": True, "key_padding_mask": keep},
        {"is_causal": True, "cu_seqlens": bounds},
        {"is_causal": True, "positions": torch.arange(24, device=device) % 9},
        {"attn_mask": keep[:, None, None]},
    ):
        compiled = torch.compile(ssmax_attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(
            compiled(q, k, v, s, **options),
            ssmax_attention(q, k, v, s, **options),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("backend", ["auto", "math", "flash", "eager"])
def test_decoding_compiles_once_while_the_cache_grows(backend, device):
    if device == "cuda" and backend == "flash":
        pytest.skip("flash on CUDA has no float32")
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, s):
        return ssmax_attention(q, k, v, s, is_causal=True, backend=backend)

    s = torch.full((4,), 0.3, device=device)
    for keys in (5, 6, 7, 8, 50, 300, 301):
        q, k, v = (torch.randn(2, 4, n, 16, device=device) for n in (1, keys, keys))
        eager = ssmax_attention(q, k, v, s, is_causal=True, backend=backend)
        torch.testing.assert_close(compiled(q, k, v, s), eager, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", ["growing", "preallocated"])
def test_a_layer_with_a_cache_compiles(kind, device):
    torch.compiler.reset()
    layer = nn.SelfAttention(32, 4, num_kv_heads=2, train_length=16).to(device).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    row = torch.randn(1, 12, 32, device=device)
    cache = nn.KVCache(1)
    if kind == "preallocated":
        cache = nn.KVCache.preallocated(
            1, batch=1, num_kv_heads=2, max_keys=12, head_dim=8, device=device
        )
    pieces = []
    with torch.no_grad():
        for piece in row.split([4] + [1] * 8, dim=1):
            pieces.append(compiled(piece, cache=cache))
            cache.advance(piece.shape[1])
        torch.testing.assert_close(torch.cat(pieces, 1), layer(row), rtol=1e-4, atol=1e-5)


def test_masks_of_any_length_share_their_graphs(device):
    """More queries than fit one block are masked at once there: no graph for each block count."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(q, k, v, s):
        return ssmax_attention(q, k, v, s, is_causal=True, window=100)

    s = torch.full((4,), 0.3, device=device)
    for tokens in (200, 300, 600, 900, 1200, 1500, 1800, 2100, 2400, 2700):
        q, k, v = (torch.randn(1, 4, tokens, 8, device=device) for _ in range(3))
        compiled(q, k, v, s)
    assert counter.frame_count <= 2


def test_symbolic_from_the_start(device):
    torch.compiler.reset()
    compiled = torch.compile(ssmax_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads, kv_heads in ((4, 4), (4, 2), (6, 2)):
        q, k = (
            torch.randn(2, heads, 9, 8, device=device),
            torch.randn(2, kv_heads, 9, 8, device=device),
        )
        options = {"is_causal": True, "enable_gqa": True}
        out = compiled(q, k, k, torch.full((heads,), 0.2, device=device), **options)
        eager = ssmax_attention(q, k, k, 0.2, **options)
        torch.testing.assert_close(out, eager, rtol=1e-4, atol=1e-5)


FRESH = """
import torch, ssmax
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k = (torch.randn(1, 2, 8, 16, device=device) for _ in range(2))
tables = ssmax.rope_tables(torch.arange(8, device=device), 16)
factor = torch.rand(2, 8, device=device, requires_grad=True)
turn = lambda q, k, f: ssmax.rope_scale(q, k, *tables, f, impl="triton")
# inductor's C++ compiler cannot stand a space in the path of the checkout
backend = "inductor" if device == "cuda" else "aot_eager"
step = torch.compile(turn, fullgraph=True, backend=backend)
out = step(q, k, factor)
out[0].sum().backward()
plain = ssmax.rope_scale(q, k, *tables, factor, impl="reference")
torch.testing.assert_close(out[0], plain[0]); torch.testing.assert_close(out[1], plain[1])
print("same")
"""


def test_the_first_call_of_a_process_may_be_a_compiled_one(device):
    environment = dict(os.environ)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "same", done.stderr
