"""What the plugin of vLLM does where there is no vLLM; make test-engines runs it in there."""

import pytest
import torch

from ssmax.nn import RULES, SSMaxScale
from ssmax.vllm import ScaledRotary

TOKENS, HEADS, WIDTH = 7, 4, 8


class Turned(torch.nn.Module):
    """A rotation's contract: positions, flat queries and keys in, both turned out."""

    def forward(self, positions, query, key=None):
        turned = [
            each if each is None else each * (1 + positions[:, None]) for each in (query, key)
        ]
        return turned[0], turned[1]


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS * WIDTH, generator=generator).to(dtype)
    key = torch.randn(TOKENS, 2 * WIDTH, generator=generator).to(dtype)
    return query, key


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "probe"])
def test_a_query_is_scaled_by_n_of_its_own_position(rule, window):
    """Positions of several sequences in one step, in any order."""
    scale = SSMaxScale(HEADS, rule, 4)
    positions = torch.tensor([9, 0, 1, 2, 30, 31, 4])
    query, key = inputs()
    rotary = ScaledRotary(Turned(), scale, window)
    found, found_key = rotary(positions, query, key)
    plain, plain_key = Turned()(positions, query, key)
    n = positions + 1 if window is None else (positions + 1).clamp_max(window)
    wanted = plain.view(TOKENS, HEADS, WIDTH) * scale(n).t()[..., None]
    torch.testing.assert_close(found, wanted.flatten(1))
    assert torch.equal(found_key, plain_key)
    # Named once, by the attention that it belongs to.
    assert not list(rotary.named_parameters())


@torch.no_grad()
def test_a_narrow_query_is_rounded_once():
    scale = SSMaxScale(HEADS, "ssmax", 64)
    query, _ = inputs(torch.bfloat16)
    positions = torch.arange(60_000, 60_000 + TOKENS)
    rotary = ScaledRotary(Turned(), scale, None)
    wide = rotary.scaled(positions, query.float())
    assert torch.equal(rotary.scaled(positions, query), wide.bfloat16())


def test_several_positions_a_token_are_refused():
    rotary = ScaledRotary(Turned(), SSMaxScale(HEADS, "ssmax", 64), None)
    with pytest.raises(ValueError, match="one position a token"):
        rotary.scaled(torch.zeros(3, TOKENS, dtype=torch.long), inputs()[0])
