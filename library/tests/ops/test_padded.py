"""Padded rows, turned: on the CPU by the reference; on a GPU see test_attention_gpu."""

import pytest
import torch

from ssmax.ops.backends import eager, padded
from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.backends.padded import kernels
from ssmax.ops.visible import mask_spec

STARTS = [0, 3, 8, 17]


@pytest.mark.parametrize("back", [False, True])
def test_the_kernel_turns_as_the_reference_does(back):
    start = torch.tensor(STARTS)
    for x in (torch.randn(4, 17, 2, 20).transpose(1, 2), torch.randn(4, 2, 17, 20)):
        turned = kernels.turn(x, start, back)
        assert turned.transpose(1, 2).is_contiguous()
        assert torch.equal(turned, padded.turn_reference(x, start, back))


def test_rows_with_padding_before_them_are_turned_in_values_and_gradients():
    generator = torch.Generator().manual_seed(0)
    keep = torch.arange(17) >= torch.tensor(STARTS).unsqueeze(-1)
    spec = mask_spec(17, 17, is_causal=True, key_padding_mask=keep)
    leaves = [
        torch.randn(4, heads, 17, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    inputs = AttentionInputs(*leaves, spec, None, 0.0)
    turned = padded.attend(inputs, padded._find(keep), eager.attend)
    masked = eager.attend(inputs)
    weight = torch.randn(masked.shape, dtype=torch.float64, generator=generator)
    for got, wanted in zip(
        (turned, *torch.autograd.grad(turned, leaves, weight)),
        (masked, *torch.autograd.grad(masked, leaves, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_compiled_call_asks_its_mask_nothing(monkeypatch):
    """On a GPU, that is: nothing else gets as far."""
    monkeypatch.setattr(AttentionInputs, "on_gpu", True)
    q, keep = torch.randn(2, 1, 8, 4), torch.ones(2, 8, dtype=torch.bool)

    def found(q, keep):
        spec = mask_spec(8, 8, is_causal=True, key_padding_mask=keep)
        return q if padded.padding_of(AttentionInputs(q, q, q, spec, None, 0.0)) is None else -q

    torch.compiler.reset()
    assert torch.equal(torch.compile(found, fullgraph=True, backend="eager")(q, keep), q)
