"""Rotary positions: relative, exact far out, and only on the channels they own."""

import math

import pytest
import torch

from ssmax import apply_rope, rope_tables


def test_tables_are_cos_and_sin_of_position_times_frequency():
    cos, sin = rope_tables(torch.tensor([0, 1, 5]), 4, theta=100.0)
    assert cos.shape == sin.shape == (3, 2) and cos.dtype == torch.float32
    for row, position in enumerate((0, 1, 5)):
        for pair, frequency in enumerate((1.0, 0.1)):
            assert cos[row, pair].item() == pytest.approx(math.cos(position * frequency), abs=1e-6)
            assert sin[row, pair].item() == pytest.approx(math.sin(position * frequency), abs=1e-6)


def test_tables_are_exact_at_ten_million():
    cos, _ = rope_tables(torch.tensor([10_000_001]), 2)
    assert cos.item() == pytest.approx(math.cos(10_000_001), abs=1e-6)


def test_products_depend_on_the_distance_only():
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64) for _ in range(2))
    products = []
    for shift in (0, 3, 1000):
        tables = [rope_tables(torch.tensor([p + shift]), 16) for p in (7, 2)]
        products.append((apply_rope(q, *tables[0]) * apply_rope(k, *tables[1])).sum())
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), rtol=1e-5, atol=1e-6)


def test_position_zero_turns_nothing_and_the_tail_passes_through():
    x = torch.randn(2, 3, 4, 10)
    cos, sin = rope_tables(torch.arange(4), 6)
    y = apply_rope(x, cos, sin)
    assert torch.equal(y[:, :, 0], x[:, :, 0])
    assert torch.equal(y[..., 6:], x[..., 6:])
    assert not torch.allclose(y[:, :, 1:, :6], x[:, :, 1:, :6])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_one_table_per_row():
    x = torch.randn(2, 3, 4, 8)
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 0, 1]])
    y = apply_rope(x, *rope_tables(positions, 8))
    for row in range(2):
        alone = apply_rope(x[row : row + 1], *rope_tables(positions[row], 8))
        assert torch.equal(y[row : row + 1], alone)


def test_the_dtype_is_kept_and_rounded_once():
    x = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16)
    tables = rope_tables(torch.arange(3), 8)
    assert torch.equal(apply_rope(x, *tables), apply_rope(x.float(), *tables).bfloat16())
