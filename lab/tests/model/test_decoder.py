"""The CUDA graph decoder against the plain one, step by step, prompts of unequal length."""

import pytest
import torch

from ssmax.nn import RULES
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.model import generation as decoders
from ssmax_lab.model.generation import left_padded

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [12]]
CASES = {
    "grouped heads": {"num_kv_heads": 2},
    "norms": {"qk_norm": True},
    "window": {"window": 5},
    "window in half of the layers": {"window": 5, "full_every": 2},
    "half rotated": {"rotary_dim": 4},
} | {rule: {"rule": rule} for rule in RULES}


def make(device="cpu", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    values = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 61,
              "train_length": 64, "rule": "ssmax", **changes}  # fmt: skip
    # Drawn once for every device and dtype: their generators differ.
    model = LM(LMConfig(**values)).double().eval()
    for name, parameter in model.named_parameters():
        # Large enough for attention to matter, so that a wrong n shows.
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name or "ssmax" in name:
            torch.nn.init.uniform_(parameter, 0.3, 1.0)
    return model.to(device, dtype)


def both(model, *, uses_graph, steps=9):
    """Logits of every step, of the plain decoder and of the other, fed the same tokens."""
    tokens_BT, keep_BT = left_padded(PROMPTS, 61, model.embedding.weight.device)
    room = {"batch": len(PROMPTS), "max_keys": tokens_BT.shape[1] + steps}
    plain = decoders.PlainDecoder(model, **room)
    other = decoders.CudaGraphDecoder(model, **room, uses_graph=uses_graph)
    pairs = [(plain.start(tokens_BT, keep_BT), other.start(tokens_BT, keep_BT))]
    for step in range(steps):
        chosen_B = (torch.arange(len(PROMPTS), device=tokens_BT.device) + 7 * step) % 61
        pairs.append((plain.step(chosen_B), other.step(chosen_B).clone()))
    return pairs, other


@pytest.mark.filterwarnings("ignore:the probe's table ends")
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_the_plain_decoder(name):
    pairs, _ = both(make(**CASES[name]), uses_graph=False)
    for plain, other in pairs:
        torch.testing.assert_close(other, plain, rtol=1e-9, atol=1e-9)


def test_a_full_cache_says_so():
    _, decoder = both(make(), uses_graph=False)
    with pytest.raises(ValueError, match="the cache is full: it holds 16 keys"):
        decoder.step(torch.tensor([1, 2, 3]))


def test_a_decoder_has_a_name_and_a_device():
    model = make()
    with pytest.raises(ValueError, match="decoder must be one of auto, plain, cuda_graph, got"):
        model.generate([[1]], 2, decoder="quick")
    with pytest.raises(ValueError, match="needs CUDA, got cpu; pass decoder='plain'"):
        model.generate([[1]], 2, decoder="cuda_graph")


def test_narrowed_weights_have_no_history():
    model = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoder = decoders.CudaGraphDecoder(model, batch=1, max_keys=2, uses_graph=False)
    narrow = [*vars(decoder.weights[0]).values(), decoder.norm, decoder.head]
    assert {weight.dtype for weight in narrow} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in narrow)


@pytest.mark.gpu
def test_long_answers_take_the_graph():
    weight = make("cuda", torch.float32).embedding.weight
    assert decoders.decoder_kind("auto", weight, 64) is decoders.CudaGraphDecoder
    assert decoders.decoder_kind("auto", weight, 63) is decoders.PlainDecoder
    assert decoders.decoder_kind("auto", weight.double(), 64) is decoders.PlainDecoder


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_replay_is_the_step(name):
    pairs, _ = both(make("cuda", torch.float32, **CASES[name]), uses_graph=True)
    for plain, other in pairs:
        torch.testing.assert_close(other, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_autocast_narrows_the_weights_once():
    model = make("cuda", torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pairs, decoder = both(model, uses_graph=True)
    assert decoder.weights[0].qkv.dtype == torch.bfloat16
    exact = torch.stack([x for x, _ in both(make("cuda"), uses_graph=False)[0]])
    plain, other = (torch.stack(logits).double() for logits in zip(*pairs, strict=True))
    # The captured step's residual stream is narrow too.
    assert (other - exact).abs().max() <= 4 * (plain - exact).abs().max()
