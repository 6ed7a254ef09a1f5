"""Windows cut into blocks: on the CPU by its own kernel, on a GPU see test_attention_gpu."""

import pytest
import torch

from ssmax.ops.backends import eager, windowed
from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.backends.windowed import kernels
from ssmax.ops.visible import mask_spec


# window, tokens, query heads, key heads; the last block whole, filled up, and of one token
@pytest.mark.parametrize(
    ("window", "tokens", "heads", "kv_heads"),
    [(8, 32, 4, 4), (7, 30, 4, 2), (16, 33, 2, 1), (2, 9, 1, 1)],
)
def test_blocks_are_the_window_in_values_and_gradients(window, tokens, heads, kv_heads):
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, tokens, n, 8, dtype=torch.float64, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    spec = mask_spec(tokens, tokens, is_causal=True, window=window)
    inputs = AttentionInputs(*leaves, spec, 0.7, 0.0)
    weight = torch.randn(leaves[0].shape, dtype=torch.float64, generator=generator)
    found, wanted = (
        (out, *torch.autograd.grad(out, leaves, weight))
        for out in (windowed.attend(inputs), eager.attend(inputs))
    )
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("batch", "blocks", "heads", "window", "width"), [(2, 3, 2, 9, 20)])
def test_the_kernel_merges_as_the_reference_does(batch, blocks, heads, window, width):
    out = torch.randn(batch, blocks, window, heads, width).transpose(2, 3)
    far_out = torch.randn(batch, blocks - 1, heads, window - 1, width)
    lse, far_lse = (20 * torch.randn(*x.shape[:-1], 1) for x in (out, far_out))
    merged = []
    for merge in (kernels.merge, windowed.merge_reference):
        parts = out.clone(), lse.clone()
        merge(*parts, far_out, far_lse)
        merged.append(parts)
    for got, wanted in zip(*merged, strict=True):
        torch.testing.assert_close(got, wanted)


def test_only_plain_causal_windows_on_a_fast_gpu_are_cut():
    spec = mask_spec(2048, 2048, is_causal=True, window=512)
    x = torch.randn(1, 1, 2048, 64, dtype=torch.bfloat16)
    assert not windowed.serves(AttentionInputs(x, x, x, spec, None, 0.0))
