"""One query over a cache: on the GPU where there is one, else in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from ssmax.testing import assert_no_worse_than
from ssmax_lab.model.decode import decode_attention, decode_attention_reference, kernels

# batch, query heads, key heads, room for keys, head_dim
SHAPES = [
    (1, 2, 2, 40, 16),
    (3, 4, 2, 97, 8),
    (2, 6, 2, 64, 24),
    (1, 3, 1, 300, 32),
    (2, 1, 1, 1, 8),
]


IMPLS = {"reference": decode_attention_reference, "triton": kernels.decode_attention}


def attend(impl, q, k, v, start, stop):
    return IMPLS[impl](q, k, v, start, stop, q.shape[-1] ** -0.5)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Several parts and blocks however few the keys."""
    monkeypatch.setattr(kernels, "KEYS_AT_A_TIME", 16)
    monkeypatch.setattr(kernels, "FEWEST_KEYS_OF_A_PART", 20)


def make(shape, dtype, device):
    batch, heads, kv_heads, room, width = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)

    q = randn(batch, 1, heads, width).transpose(1, 2)  # as a projection leaves it
    k, v = (randn(batch, kv_heads, room, width) for _ in range(2))
    start = torch.randint(0, max(1, room // 3), (batch,), generator=generator).to(device)
    stop = torch.randint(room // 2 + 1, room + 1, (batch,), generator=generator).to(device)
    return q, k, v, start, stop


def poisoned(x, start, stop):
    """What lies outside the bounds is anything."""
    place = torch.arange(x.shape[2], device=x.device)
    outside = (place < start[:, None]) | (place >= stop[:, None])
    return x.masked_fill(outside[:, None, :, None], float("nan"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_attention_over_what_lies_within_the_bounds(shape, dtype, device):
    q, k, v, start, stop = make(shape, dtype, device)
    exact = torch.cat(
        [
            F.scaled_dot_product_attention(
                q[row : row + 1].double(),
                k[row : row + 1, :, first:last].double(),
                v[row : row + 1, :, first:last].double(),
                enable_gqa=True,
            )
            for row, (first, last) in enumerate(zip(start.tolist(), stop.tolist(), strict=True))
        ]
    )
    k, v = poisoned(k, start, stop), poisoned(v, start, stop)
    plain, ours = (attend(impl, q, k, v, start, stop) for impl in IMPLS)
    assert ours.stride() == q.stride()
    assert_no_worse_than(ours, plain, exact, slack=2.0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_without_keys_gives_zeros(impl, device):
    q, k, v, start, stop = make(SHAPES[1], torch.float32, device)
    stop[1] = start[1]
    out = attend(impl, q, k, v, start, stop)
    assert not out[1].any() and out.isfinite().all() and out[0].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_logits_of_any_size(impl, size, device):
    q, k, v, start, stop = make(SHAPES[0], torch.float32, device)
    out = attend(impl, q * size, k, v, start, stop)
    row = (q * size @ k.mT)[..., start[0] : stop[0]].argmax(-1) + start[0]
    torch.testing.assert_close(out[0, :, 0], v[0, torch.arange(2, device=device), row[0, :, 0]])


@pytest.mark.gpu
def test_one_graph_serves_every_length():
    q, k, v, start, stop = make((2, 4, 2, 500, 64), torch.bfloat16, "cuda")
    stop.fill_(3)
    decode_attention(q, k, v, start * 0, stop)
    graph = torch.cuda.CUDAGraph()
    start.zero_()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k, v, start, stop)
    for length in (1, 17, 300, 500):
        stop.fill_(length)
        graph.replay()
        plain = attend("reference", q, k, v, start, stop)
        torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_any_width_fit_the_chip(monkeypatch, heads, dtype):
    monkeypatch.undo()
    for width in (64, 128, 256):
        q, k, v, start, stop = make((2, heads, 2, 500, width), dtype, "cuda")
        ours = decode_attention(q, k, v, start, stop)
        plain = attend("reference", q, k, v, start, stop)
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=1e-2)


OUTSIDE = [(0, 12), (-3, 4), (-3, 12), (9, 12), (-5, -2), (12, 8), (4, -1)]


@pytest.mark.parametrize("bounds", OUTSIDE, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_the_kernel_reads_nothing_outside_of_the_cache(bounds, heads, device):
    q, k, v, *_ = make((1, heads, 1, 8, 16), torch.float32, device)
    start, stop = (torch.tensor([bound], device=device) for bound in bounds)
    # The cache lies in the middle of what is not its own.
    k, v = (F.pad(x, (0, 0, 8, 8), value=torch.nan)[:, :, 8:16] for x in (k, v))
    out = kernels.decode_attention(q, k, v, start, stop, 0.3)
    plain = decode_attention_reference(q, k, v, start, stop, 0.3)
    torch.testing.assert_close(out, plain)
