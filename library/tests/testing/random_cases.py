"""Cases of attention at random: any combination of shapes and options that it has to serve."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssmax.testing.cases import Case, make_case


def random_case(rng: random.Random, *, dtype: torch.dtype | None = None, most: int = 12) -> Case:
    """Draw any combination of shapes and options that an attention has to serve."""
    dtype = dtype or rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    seed = rng.randrange(1 << 30)
    batch, kv_heads, group = rng.randint(1, 3), rng.randint(1, 2), rng.choice([1, 1, 2, 3])
    keys = rng.randint(1, most)
    queries = rng.choice([keys, keys, 1, rng.randint(1, keys), keys + rng.randint(1, 3)])
    options: dict[str, Any] = {"is_causal": rng.random() < 0.6}
    if rng.random() < 0.35:
        options["window"] = rng.choice(
            [rng.randint(1, keys + 1), (rng.randint(-1, keys), rng.randint(-1, keys))]
        )
    packing = rng.choice(["none", "none", "cu_seqlens", "positions"])
    if packing == "cu_seqlens" and queries <= keys:
        cuts = sorted(rng.randint(0, keys) for _ in range(rng.randint(0, 3)))
        options["cu_seqlens"] = torch.tensor([0, *cuts, keys], dtype=torch.int32)
    if packing == "positions" and (options["is_causal"] or queries == keys):
        rows = [_restarting(rng, max(keys, queries))[-queries:] for _ in range(batch)]
        options["positions"] = torch.tensor(rows if rng.random() < 0.7 else rows[0])
    if rng.random() < 0.4:
        lengths = [rng.randint(0, keys) for _ in range(batch)]
        options["key_padding_mask"] = _padding(rng, lengths, keys)
    if not options["is_causal"] and rng.random() < 0.4:
        mask_dtype = rng.choice([dtype, torch.promote_types(dtype, torch.float32)])
        heads = kv_heads * group
        options["attn_mask"] = _random_mask(rng, batch, heads, queries, keys, mask_dtype)
    if rng.random() < 0.3:
        options["bias"] = torch.tensor([rng.uniform(-1, 1) for _ in range(kv_heads * group)])
    if rng.random() < 0.2:
        options["scale"] = rng.uniform(0.05, 1.0)
    if rng.random() < 0.1:
        options["num_keys"] = rng.choice([rng.randint(1, 99), torch.arange(1, queries + 1)])
    case = make_case(
        "random",
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        width=rng.choice([4, 8, 16]),
        dtype=dtype,
        seed=seed,
        **options,
    )
    # s of any sign, zero, or one for all heads.
    s = rng.choice([case.s, case.s, -case.s, 0.0 * case.s, case.s[0]])
    return replace(case, s=s, **_laid_out(rng, case))


def _padding(rng: random.Random, lengths: list[int], keys: int) -> Tensor:
    """True for tokens; each row hides `length` keys on one side, or any number anywhere."""
    index, hidden = torch.arange(keys), torch.tensor(lengths).unsqueeze(-1)
    side = rng.choice(["left", "right", "ragged"])
    if side == "ragged":
        return torch.tensor([[rng.random() < 0.6 for _ in range(keys)] for _ in lengths])
    return index >= hidden if side == "left" else index < keys - hidden


def _restarting(rng: random.Random, length: int) -> list[int]:
    """Draw positions of documents packed into one row, the first perhaps cut at its start."""
    position, positions = rng.choice([0, 0, rng.randint(0, 5)]), []
    for _ in range(length):
        positions.append(position)
        position = 0 if rng.random() < 0.25 else position + 1
    return positions


def _random_mask(
    rng: random.Random, batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype
) -> Tensor:
    shape = rng.choice(
        [(queries, keys), (1, keys), (batch, 1, queries, keys), (heads, queries, keys),
         (batch, heads, queries, keys), (batch, 1, 1, keys)]
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    visible = torch.rand(shape, generator=generator) < rng.choice([0.2, 0.7, 0.95])
    if rng.random() < 0.5:
        return visible
    added = torch.randn(shape, generator=generator) * rng.choice([0.0, 1.0])
    return torch.where(visible, added, -torch.inf).to(dtype)


def _laid_out(rng: random.Random, case: Case) -> dict[str, Tensor]:
    """Lay the heads out as projections and slices leave them in memory."""
    layout = rng.choice(["plain", "plain", "projected", "strided"])
    heads = {"q": case.q, "k": case.k, "v": case.v}
    if layout == "projected":
        return {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in heads.items()}
    if layout == "strided":
        return {n: torch.stack((x, x), dim=-1)[..., 0] for n, x in heads.items()}
    return heads
