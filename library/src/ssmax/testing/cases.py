"""Cases of attention: one by name for every way to get n wrong."""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ssmax.testing.budget import error_budget
from ssmax.testing.oracle import naive_attention, oracle_attention, oracle_mask


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one attention call: `attention(q, k, v, s, **options)`."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def mask_options(self) -> dict[str, Any]:
        """Select the options that say what is visible."""
        other = ("bias", "num_keys", "scale", "enable_gqa")
        return {name: value for name, value in self.options.items() if name not in other}

    def mask(self) -> Tensor:
        """Find who sees whom, by brute force: (B, H, T, S)."""
        batch, num_heads, num_queries, _ = self.q.shape
        return oracle_mask(
            num_queries, self.k.shape[2], batch=batch, num_heads=num_heads, **self.mask_options
        )

    def exact(self, **changes: Any) -> Tensor:
        """Compute the output by the definition, with s, bias or num_keys changed."""
        s = changes.pop("s", self.s)
        return oracle_attention(self.q, self.k, self.v, s, **{**self.options, **changes})

    def tolerance(self) -> float:
        """Compute what an output in this dtype may err, by the error of eager code in it."""
        eager = naive_attention(self.q, self.k, self.v, self.s, **self.options)
        # Above rounding in float64, since kernels may be of float32 inside.
        return max(1e-6, error_budget(eager, self.exact(), self.q.dtype))

    def mistaken_counts(self) -> dict[str, Tensor | int]:
        """List what n has been taken for, in published code."""
        batch, heads, queries, width = self.q.shape
        keys = self.k.shape[2]
        n = self.mask().sum(-1).clamp_min(1)
        index = torch.arange(keys - queries, keys)
        return {
            "the number of keys, seen or not": keys,
            "the number of queries": queries,
            "the position in the row, whatever is masked": (index + 1).clamp_min(1),
            "the position in the chunk, without the cache": torch.arange(1, queries + 1),
            "n + 1": n + 1,
            "the n of the first row": n[:1].expand(batch, heads, queries),
            "head_dim": width,
            "the hidden size": heads * width,
        }

    def __str__(self) -> str:
        options = ", ".join(f"{name}={_brief(value)}" for name, value in self.options.items())
        shape = f"q {tuple(self.q.shape)}, k {tuple(self.k.shape)}, {self.q.dtype}"
        return f"{self.name} (seed {self.seed}): {shape}, {options}"


@dataclass(frozen=True, kw_only=True)
class SplitCase(Case):
    """One rank's share of a sequence: `attention(q, k, v, s, positions=..., ...)` on every rank.

    Where `documents` are among the options, they name the document of each token.
    """

    whole: Case
    """The sequence."""
    shares: list[Tensor]
    """Which of its tokens each rank holds."""
    rank: int

    def exact(self, **changes: Any) -> Tensor:
        """Compute this rank's part of the output of the whole sequence."""
        return self.whole.exact(**changes)[:, :, self.shares[self.rank]]

    def tolerance(self) -> float:
        """Compute what an output may err, as that of the whole sequence."""
        return self.whole.tolerance()

    def mistaken_counts(self) -> dict[str, Tensor | int]:
        """List what n can be taken for where the sequence is split, each for the whole of it."""
        held = torch.cat(self.shares)
        local = torch.cat([torch.arange(len(share)) for share in self.shares])
        return {
            "the index in this rank's share (local n)": (local + 1)[held.argsort()],
            "the index in the sequence (restart ignored)": torch.arange(1, len(held) + 1),
            "the index in the order of the ranks (unpermuted n)": held.argsort() + 1,
            "the length of this rank's share": len(self.shares[self.rank]),
            "the length of the sequence": len(held),
        }


def split_cases(rank: int, size: int) -> list[SplitCase]:
    """Make one case for every way to split a sequence over ranks: this rank's share of each."""
    length = 8 * size
    chunks = torch.arange(length).chunk(2 * size)
    orders = {
        "in order": list(torch.arange(length).chunk(size)),
        "zigzag": [torch.cat((chunks[r], chunks[2 * size - 1 - r])) for r in range(size)],
        "striped": [torch.arange(r, length, size) for r in range(size)],
        "random order": list(
            torch.randperm(length, generator=torch.Generator().manual_seed(3)).chunk(size)
        ),
    }
    bounds = torch.tensor([0, 2, 3, length - 3, length], dtype=torch.int32)
    packed, window = {"cu_seqlens": bounds}, {"window": 3}
    situations: dict[str, tuple[str, dict[str, Any]]] = {
        **{name: (name, {}) for name in orders},
        "grouped heads, zigzag": ("zigzag", {"kv_heads": 2}),
        "with bias, zigzag": ("zigzag", {"bias": torch.linspace(0.1, 0.7, 4).double()}),
        "window, zigzag": ("zigzag", window),
        "window, random order": ("random order", window),
        "packed, in order": ("in order", packed),
        "packed, zigzag": ("zigzag", packed),
        "packed, random order": ("random order", packed),
        "packed window, zigzag": ("zigzag", {**packed, **window}),
    }
    cases = []
    for seed, (name, (order, options)) in enumerate(situations.items()):
        whole = make_case(name, queries=length, seed=seed, is_causal=True, **options)
        cases.append(_share(whole, orders[order], rank, is_ordered=order == "in order"))
    return cases


def _share(whole: Case, shares: list[Tensor], rank: int, *, is_ordered: bool) -> SplitCase:
    mine, index = shares[rank], torch.arange(whole.q.shape[2])
    bounds = whole.options.get("cu_seqlens", torch.tensor([0, len(index)])).long()
    documents = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    options: dict[str, Any] = {"positions": (index - bounds[documents])[mine]}
    if "cu_seqlens" in whole.options and not is_ordered:
        options["documents"] = documents[mine]
    options |= {name: whole.options[name] for name in ("bias", "window") if name in whole.options}
    return SplitCase(
        name=whole.name,
        q=whole.q[:, :, mine],
        k=whole.k[:, :, mine],
        v=whole.v[:, :, mine],
        s=whole.s,
        options=options,
        seed=whole.seed,
        whole=whole,
        shares=shares,
        rank=rank,
    )


def make_case(
    name: str,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    queries: int = 9,
    keys: int | None = None,
    width: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Draw q, k, v and a positive s per head under the given options."""
    keys = queries if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, queries, width, dtype=torch.float64, generator=generator)
    k = torch.randn(batch, kv_heads, keys, width, dtype=torch.float64, generator=generator)
    v = torch.randn(batch, kv_heads, keys, width, dtype=torch.float64, generator=generator)
    s = 0.2 + torch.rand(heads, dtype=torch.float64, generator=generator)
    if kv_heads != heads:
        options["enable_gqa"] = True
    # Logits of a few units, so that a wrong n moves the output by far more than rounding.
    return Case(
        name=name,
        q=(3.0 * q).to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        s=s.to(torch.promote_types(dtype, torch.float32)),
        options=options,
        seed=seed,
    )


def named_cases(dtype: torch.dtype = torch.float64) -> list[Case]:
    """Make one case for every situation in which attention has to know n."""
    left = _padding([4, 0], 9, side="left")
    right = _padding([0, 5], 9, side="right")
    bounds = torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    restarts = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
    holes = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(7)) > 0.4
    added = torch.where(holes, torch.zeros(()), -torch.inf).to(dtype)
    by_head = torch.rand(2, 4, 9, 9, generator=torch.Generator().manual_seed(8)) > 0.3
    causal = {"is_causal": True}
    situations: dict[str, dict[str, Any]] = {
        "causal": causal,
        "bidirectional": {},
        "decode, one query against a cache": {"queries": 1, "keys": 12, **causal},
        "chunk of queries against a cache": {"queries": 4, "keys": 12, **causal},
        "cross attention": {"queries": 3, "keys": 11},
        "grouped heads": {"kv_heads": 2, **causal},
        "with bias": {"bias": torch.linspace(0.1, 0.7, 4, dtype=torch.float64), **causal},
        "packed, cu_seqlens": {"cu_seqlens": bounds, **causal},
        "packed, positions that restart": {"positions": restarts, **causal},
        "packed, bidirectional": {"cu_seqlens": bounds},
        "left padding": {"key_padding_mask": left, **causal},
        "right padding": {"key_padding_mask": right, **causal},
        "ragged padding, bidirectional": {"key_padding_mask": left & right},
        "left-padded decode": {
            "queries": 1, "keys": 9, "key_padding_mask": left, **causal
        },
        "preallocated cache, the end unused": {
            "queries": 1, "keys": 9, "key_padding_mask": right, **causal
        },
        "padded cross attention": {"queries": 4, "keys": 9, "key_padding_mask": left},
        "sliding window": {"window": 3, **causal},
        "sliding window, (left, right)": {"window": (2, 1)},
        "sliding window, decode": {"queries": 1, "keys": 12, "window": 4, **causal},
        "sliding window, packed": {"window": 3, "cu_seqlens": bounds, **causal},
        "sliding window, left padding": {"window": 3, "key_padding_mask": left, **causal},
        "boolean mask": {"attn_mask": holes},
        "boolean mask, one per head": {"attn_mask": by_head},
        "additive mask": {"attn_mask": added},
        "one token": {"queries": 1, **causal},
    }  # fmt: skip
    return [
        make_case(name, dtype=dtype, seed=seed, **situation)
        for seed, (name, situation) in enumerate(situations.items())
    ]


def _padding(lengths: list[int], keys: int, *, side: str) -> Tensor:
    """True for tokens; each row hides `length` keys on one side."""
    index, hidden = torch.arange(keys), torch.tensor(lengths).unsqueeze(-1)
    return index >= hidden if side == "left" else index < keys - hidden


def _brief(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{tuple(value.shape)}" if value.numel() > 12 else str(value.tolist())
