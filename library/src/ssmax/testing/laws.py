"""Laws that every attention must keep, whatever its n: no oracle is asked, only the attention.

Each takes `attention(q, k, v, s, **options)` and raises AssertionError where it breaks.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from ssmax.testing.cases import make_case
from ssmax.testing.check import Attention, is_refusal

LAWS: dict[str, Callable[[Attention], None]] = {}


def _law(law: Callable[[Attention], None]) -> Callable[[Attention], None]:
    LAWS[law.__name__] = law
    return law


@_law
def rows_do_not_see_their_neighbours(attention: Attention) -> None:
    """A row of a batch comes out as it does alone."""
    padding = torch.tensor([[False] * 3 + [True] * 6, [True] * 9])
    case = make_case("batch", is_causal=True, key_padding_mask=padding)
    together = attention(case.q, case.k, case.v, case.s, **case.options)
    for b in range(2):
        row = slice(b, b + 1)
        options = {**case.options, "key_padding_mask": padding[row]}
        alone = attention(case.q[row], case.k[row], case.v[row], case.s, **options)
        _same(together[row], alone, f"row {b} of a batch")


@_law
def any_split_into_chunks_agrees(attention: Attention) -> None:
    """Queries fed in pieces against the keys so far come out as all at once."""
    case = make_case("chunks", queries=11, is_causal=True)
    whole = attention(case.q, case.k, case.v, case.s, is_causal=True)
    for cuts in ([0, 1, 2, 11], [0, 4, 5, 11], [0, 11], list(range(12))):
        for start, stop in itertools.pairwise(cuts):
            q, k, v = case.q[:, :, start:stop], case.k[:, :, :stop], case.v[:, :, :stop]
            piece = attention(q, k, v, case.s, is_causal=True)
            _same(piece, whole[:, :, start:stop], f"queries {start}..{stop - 1} of {cuts}")


@_law
def padding_changes_nothing(attention: Attention) -> None:
    """Tokens behind padding on either side come out as without it."""
    case = make_case("padding", queries=6, is_causal=True)
    plain = attention(case.q, case.k, case.v, case.s, is_causal=True)
    for left, right in ((3, 0), (0, 2), (2, 3)):
        q, k, v = (
            torch.nn.functional.pad(x, (0, 0, left, right), value=7.0)
            for x in (case.q, case.k, case.v)
        )
        keep = torch.zeros(2, left + 6 + right, dtype=torch.bool)
        keep[:, left : left + 6] = True
        padded = attention(q, k, v, case.s, is_causal=True, key_padding_mask=keep)
        _same(padded[:, :, left : left + 6], plain, f"{left} pads before and {right} after")


@_law
def packed_documents_are_independent(attention: Attention) -> None:
    """Documents packed into one row come out as each alone."""
    bounds = [0, 3, 4, 10]
    case = make_case("packed", queries=10)
    packed = attention(
        case.q, case.k, case.v, case.s, is_causal=True,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
    )  # fmt: skip
    for start, stop in itertools.pairwise(bounds):
        q, k, v = (x[:, :, start:stop] for x in (case.q, case.k, case.v))
        alone = attention(q, k, v, case.s, is_causal=True)
        _same(packed[:, :, start:stop], alone, f"document at {start}..{stop - 1}")


@_law
def hidden_keys_have_no_effect(attention: Attention) -> None:
    """What a masked key or value holds never shows."""
    case = make_case("hidden", is_causal=True)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[:, :4] = False
    options = {"is_causal": True, "key_padding_mask": keep}
    before = attention(case.q, case.k, case.v, case.s, **options)
    k, v = (x.masked_fill(~keep[:, None, :, None], 1e3) for x in (case.k, case.v))
    _same(attention(case.q, k, v, case.s, **options), before, "hidden keys changed")


@_law
def the_order_of_the_keys_is_free(attention: Attention) -> None:
    """Without a mask, shuffled keys with their values give the same."""
    case = make_case("order")
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    shuffled = attention(case.q, case.k[:, :, order], case.v[:, :, order], case.s)
    _same(shuffled, attention(case.q, case.k, case.v, case.s), "keys shuffled")


@_law
def a_constant_on_every_logit_cancels(attention: Attention) -> None:
    """A channel that adds the same to every logit of a row changes nothing."""
    case = make_case("shift", is_causal=True)
    q, k = case.q.clone(), case.k.clone()
    k[..., 0] = 0.0
    plain = attention(q, k, case.v, case.s, is_causal=True)
    k[..., 0] = 5.0
    _same(attention(q, k, case.v, case.s, is_causal=True), plain, "logits shifted")


@_law
def a_single_key_gets_all_the_weight(attention: Attention) -> None:
    """n = 1: whatever s is, the output is the value."""
    case = make_case("single", queries=1)
    for factor in (1.0, 0.0, -1.0):
        _same(attention(case.q, case.k, case.v, factor * case.s), case.v, f"s times {factor}")


def check_laws(attention: Attention) -> dict[str, str]:
    """List the laws that the attention breaks, each with how; empty if it keeps all it serves."""
    broken = {}
    for name, law in LAWS.items():
        try:
            law(attention)
        except AssertionError as breach:
            broken[name] = str(breach)
        except Exception as error:
            if not is_refusal(error):
                broken[name] = f"{type(error).__name__}: {error}"
    return broken


def _same(out: Tensor, expected: Tensor, what: str) -> None:
    error = (out.double() - expected.double()).abs().max().item()
    assert error <= 1e-9, f"{what}: off by {error:.1e}"
