"""The classes on docs/own-model.md do what the page says of them.

As a script it is one of two ranks, and writes the gradients under FSDP2 into a file.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from ssmax.nn import SSMaxScale

PAGE = Path(__file__).parent.parent.parent / "docs" / "own-model.md"


def defined(name):
    """A class or function of the page, as it stands there."""
    for block in PAGE.read_text().split("```python\n")[1:]:
        code = block.split("```")[0]
        if f"class {name}(" in code or f"def {name}(" in code:
            scope = {"__name__": "page"}
            # The page's own code is what is tested, up to where the page uses it.
            exec(compile(code[: code.rindex("\n\n\n")], str(PAGE), "exec"), scope)
            return scope[name]
    raise AssertionError(f"the page defines no {name}")


class Called(nn.Module):
    """The page's attention by hand, with s from a call of its module."""

    def __init__(self, width, num_heads, train_length):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.num_heads = num_heads
        self.ssmax = SSMaxScale(num_heads, "ssmax", train_length)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return (defined("attention")(*heads, self.ssmax),)


def made(kind):
    torch.manual_seed(0)
    return kind(64, 4, 128)


def gradients(block, x):
    """Of every parameter by its name, whole."""
    block(x)[0].float().square().mean().backward()
    found = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in found.items()
    }


def inputs():
    return torch.randn(4, 11, 64, generator=torch.Generator().manual_seed(1))


def test_the_port_starts_where_multihead_attention_starts():
    port, old = made(defined("Attention")), nn.MultiheadAttention(64, 4)
    weight, theirs = port.in_proj_weight, old.in_proj_weight
    assert weight.abs().max() <= (6 / (4 * 64)) ** 0.5
    torch.testing.assert_close(weight.std(), theirs.std(), rtol=0.05, atol=0)
    assert not port.in_proj_bias.any() and not port.out_proj.bias.any()


@pytest.mark.parametrize("name", ["Attention", "CausalSelfAttention"])
def test_s_is_not_rounded(name):
    port = made(defined(name))
    before = port.ssmax.s.detach().clone()
    out = port.bfloat16()(torch.randn(1, 5, 64, dtype=torch.bfloat16))
    assert torch.equal(port.ssmax.s, before)
    assert (out[0] if isinstance(out, tuple) else out).dtype == torch.bfloat16


def test_one_graph_serves_every_length():
    block = made(defined("CausalSelfAttention")).eval()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for length in (9, 12, 33):
            x = torch.randn(2, length, 64)
            torch.testing.assert_close(compiled(x)[0], block(x)[0])
        assert len(graphs) == 1
        for length in (7, 20, 31):
            _, past = block(x[:, :length])
            step = x[:, length : length + 1]
            torch.testing.assert_close(compiled(step, past)[0], block(step, past)[0])
    assert len(graphs) == 2


@torch.no_grad()
def test_an_exported_block_takes_other_lengths():
    block, x = made(defined("CausalSelfAttention")).eval(), torch.randn(2, 9, 64)
    some = torch.export.Dim("some", min=2, max=4096)
    whole = torch.export.export(block, (x,), dynamic_shapes={"x": {1: some}}).module()
    _, past = block(x)
    shapes = {"x": None, "past": ({2: some}, {2: some})}
    step = torch.export.export(block, (x[:, :1], past), dynamic_shapes=shapes).module()
    for length in (5, 40):
        x = torch.randn(2, length, 64)
        torch.testing.assert_close(whole(x)[0], block(x)[0])
        _, past = block(x)
        torch.testing.assert_close(step(x[:, :1], past)[0], block(x[:, :1], past)[0])


def test_two_ranks_of_fsdp2_have_the_gradients_of_one(tmp_path, on_ranks):
    on_ranks(2, __file__, tmp_path)
    found = {kind: load_file(tmp_path / f"{kind}.safetensors") for kind in ("together", "bfloat16")}
    together = gradients(made(defined("CausalSelfAttention")), inputs())
    for name, grad in together.items():
        torch.testing.assert_close(found["together"][name], grad, msg=name)
    s = gradients(made(Called), inputs())["ssmax.s"]
    torch.testing.assert_close(found["bfloat16"]["ssmax.s"], s, rtol=0.05, atol=1e-5)
    assert found["bfloat16"]["ssmax.s"].dtype == torch.float32


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = inputs().chunk(2)[dist.get_rank()]
    narrow = made(Called).bfloat16()
    fully_shard(narrow.ssmax)
    found = {
        "together": gradients(fully_shard(made(defined("CausalSelfAttention"))), mine),
        "bfloat16": gradients(fully_shard(narrow), mine.bfloat16()),
    }
    if dist.get_rank() == 0:
        for kind, tensors in found.items():
            save_file(tensors, Path(sys.argv[1], f"{kind}.safetensors"))
    dist.destroy_process_group()
