"""Two ranks on gloo: a converted model's gradients are those of one process, s and b included."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks_worker import TOKENS, clamped, converted, decoded, gradients, logits, sharded
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import ssmax.hf
from ssmax.nn import SSMaxScale


@pytest.fixture(scope="module")
def folder(tmp_path_factory, on_ranks):
    """Where two ranks left what they found, in one run."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, Path(__file__).parent / "ranks_worker.py", folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return torch.load(folder / "found.pt")


@pytest.fixture(scope="module")
def exact():
    return gradients(converted().double(), TOKENS)


def test_sharded_layers_compute_without_gradients(found):
    """Only the layer whose turn it is has its s whole."""
    torch.testing.assert_close(found["fsdp2, no gradients"], logits(converted()))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("ddp", torch.float32),
        ("fsdp2", torch.float32),
        ("fsdp2 bfloat16", torch.bfloat16),
        ("tensor parallel", torch.float32),
    ],
)
def test_two_ranks_have_the_gradients_of_one(found, exact, case, dtype):
    alone = gradients(converted().to(dtype), TOKENS)
    assert found[case].keys() == exact.keys()
    for name, wanted in exact.items():
        error, allowed = ((g[name].double() - wanted).norm() for g in (found[case], alone))
        # Ranks add up in another order than one process does.
        assert error <= 2 * allowed + 1e-6 * wanted.norm(), name
        is_ours = ".ssmax." in name
        assert found[case][name].dtype == (torch.float32 if is_ours else dtype)


def test_float32_among_bfloat16_needs_groups_of_its_own(found):
    assert "uniform original parameter dtype" in found["fsdp2 bfloat16, one group"]


def test_a_rule_that_learns_nothing_is_the_same_for_the_heads_of_a_rank(found):
    alone, exact = logits(clamped()), logits(clamped().double())
    error, allowed = ((x.double() - exact).norm() for x in (found["clamp"], alone))
    assert error <= 2 * allowed + 1e-6 * exact.norm()


def test_a_decoding_step_of_split_heads_is_the_full_forward(found):
    exact, alone = logits(converted().double())[:, -1:], decoded(converted())
    error, allowed = ((x.double() - exact).norm() for x in (found["decoded"], alone))
    assert error <= 2 * allowed + 1e-6 * exact.norm()


def test_the_plan_for_s_comes_and_goes_with_it():
    plain = ssmax.hf.revert(converted()).tp_plan
    place = "model.layers.*.self_attn.ssmax"
    added = {f"{place}.s": "colwise", f"{place}.bias": "colwise"}
    assert converted().tp_plan == {**plain, **added} and not added.keys() & plain.keys()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_ddp_wraps_is_converted_still(one_rank):
    wrapped = DistributedDataParallel(converted())
    groups = ssmax.hf.param_groups(wrapped, lr=1e-5, ssmax_lr=1e-3)
    assert [len(group["params"]) for group in groups if group["lr"] == 1e-3] == [4]
    assert ssmax.hf.verify(wrapped).layers == 2


@pytest.mark.parametrize("is_first", [False, True])
def test_a_group_of_its_own_keeps_s_from_a_policy_that_would_round_it(
    one_rank, monkeypatch, is_first
):
    seen, plain = set(), SSMaxScale.forward

    def forward(self, num_keys):
        seen.add(self.s.dtype)
        return plain(self, num_keys)

    monkeypatch.setattr(SSMaxScale, "forward", forward)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded(converted(), ssmax_first=is_first, mp_policy=policy)(input_ids=TOKENS)
    assert seen == {torch.float32 if is_first else torch.bfloat16}


@torch.no_grad()
def test_what_was_split_is_saved_whole(folder):
    wanted = converted()(input_ids=TOKENS).logits
    assert torch.equal(ssmax.hf.from_pretrained(folder / "again")(input_ids=TOKENS).logits, wanted)
    base = ssmax.hf.revert(converted())
    for rank in "01":
        loaded = ssmax.hf.load(base, folder / "adapter" / rank)
        assert torch.equal(loaded(input_ids=TOKENS).logits, wanted)
        ssmax.hf.revert(base)


def test_in_pytorchs_ring_n_is_that_of_the_sequence_or_refused(folder):
    """Its order is a zigzag; its kernels need GPUs, so n is looked at before them."""
    ranks = [torch.load(folder / f"ring{rank}.pt") for rank in range(2)]
    for each in ranks:
        n, positions = each["rising"]
        assert n == [position + 1 for position in positions]
        assert "packed" in each["packed"] and "window" in each["window"]
    assert sorted(ranks[0]["rising"][0] + ranks[1]["rising"][0]) == list(range(1, 9))


def test_under_ulysses_logits_are_those_of_one_process(on_ranks, tmp_path):
    pytest.importorskip("deepspeed")
    on_ranks(2, Path(__file__).parent / "ulysses_worker.py", tmp_path)
    for rank in range(2):
        torch.testing.assert_close(*torch.load(tmp_path / f"{rank}.pt"))
