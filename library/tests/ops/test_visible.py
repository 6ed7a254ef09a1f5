"""n, in five one-line tables and then in every combination."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import random_case

from ssmax import attention_rows, num_visible_keys, ssmax, ssmax_attention, visible_keys
from ssmax.errors import UsageError
from ssmax.ops.visible import mask_spec

KEEP = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])


@pytest.mark.parametrize(
    ("situation", "options", "expected"),
    [
        ("causal", {"is_causal": True}, [1, 2, 3, 4, 5]),
        ("bidirectional", {"is_causal": False}, [5, 5, 5, 5, 5]),
        ("window", {"is_causal": True, "window": 3}, [1, 2, 3, 3, 3]),
        ("window of one", {"is_causal": True, "window": 1}, [1, 1, 1, 1, 1]),
        ("window wider than the row", {"is_causal": True, "window": 99}, [1, 2, 3, 4, 5]),
        ("an int window looks back only", {"is_causal": False, "window": 3}, [1, 2, 3, 3, 3]),
        ("pair", {"is_causal": False, "window": (1, 1)}, [2, 3, 3, 3, 2]),
        ("pair, causal", {"is_causal": True, "window": (1, 1)}, [1, 2, 2, 2, 2]),
        ("pair, right open", {"is_causal": False, "window": (1, -1)}, [5, 5, 4, 3, 2]),
        ("packed", {"is_causal": True, "cu_seqlens": [0, 2, 5]}, [1, 2, 1, 2, 3]),
        ("packed, empty document", {"is_causal": True, "cu_seqlens": [0, 2, 2, 5]}, [1, 2, 1, 2, 3]),
        ("packed, bidirectional", {"is_causal": False, "cu_seqlens": [0, 2, 5]}, [2, 2, 3, 3, 3]),
        ("packed, window", {"is_causal": True, "cu_seqlens": [0, 1, 5], "window": 2}, [1, 1, 2, 2, 2]),
        ("positions", {"is_causal": True, "positions": [0, 1, 0, 1, 2]}, [1, 2, 1, 2, 3]),
        ("positions, cut", {"is_causal": True, "positions": [7, 8, 0, 1, 2]}, [1, 2, 1, 2, 3]),
        ("positions, both ways", {"is_causal": False, "positions": [0, 1, 0, 1, 2]}, [2, 2, 3, 3, 3]),
    ],
)  # fmt: skip
def test_n_of_one_row(situation, options, expected):
    for name in ("cu_seqlens", "positions"):
        if name in options:
            options = {**options, name: torch.tensor(options[name], dtype=torch.int32)}
    assert visible_keys(5, 5, **options).tolist() == expected


def test_n_does_not_count_padding():
    assert visible_keys(5, 5, is_causal=True, key_padding_mask=KEEP).tolist() == [
        [1, 1, 1, 2, 3],
        [1, 2, 3, 4, 4],
    ]
    assert visible_keys(5, 5, is_causal=False, key_padding_mask=KEEP).tolist() == [[3] * 5, [4] * 5]


def test_n_of_a_decoding_step_is_the_number_of_cached_keys_and_one():
    assert visible_keys(1, 7, is_causal=True).tolist() == [7]
    assert visible_keys(3, 7, is_causal=True).tolist() == [5, 6, 7]
    assert visible_keys(1, 5, is_causal=True, key_padding_mask=KEEP).tolist() == [[3], [4]]
    assert visible_keys(1, 9, is_causal=True, window=4).tolist() == [4]
    assert visible_keys(1, 9, is_causal=True, positions=torch.tensor([2])).tolist() == [3]


def test_n_of_cross_attention_is_the_number_of_keys():
    assert visible_keys(2, 9, is_causal=False).tolist() == [9, 9]
    assert visible_keys(9, 2, is_causal=False).tolist() == [2] * 9


def test_positions_may_differ_by_row():
    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    assert visible_keys(4, 4, is_causal=True, positions=positions).tolist() == [
        [1, 2, 3, 1],
        [1, 1, 2, 3],
    ]


def test_n_is_an_integer_and_at_least_one():
    n = visible_keys(4, 2, is_causal=True)  # two queries stand before the first key
    assert n.dtype == torch.int64
    assert n.tolist() == [1, 1, 1, 2]
    assert visible_keys(3, 0, is_causal=False).tolist() == [1, 1, 1]
    assert visible_keys(0, 3, is_causal=True).tolist() == []


def test_n_of_nothing():
    empty = torch.empty(0, dtype=torch.int64)
    for is_causal in (True, False):
        assert visible_keys(0, 0, is_causal=is_causal, positions=empty).tolist() == []


def test_num_visible_keys_counts_a_mask():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert num_visible_keys(mask).tolist() == [2, 1]
    assert num_visible_keys(mask, dim=0).tolist() == [1, 1, 1]


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_an_additive_mask_hides_with_minus_infinity_or_the_lowest_number(hidden):
    mask = torch.tensor([[0.0, hidden, 2.5], [hidden, hidden, -3.0]])
    assert num_visible_keys(mask).tolist() == [2, 1]


@given(st.randoms(use_true_random=False))
def test_n_is_the_count_of_the_mask(rng: random.Random):
    case = random_case(rng, dtype=torch.float64)
    spec = mask_spec(case.q.shape[2], case.k.shape[2], **case.mask_options)
    expected = case.mask()
    counted = spec.count()
    counted = counted if counted.dim() == 3 else counted.unsqueeze(-2)
    assert torch.equal(counted.expand(expected.shape[:3]), expected.sum(-1))
    assert torch.equal(spec.visible_mask().expand(expected.shape), expected)
    if "attn_mask" not in case.options:
        assert torch.equal(
            visible_keys(case.q.shape[2], case.k.shape[2], **case.mask_options)
            .reshape(-1, 1, case.q.shape[2])
            .expand(expected.shape[:3]),
            expected.sum(-1).clamp_min(1),
        )


@settings(max_examples=settings().max_examples // 4)
@given(st.randoms(use_true_random=False))
def test_a_key_span_holds_all_that_its_queries_see(rng: random.Random):
    case = random_case(rng, dtype=torch.float64)
    spec = mask_spec(case.q.shape[2], case.k.shape[2], **case.mask_options)
    start = rng.randrange(case.q.shape[2])
    rows = (start, rng.randint(start + 1, case.q.shape[2]))
    mask = case.mask()[:, :, slice(*rows)]
    keys = spec.key_span(rows)
    block = mask[..., slice(*keys)]
    assert block.sum() == mask.sum()
    assert torch.equal(spec.visible_mask(rows, keys).expand_as(block), block)


def test_counting_makes_no_square_tensor():
    """200,000 queries: the square would be 40 GB."""
    n = visible_keys(
        200_000,
        200_000,
        is_causal=True,
        window=4096,
        key_padding_mask=torch.ones(1, 200_000, dtype=torch.bool),
    )
    assert n.max().item() == 4096


def test_a_bound_that_a_document_exceeds_is_refused():
    bounds = torch.tensor([0, 2, 5])
    assert mask_spec(5, 5, is_causal=True, cu_seqlens=bounds, max_seqlen=3).max_seqlen == 3
    with pytest.raises(ValueError, match="at least the longest document, 3, got 2"):
        mask_spec(5, 5, is_causal=True, cu_seqlens=bounds, max_seqlen=2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "entry",
    [
        lambda x, mask: num_visible_keys(mask),
        lambda x, mask: ssmax_attention(x, x, x, 0.4, attn_mask=mask),
        lambda x, mask: ssmax_attention(x, x, x, 0.4, attn_mask=mask, num_keys=3),
        lambda x, mask: attention_rows(x, x, 0.4, [0], attn_mask=mask),
        lambda x, mask: mask_spec(3, 3, is_causal=False, attn_mask=mask),
    ],
    ids=["num_visible_keys", "ssmax_attention", "with num_keys", "attention_rows", "visibility"],
)
def test_an_additive_mask_with_nan_is_refused_on_the_cpu(entry, bad):
    x = torch.ones(1, 1, 3, 4)
    mask = torch.zeros(3, 3).masked_fill(torch.eye(3).bool(), -torch.inf)
    assert entry(x, mask) is not None
    mask[2, 1] = bad
    with pytest.raises(UsageError, match="NaN"):
        entry(x, mask)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_ssmax_takes_no_additive_mask_at_all(bad):
    with pytest.raises(UsageError, match="boolean"):
        ssmax(torch.ones(3), 0.4, mask=torch.tensor([0.0, bad, 0.0]))
    with pytest.raises(UsageError, match="mask must be a tensor"):
        ssmax(torch.ones(3), 0.4, mask=[0.0, bad, 0.0])
