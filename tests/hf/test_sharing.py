"""What layers share: factors of a decoder's step, counts of a mask. Always those of now."""

import collections
import copy
import itertools
import threading

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
from ssmax.nn import SSMaxScale


def scales_of(model):
    return [layer.self_attn.ssmax for layer in model.model.layers]


def alone(scale, num_keys):
    """What the layer's own s and b say."""
    bias = scale.bias if scale.rule == "ssmax_bias" else None
    return ssmax.ssmax_factor(num_keys, scale.scale, bias).unsqueeze(-1)


def counted(monkeypatch):
    """A list that grows whenever factors are made."""
    made, together = [], hook._together
    monkeypatch.setattr(hook, "_together", lambda *a: made.append(1) or together(*a))
    return made


def converted(**options):
    return randomise(ssmax.hf.convert(build("llama"), **options))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"init": "paper", "train_length": 64}])
def test_every_layer_gets_its_own(options):
    scales = scales_of(converted(**options))
    for num_keys in (1, 2, 77, 10_000_000):
        for scale in scales:
            torch.testing.assert_close(scale(num_keys), alone(scale, num_keys))
            assert torch.equal(scale(num_keys), SSMaxScale.forward(scale, num_keys))


COUNTS = [range(1, 8), torch.tensor([3, 1, 9]), torch.tensor([[3, 1, 9], [2, 2, 40]])]


@torch.no_grad()
@pytest.mark.parametrize("limit", [1 << 22, 1])
@pytest.mark.parametrize("options", [{}, {"init": "paper", "train_length": 64}])
@pytest.mark.parametrize("num_keys", COUNTS, ids=["prompt", "mask", "rows"])
def test_so_it_does_for_prompts(num_keys, options, limit, monkeypatch):
    """To the bit, be it made together or, as too large, alone."""
    monkeypatch.setattr(hook, "SHARED_ELEMENTS", limit)
    counts = torch.tensor(list(num_keys)) if isinstance(num_keys, range) else num_keys
    for scale in scales_of(converted(**options)) * 2:
        assert torch.equal(scale(num_keys), SSMaxScale.forward(scale, counts))


@torch.no_grad()
def test_all_layers_are_made_at_once(monkeypatch):
    made = counted(monkeypatch)
    scales = scales_of(converted())
    # In the first pass they get to know each other.
    for num_keys, times in ((5, 2), (6, 1), (6, 1)):
        made.clear()
        for scale in scales:
            scale(num_keys)
        assert len(made) == times


@torch.no_grad()
@pytest.mark.parametrize("asked_first", [0, 1])
def test_a_layer_that_is_called_by_itself_leaves_nothing_old_behind(asked_first):
    model = converted()
    ids, hidden = tokens_of(1, 7), torch.randn(1, 7, 32)
    angles = model.model.rotary_emb(hidden, torch.arange(7)[None])
    for _ in range(2):
        model.model.layers[asked_first](hidden, position_embeddings=angles)
        model(ids)
        for changed in (0, 1):
            scales_of(model)[changed].scale.add_(1.0)
            model.model.layers[asked_first](hidden, position_embeddings=angles)
            scales_of(model)[changed].bias.add_(1.0)
            found = model.model.layers[changed](hidden, position_embeddings=angles)
            alike = copy.deepcopy(model)
            wanted = alike.model.layers[changed](hidden, position_embeddings=angles)
            assert torch.equal(found, wanted)
            assert torch.equal(model(ids).logits, alike(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 1), (0, 0), (0, 1, 1, 0)])
def test_an_s_that_changed_is_seen(order):
    scales = scales_of(converted())
    for place in order:
        scales[place](9)
        for scale in scales:
            # In a way that no version counter sees.
            scale.scale.data += 1
        scales[0](9)
        for scale in scales[::-1]:
            torch.testing.assert_close(scale(9), alone(scale, 9))


@torch.no_grad()
def test_a_copy_has_a_company_of_its_own():
    model = converted()
    scales_of(model)[0](9)
    twin = copy.deepcopy(model)
    (company,) = {scale.company for scale in scales_of(twin)}
    assert company is not scales_of(model)[0].company
    for scale in scales_of(twin):
        scale.scale.zero_()
    for scale in 2 * (scales_of(twin) + scales_of(model)):
        torch.testing.assert_close(scale(9), alone(scale, 9))
    lonely = {copy.deepcopy(scale).company for scale in scales_of(model)}
    assert len(lonely) == 2


@torch.no_grad()
def test_encoder_and_decoder_are_no_company():
    model = randomise(ssmax.hf.convert(build("bart"), attention="all"))
    tokens = tokens_of(1, 7)
    for _ in range(2):
        model(tokens)
    encoded = model.model.encoder(tokens)
    for name, parameter in model.named_parameters():
        if "decoder" in name and name.endswith("ssmax.scale"):
            parameter.mul_(5)
    first, again = (model(encoder_outputs=encoded, decoder_input_ids=tokens) for _ in range(2))
    assert torch.equal(first.logits, again.logits)


class Doubled(torch.nn.Module):
    def forward(self, s):
        return 2 * s


@torch.no_grad()
def test_an_s_that_is_computed_is_asked_for_by_itself():
    model, tokens = converted(), tokens_of(1, 6)
    plain = copy.deepcopy(model)
    for scale, other in zip(scales_of(model), scales_of(plain), strict=True):
        torch.nn.utils.parametrize.register_parametrization(scale, "scale", Doubled())
        other.scale.mul_(2)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("num_keys", [60_001, range(1, 9)])
def test_a_narrow_s_is_widened_first(num_keys):
    scales = scales_of(converted())
    counts = torch.tensor(list(num_keys)) if isinstance(num_keys, range) else num_keys
    for scale in 2 * scales:
        scale.scale.data = scale.scale.data.bfloat16()
        assert not scale.shares
        wanted = SSMaxScale.forward(scale, counts)
        assert wanted.dtype == torch.float32
        assert isinstance(num_keys, range) or torch.equal(scale(num_keys), wanted)


def test_gradients_reach_s():
    scale = scales_of(converted())[1]
    scale(9).sum().backward()
    assert scale.scale.grad.abs().min() > 0


@torch.no_grad()
def test_another_thread_takes_nothing_that_was_made_here(monkeypatch):
    scales = scales_of(converted())
    for scale in (*scales, scales[0]):
        scale(9)
    made = counted(monkeypatch)

    def work():
        with torch.no_grad():
            scales[1](9)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert made == [1]


@torch.no_grad()
def test_an_offloaded_model_decodes_as_one_in_memory(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path / "whole")
    away = ssmax.hf.from_pretrained(
        tmp_path / "whole", device_map=OFFLOADED, offload_folder=tmp_path / "off"
    )
    assert scales_of(away)[0].scale.is_meta and not scales_of(away)[1].scale.is_meta
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    one, two = (each.generate(tokens_of(1, 7), **options) for each in (model, away))
    assert torch.equal(torch.stack(one.logits), torch.stack(two.logits))


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
    with hook.watched(lambda module, num_keys, query: seen.append(num_keys)):
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
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    seen = []
    for change in (
        lambda: None,
        lambda: scale.scale.mul_(3),
        lambda: setattr(scale, "scale", nn.Parameter(scale.scale + 1)),
        lambda: parametrize.register_parametrization(scale, "scale", Twice()),
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
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**padded()).logits
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
