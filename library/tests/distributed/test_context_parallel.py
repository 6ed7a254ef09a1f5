"""Context parallelism on two and four ranks is one process; mistaken counts of n are found."""

from pathlib import Path

import pytest
import torch

from ssmax.distributed import SequenceShard, context_parallel_attention, zigzag
from ssmax.errors import UsageError
from ssmax.nn import SelfAttention
from ssmax.testing import split_cases


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory, on_ranks):
    """What each of the ranks found, in one run."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(request.param, Path(__file__).parent / "ranks_worker.py", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def test_every_way_to_split_a_sequence_is_right(ranks):
    for found in ranks:
        assert len(found["cases"].outcomes) > 10 and found["cases"].all_right, found["cases"]


def test_values_and_gradients_are_those_of_one_process(ranks):
    """Any shares, documents by row, windows, grouped heads, learnable s and b."""
    assert max(max(found["drawn"]) for found in ranks) < 1e-12
    assert all(len(found["drawn"]) == 40 for found in ranks)


def test_a_layer_split_is_the_whole_layer_under_every_rule(ranks):
    # The rotation is float32.
    assert max(max(found["layers"].values()) for found in ranks) < 1e-5


@pytest.mark.parametrize(
    ("mistake", "finding", "cases"),
    [
        ("local_n", "local n", ("in order", "zigzag", "random order", "packed, random order")),
        ("unpermuted_n", "unpermuted n", ("zigzag", "random order", "packed, random order")),
        ("restart_ignored", "restart ignored", ("packed, in order", "packed, zigzag")),
    ],
)
def test_a_mistaken_n_is_found_and_named(ranks, mistake, finding, cases):
    for case in cases:
        outcomes = [o for found in ranks for o in found[mistake].outcomes if o.case == case]
        # On the first rank mistakes coincide, and where it holds the first tokens n may be right.
        for outcome in outcomes[1:]:
            assert outcome.verdict == "wrong" and finding in outcome.finding, case


def test_shares_that_do_not_fit_together_are_refused_on_every_rank(ranks):
    for found in ranks:
        assert "documents" in found["bad"]["out of order"]
        assert "twice" in found["bad"]["held twice"]
        assert "agree" in found["bad"]["other rows"]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_zigzag_holds_every_token_once_and_the_work_is_even(size):
    shares = [zigzag(48, size, rank) for rank in range(size)]
    assert torch.cat(shares).sort().values.tolist() == list(range(48))
    assert len({int((share + 1).sum()) for share in shares}) == 1
    with pytest.raises(UsageError, match="tokens"):
        zigzag(2 * size - 1, size, 0)


def test_without_ranks_it_is_plain_attention():
    case = split_cases(0, 1)[0]
    out = context_parallel_attention(case.q, case.k, case.v, case.s, **case.options)
    torch.testing.assert_close(out, case.exact())


# Dynamo of itself, where a graph goes on with a tensor that has a gradient function.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_layer_is_the_layer():
    layer, x = SelfAttention(16, 2, train_length=8, window=3), torch.randn(1, 6, 16)
    shard = SequenceShard(zigzag(6, 1, 0))
    exact = layer(x, shard=shard)
    wanted = torch.autograd.grad(exact.sum(), layer.q_proj.weight)
    out = torch.compile(layer, backend="eager")(x, shard=shard)
    torch.testing.assert_close(out, exact)
    found = torch.autograd.grad(out.sum(), layer.q_proj.weight)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("positions", "options", "keyword"),
    [
        (torch.arange(0), {}, "at least one"),
        (torch.rand(3), {}, "integers"),
        ([0, 1], {}, "tensor"),
        (torch.arange(3), {"documents": torch.zeros(2)}, "documents"),
    ],
)
def test_bad_positions_are_refused(positions, options, keyword):
    with pytest.raises(UsageError, match=keyword):
        SequenceShard(positions, **options)


def test_bad_calls_are_refused():
    shard, q = SequenceShard(torch.arange(3)), torch.randn(1, 2, 4, 8)
    with pytest.raises(UsageError, match="3 tokens"):
        shard.attention(q, q, q, 0.4)
    x = torch.randn(1, 3, 16)
    with pytest.raises(UsageError, match="cache"):
        SelfAttention(16, 2, train_length=8)(x, shard=shard, positions=torch.arange(3))
    with pytest.raises(UsageError, match="causal"):
        SelfAttention(16, 2, train_length=8, is_causal=False)(x, shard=shard)
