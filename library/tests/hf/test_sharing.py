"""Layers share the counts of a mask and nothing else; s, b and the mask are those of now."""

import collections
import copy
import itertools

import pytest
import torch
from tiny_models import OFFLOADED, build, randomise, tokens_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import ssmax.hf
from ssmax.hf import hook


def scales_of(model):
    return [layer.self_attn.ssmax for layer in model.model.layers]


def converted(**options):
    return randomise(ssmax.hf.convert(build("llama"), **options))


@torch.no_grad()
def test_a_layer_called_alone_after_a_failed_forward_uses_the_new_s():
    """Nothing that a forward made for later layers may outlive it."""
    model, tokens = converted(), tokens_of(1, 7)
    model(tokens)
    stop = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens)
    stop.remove()
    last = scales_of(model)[1]
    last.s.data = last.s.data + 1.0
    hidden = torch.randn(1, 7, 32)
    angles = model.model.rotary_emb(hidden, torch.arange(7)[None])
    found = model.model.layers[1](hidden, position_embeddings=angles)
    wanted = copy.deepcopy(model).model.layers[1](hidden, position_embeddings=angles)
    assert torch.equal(found, wanted)


class Doubled(torch.nn.Module):
    def forward(self, s):
        return 2 * s


@torch.no_grad()
def test_an_s_that_is_computed_is_asked_for_by_itself():
    model, tokens = converted(), tokens_of(1, 6)
    plain = copy.deepcopy(model)
    for scale, other in zip(scales_of(model), scales_of(plain), strict=True):
        torch.nn.utils.parametrize.register_parametrization(scale, "s", Doubled())
        other.s.mul_(2)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


@torch.no_grad()
def test_an_offloaded_model_decodes_as_one_in_memory(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path / "whole")
    away = ssmax.hf.from_pretrained(
        tmp_path / "whole", device_map=OFFLOADED, offload_folder=tmp_path / "off"
    )
    assert scales_of(away)[0].s.is_meta and not scales_of(away)[1].s.is_meta
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    one, two = (each.generate(tokens_of(1, 7), **options) for each in (model, away))
    # Where a file puts the weights in memory moves the last digit of a product.
    torch.testing.assert_close(torch.stack(one.logits), torch.stack(two.logits))


class Counted(TorchDispatchMode):
    """How often each operator was called."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*arguments, **(options or {}))


def padded():
    tokens = tokens_of(2, 7)
    keep = torch.ones_like(tokens)
    keep[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": keep, "use_cache": False}


@torch.no_grad()
def test_a_mask_is_counted_once_for_all_layers():
    model, plain = converted(), build("llama")
    calls = []
    for each in (model, plain):
        with Counted() as counted:
            each(**padded())
        calls.append(counted.calls["sum"])
    assert calls[0] - calls[1] == 1


@torch.no_grad()
def test_in_a_graph_too():
    sums = []

    def look(graph, _):
        sums.append(sum("aten.sum" in str(node.target) for node in graph.graph.nodes))
        return graph

    model = converted()
    wanted = model(**padded()).logits
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=look), fullgraph=True)
    torch.testing.assert_close(compiled(**padded()).logits, wanted)
    assert sums == [1]


@torch.no_grad()
def test_a_mask_that_changes_in_place_is_counted_again():
    model, tokens = converted(), tokens_of(1, 6)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    model(tokens, attention_mask=mask)
    mask[..., 0] = False
    mask[..., 0, 0] = True
    again = model(tokens, attention_mask=mask).logits
    assert torch.equal(again, model(tokens, attention_mask=mask.clone()).logits)
    seen = []
    with hook.watched(lambda module, num_keys, *_: seen.append(num_keys)):
        model(tokens, attention_mask=mask)
    assert seen[0].flatten().tolist() == [1, 1, 2, 3, 4, 5]


def test_inference_mode_has_no_versions():
    model, tokens = converted(), tokens_of(1, 6)
    with torch.inference_mode():
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
        first = model(tokens, attention_mask=mask).logits
        mask[..., 0] = False
        mask[..., 0, 0] = True
        assert not torch.equal(model(tokens, attention_mask=mask).logits, first)


TRACED = pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning"
)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, mask=None):
        return self.model(tokens, attention_mask=mask).logits


@torch.no_grad()
@TRACED
@pytest.mark.parametrize("way", ["trace", "make_fx"])
def test_what_is_recorded_counts_by_itself(way):
    """Though the same mask was counted before: another will take its place."""
    model, tokens = converted(), tokens_of(1, 6)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    other = mask.clone()
    other[..., 0] = False
    other[..., 0, 0] = True
    plain = Logits(model)
    wanted = plain(tokens, other.clone())
    plain(tokens, mask)
    if way == "trace":
        recorded = torch.jit.trace(plain, (tokens, mask), check_trace=False)
    else:
        recorded = make_fx(plain)(tokens, mask)
    torch.testing.assert_close(recorded(tokens, other), wanted)


@torch.no_grad()
@TRACED
def test_an_encoder_without_a_mask_can_be_traced():
    model = randomise(ssmax.hf.convert(build("bert"), attention="all"))
    tokens = tokens_of(1, 6)
    traced = torch.jit.trace(Logits(model), (tokens,), check_trace=False)
    torch.testing.assert_close(traced(tokens), model(tokens).logits)


class Twice(nn.Module):
    def forward(self, s):
        return 2 * s


@torch.no_grad()
def test_a_graph_reads_s_as_it_is_now():
    model = converted().eval()
    scale = scales_of(model)[1]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    seen = []
    for change in (
        lambda: None,
        lambda: scale.s.mul_(3),
        lambda: setattr(scale, "s", nn.Parameter(scale.s + 1)),
        lambda: parametrize.register_parametrization(scale, "s", Twice()),
    ):
        change()
        seen.append(compiled(**padded()).logits)
        torch.testing.assert_close(seen[-1], model(**padded()).logits)
    for one, next_one in itertools.pairwise(seen):
        assert not torch.allclose(one, next_one)


@torch.no_grad()
def test_a_graph_heeds_hooks_that_were_there():
    """Torch does not look for those that come later."""
    model = converted().eval()
    before = model(**padded()).logits
    scales_of(model)[1].register_forward_hook(lambda module, given, factor: 2 * factor)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)(**padded()).logits
    torch.testing.assert_close(compiled, model(**padded()).logits)
    assert not torch.allclose(compiled, before)


@torch.no_grad()
def test_a_graph_asks_for_little_beside_s_and_b():
    """Torch asks before every run whether all that was looked at is as it was, on the host."""
    asked = []

    def look(guards):
        asked.extend(guard.name for guard in guards)
        return [True] * len(guards)

    torch.compiler.reset()
    options = {"guard_filter_fn": look}
    compiled = torch.compile(converted().eval(), backend="eager", fullgraph=True, options=options)
    compiled(**padded())
    of_layer = [name for name in asked if "['1']" in name and "['ssmax']" in name]
    of_all = [name for name in asked if "ssmax_dot" in name]
    assert 0 < len(of_layer) <= 14 and len(of_all) <= 40, (of_layer, of_all)
