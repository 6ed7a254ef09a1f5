"""A converted model whose sequences are split over ranks by Accelerate or DeepSpeed."""

from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).parent / "split_worker.py"


def found(on_ranks, folder, what):
    on_ranks(2, WORKER, folder, what)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_in_pytorchs_ring_n_is_that_of_the_sequence_or_refused(on_ranks, tmp_path):
    """Its order is a zigzag; its kernels need GPUs, so n is looked at before them."""
    ranks = found(on_ranks, tmp_path, "ring")
    for each in ranks:
        n, positions = each["rising"]
        assert n == [position + 1 for position in positions]
        assert "packed" in each["packed"] and "window" in each["window"]
    assert sorted(ranks[0]["rising"][0] + ranks[1]["rising"][0]) == list(range(1, 9))


def test_under_ulysses_logits_are_those_of_one_process(on_ranks, tmp_path):
    pytest.importorskip("deepspeed")
    for out, exact in found(on_ranks, tmp_path, "ulysses"):
        torch.testing.assert_close(out, exact)
