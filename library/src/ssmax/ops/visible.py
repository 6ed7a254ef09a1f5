"""n, the number of keys that each query can see: the only place where keys are counted in torch.

Except for an explicit mask, what a query sees is an interval of keys less the padding in it:
causality, windows and documents each only move the ends of the interval. So n costs
O(queries + keys), and no queries x keys tensor is made.
"""

# B batch, H query heads, T queries, S keys

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ssmax.errors import UsageError
from ssmax.ops.dtypes import check_tensor
from ssmax.ops.window import MASKED, UNBOUNDED, Window, window_pair

ROWS_PER_BLOCK = 256
ROTARY_HINT = "give other rotary positions to rope_tables, or to SelfAttention as rotary="

Span = tuple[int, int]
"""First and one past the last; not a slice, which torch.compile cannot carry about."""


class Ramp(NamedTuple):
    """n without a tensor: query t sees min(first + t, most) keys."""

    first: int
    most: int

    def counts(self, num_queries: int, device: torch.device | str | None = None) -> Tensor:
        """Write n out, (T,)."""
        steps = torch.arange(self.first, self.first + num_queries, device=device)
        return steps.clamp_max(self.most)


# Not frozen: that takes 2 us instead of 0.3, and every layer of a decoding step builds one.
@dataclass(kw_only=True, eq=False)
class MaskSpec:
    """Which keys each query sees.

    Built by `mask_spec` from what a caller says, unchecked from what a kernel is given.
    """

    num_queries: int
    num_keys: int
    is_causal: bool = False
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    """(left, right) as FlashAttention writes it; -1 is unbounded."""
    stands_at: Tensor | None = None
    """The key at which each query stands, (T,) or (B, T); None: the queries are the last keys."""
    cu_seqlens: Tensor | None = None
    """Bounds of packed documents, int64, from 0 to the number of keys."""
    max_seqlen: int | None = None
    """No packed document is longer."""
    positions: Tensor | None = None
    """Positions of the queries in their documents, int64, (T,) or (B, T)."""
    run_ends: Tensor | None = None
    """One past the last key of the document around each query, where only positions say so."""
    key_padding_mask: Tensor | None = None
    """True where a key is a token, False where it is padding."""
    mask: Tensor | None = None
    """Explicit mask, True is visible, broadcastable to (B, H, T, S), 4-D."""
    bias: Tensor | None = None
    """What an additive mask adds to the scaled logits, -inf where it hides; 4-D."""
    device: torch.device

    @property
    def bounds_start(self) -> bool:
        """True where some query may not see the first key."""
        if self.cu_seqlens is not None or self.positions is not None:
            return True
        left = self.window[0]
        # To compare would tie an exported graph to contexts longer than the window, or shorter.
        is_open = left == UNBOUNDED or torch.compiler.is_exporting()
        return left != UNBOUNDED if is_open else left < self.num_keys - 1

    @property
    def bounds_stop(self) -> bool:
        """True where some query may not see the last key; the only one of a decoding step does."""
        if self.cu_seqlens is not None or self.run_ends is not None:
            return True
        is_last = self.num_queries == 1 and self.stands_at is None
        return (self.is_causal or self.window[1] != UNBOUNDED) and not is_last

    @property
    def is_interval(self) -> bool:
        """True where no padding and no explicit mask punches holes into the interval."""
        return self.key_padding_mask is None and self.mask is None

    @property
    def sees_all(self) -> bool:
        """True where every query is known to see every key."""
        return self.is_interval and not self.bounds_start and not self.bounds_stop

    @property
    def is_plain_causal(self) -> bool:
        """True for the square causal triangle, which every kernel has built in."""
        if not (self.is_interval and self.is_causal) or self.bounds_start:
            return False
        # A branch: under torch.compile the comparison itself is a symbol, which kernels refuse.
        if self.num_queries != self.num_keys or self.stands_at is not None:  # noqa: SIM103 (a branch on purpose)
            return False
        return True

    @property
    def may_hide_all(self) -> bool:
        """True where some query may see no key at all."""
        too_many = self.num_queries > self.num_keys or self.stands_at is not None
        return not self.is_interval or (too_many and self.bounds_stop)

    def num_visible(self) -> Tensor:
        """Count the keys that each query sees, at least 1: n."""
        return self.count().clamp_min(1) if self.may_hide_all or not self.num_keys else self.count()

    def ramp(self) -> Ramp | None:
        """Describe n by two numbers where position and window alone decide it; None elsewhere."""
        if not self.num_queries or not self.num_keys:
            return None
        if self.sees_all:
            return Ramp(self.num_keys, self.num_keys)
        bounds = (self.cu_seqlens, self.positions, self.stands_at)
        first = self.num_keys - self.num_queries + 1
        by_position = self.is_interval and self.is_causal and all(x is None for x in bounds)
        if not by_position or first < 1:
            return None
        left = self.window[0]
        return Ramp(first, self.num_keys if left == UNBOUNDED else min(left + 1, self.num_keys))

    def count(self) -> Tensor:
        """Count without the floor of 1: (T,), (B, T), or (B | 1, H | 1, T) under a mask."""
        if self.mask is not None:
            return self._count_mask(self.mask)
        if self.key_padding_mask is None and not self.bounds_start:
            # The plain cases need no ends: counting costs one operation.
            if not self.bounds_stop:
                return torch.full((self.num_queries,), self.num_keys, device=self.device)
            if self.is_causal and self.num_queries <= self.num_keys and self.stands_at is None:
                first = self.num_keys - self.num_queries + 1
                return torch.arange(first, self.num_keys + 1, device=self.device)
        start, stop = self.ends()
        if self.key_padding_mask is None:
            return (stop - start).clamp_min(0)
        seen_before = torch.nn.functional.pad(
            self.key_padding_mask.to(torch.int64).cumsum(-1), (1, 0)
        )
        batch = self.key_padding_mask.shape[0]
        start, stop = (end.expand(batch, -1) for end in (start, torch.maximum(start, stop)))
        return seen_before.gather(-1, stop) - seen_before.gather(-1, start)

    def _count_mask(self, mask: Tensor) -> Tensor:
        """Count under an explicit mask: at once, or in blocks of queries that stay small."""
        if self.key_padding_mask is None and not self.bounds_start and not self.bounds_stop:
            n = mask.expand(*mask.shape[:-1], self.num_keys).sum(-1)
            return n.expand(*n.shape[:2], self.num_queries)
        counts = [self.visible_mask(rows).sum(-1) for rows in row_blocks(self.num_queries)]
        return torch.cat(counts, dim=-1)

    def visible_mask(self, rows: Span | None = None, keys: Span | None = None) -> Tensor:
        """Make the boolean mask of these queries and keys, broadcastable to (B, H, rows, keys)."""
        rows, keys = rows or (0, self.num_queries), keys or (0, self.num_keys)
        start, stop = (end[..., rows[0] : rows[1]].unsqueeze(-1) for end in self.ends())
        key = torch.arange(keys[0], keys[1], device=self.device)
        visible = (start <= key) & (key < stop)
        visible = visible.unsqueeze(-3) if visible.dim() == 3 else visible[None, None]
        if self.key_padding_mask is not None:
            visible = visible & self.key_padding_mask[:, None, None, keys[0] : keys[1]]
        if self.mask is not None:
            visible = visible & _rows_and_keys(self.mask, rows, keys)
        return visible

    def at(self, rows: Tensor) -> "MaskSpec":
        """Choose some of the queries."""
        mask, bias = (
            part if part is None or part.shape[-2] == 1 else part[..., rows, :]
            for part in (self.mask, self.bias)
        )
        stands_at, positions, run_ends = (
            part if part is None else part[..., rows]
            for part in (self.index(), self.positions, self.run_ends)
        )
        return replace(
            self, num_queries=rows.numel(), stands_at=stands_at, positions=positions,
            run_ends=run_ends, mask=mask, bias=bias,
        )  # fmt: skip

    def bias_block(self, rows: Span, keys: Span) -> Tensor | None:
        """Cut out what an additive mask adds to these queries and keys."""
        return None if self.bias is None else _rows_and_keys(self.bias, rows, keys)

    def key_span(self, rows: Span) -> Span:
        """Bound the keys that these queries can see, as far as no tensor has to be read for it."""
        if torch.compiler.is_exporting():
            # A span that starts with the window would tie the graph to contexts longer than it.
            return 0, self.num_keys
        offset = self.num_keys - self.num_queries
        first, last = offset + rows[0], offset + rows[1] - 1
        left, right = self.window
        start = max(0, first - left) if left != UNBOUNDED else 0
        stop = self.num_keys
        if self.is_causal:
            stop = min(stop, last + 1)
        if right != UNBOUNDED:
            stop = min(stop, last + right + 1)
        # A block of queries before the first key sees nothing; it still needs a key to be fed.
        return start, max(stop, start + 1)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Find the first and one past the last key of each query's interval, (T,) or (B, T)."""
        index = self.index()
        left, right = self.window
        start, stop = torch.zeros_like(index), torch.full_like(index, self.num_keys)
        if left != UNBOUNDED:
            start = torch.maximum(start, index - left)
        if self.is_causal:
            stop = torch.minimum(stop, index + 1)
        if right != UNBOUNDED:
            stop = torch.minimum(stop, index + right + 1)
        if self.cu_seqlens is not None:
            first, last = self.documents()
            start, stop = torch.maximum(start, first), torch.minimum(stop, last)
        if self.positions is not None:
            start = torch.maximum(start, index - self.positions)
        if self.run_ends is not None:
            stop = torch.minimum(stop, self.run_ends)
        return start.clamp(0, self.num_keys), stop.clamp(0, self.num_keys)

    def documents(self) -> tuple[Tensor, Tensor]:
        """Find the first and one past the last key of the packed document around each query."""
        assert self.cu_seqlens is not None
        document = torch.searchsorted(self.cu_seqlens[1:].contiguous(), self.index(), right=True)
        return self.cu_seqlens[document], self.cu_seqlens[document + 1]

    def index(self) -> Tensor:
        """Find the key at which each query stands."""
        if self.stands_at is not None:
            return self.stands_at
        return torch.arange(self.num_keys - self.num_queries, self.num_keys, device=self.device)


def row_blocks(num_queries: int, rows_per_block: int = ROWS_PER_BLOCK) -> Iterator[Span]:
    """Split queries into blocks, so that a mask over one stays small; at least one block.

    torch.compile gets them all at once: a graph for every number of blocks would be worse.
    """
    if torch.compiler.is_compiling() or num_queries <= rows_per_block:
        yield 0, num_queries
        return
    for start in range(0, num_queries, rows_per_block):
        yield start, min(start + rows_per_block, num_queries)


def mask_spec(
    num_queries: int,
    num_keys: int,
    *,
    is_causal: bool,
    window: Window = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    positions: Tensor | None = None,
    attn_mask: Tensor | None = None,
    batch: int | None = None,
    num_heads: int | None = None,
    device: torch.device | str | None = None,
) -> MaskSpec:
    """Check a description of what is visible and make a mask spec of it.

    `batch` and `num_heads`, where known, are what the tensors must fit. `max_seqlen` promises that
    no packed document is longer: a kernel then leaves out what it would only find empty.
    """
    _check_sizes(num_queries, num_keys)
    device = _check_tensors(
        device,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        positions=positions,
        attn_mask=attn_mask,
    )
    left, right = window_pair(window)
    if attn_mask is not None:
        _check_mask(attn_mask, is_causal, num_queries, num_keys, batch, num_heads)
    if key_padding_mask is not None:
        _check_keep(key_padding_mask, num_keys, batch)
        batch = key_padding_mask.shape[0]
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, num_queries, num_keys, max_seqlen)
    if positions is not None:
        _check_positions(positions, is_causal, num_queries, num_keys, batch)
        _check_order(positions, is_causal, num_keys, key_padding_mask)
        positions = positions.to(torch.int64)

    mask, bias = _mask_and_bias(attn_mask)
    return MaskSpec(
        num_queries=num_queries,
        num_keys=num_keys,
        is_causal=is_causal,
        window=(left, right),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64),
        max_seqlen=max_seqlen,
        positions=positions,
        run_ends=None if positions is None or is_causal else _end_of_run(positions),
        key_padding_mask=key_padding_mask,
        mask=mask,
        bias=bias,
        device=device,
    )


def num_visible_keys(mask: Tensor, dim: int = -1) -> Tensor:
    """Count n along dim of a mask: integers, at least 1.

    True is visible; an additive mask hides by -5e3 or any lower number.
    """
    check_tensor("mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UsageError(
            "mask must be boolean (True is visible) or floating (-inf is hidden), "
            f"got {mask.dtype}; "
            "write mask.bool() if 1 means visible"
        )
    _check_additive("mask", mask)
    return is_visible(mask).sum(dim).clamp_min(1)


def is_visible(mask: Tensor) -> Tensor:
    """Turn a boolean or additive mask into booleans, True where a key is visible."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    is_causal: bool,
    window: Window = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    positions: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Count n for every query: (T,), or (B, T) with padding or positions by row; at least 1.

    With fewer queries than keys the queries are the last ones (cached decoding). `window` W is the
    query itself and the W - 1 keys before it; a pair (left, right) is FlashAttention's.
    `cu_seqlens` are the bounds of packed documents, from 0 to the number of keys. `positions` count
    each query from the start of its document. `key_padding_mask` (B, S) is True for tokens.
    `device` is where n is made: that of the tensors, or the CPU where there are none.
    """
    return mask_spec(
        num_queries,
        num_keys,
        is_causal=is_causal,
        window=window,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        positions=positions,
        device=device,
    ).num_visible()


def can_read_without_sync(tensor: Tensor) -> bool:
    """True where looking at the values costs no wait for a device and no graph break."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        # a tensor of vmap or func.grad; torch has no public question for it
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        and not is_tracing()
    )


def is_eager(tensor: Tensor) -> bool:
    """True for a plain tensor that nothing traces, transforms or stands in for."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        # Fake tensors and make_fx are modes; torch.jit.trace is none.
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not is_transformed()
    )


def is_transformed() -> bool:
    """True inside vmap, jvp and forward-mode AD, which have no rule for `out=`."""
    # torch has no public questions for these
    is_in_functorch = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return is_in_functorch or forward_ad._current_level >= 0


def is_tracing() -> bool:
    """True while torch.jit.trace or make_fx traces: what is read now would become a constant."""
    if torch._C._get_tracing_state() is not None:
        return True
    # Not imported here: it takes 0.3 s, and no trace is under way before it is there.
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and tracing.get_proxy_mode() is not None


def _rows_and_keys(mask: Tensor, rows: Span, keys: Span) -> Tensor:
    """Cut a block out of a mask whose last two dimensions may be 1."""
    mask = mask if mask.shape[-2] == 1 else mask[..., rows[0] : rows[1], :]
    return mask if mask.shape[-1] == 1 else mask[..., keys[0] : keys[1]]


def _mask_and_bias(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split an explicit mask into what it shows and what it adds, both 4-D."""
    if attn_mask is None:
        return None, None
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if mask.dtype == torch.bool:
        return mask, None
    visible = is_visible(mask)
    return visible, mask.masked_fill(~visible, -torch.inf)


def _end_of_run(positions: Tensor) -> Tensor:
    """Find one past the last key of the document around each key; positions rise by 1 in one."""
    length = positions.shape[-1]
    if length == 0:
        return positions
    restarts = positions[..., 1:] != positions[..., :-1] + 1
    # The last key ends its document too. Not F.pad with the length: a graph for every length.
    is_last = torch.cat((restarts, torch.ones_like(positions[..., :1], dtype=torch.bool)), dim=-1)
    end = torch.where(is_last, torch.arange(1, length + 1, device=positions.device), length)
    return end.flip(-1).cummin(-1).values.flip(-1)


def _check_tensors(device: torch.device | str | None, **tensors: Tensor | None) -> torch.device:
    """Find the device of the tensors; raise on what is none, and on two devices."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_tensor(name, tensor)
        device = tensor.device if device is None else torch.device(device)
        if tensor.device.type != device.type:
            raise UsageError(f"{name} must be on {device}, got {tensor.device}; write .to(...)")
    return torch.device("cpu" if device is None else device)


def _check_sizes(num_queries: int, num_keys: int) -> None:
    for name, size in (("num_queries", num_queries), ("num_keys", num_keys)):
        if isinstance(size, float | Tensor) or size < 0:
            raise UsageError(f"{name} must be a whole number, at least 0, got {size!r}")


def _check_mask(
    mask: Tensor,
    is_causal: bool,
    num_queries: int,
    num_keys: int,
    batch: int | None,
    num_heads: int | None,
) -> None:
    if is_causal:
        raise UsageError(
            "is_causal goes with key_padding_mask, positions, window and cu_seqlens, not with "
            "attn_mask; put causality into the mask, or pass the padding as key_padding_mask"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UsageError(
            "attn_mask must be boolean (True is visible) or floating (added to the logits, -inf is "
            f"hidden), got {mask.dtype}; write attn_mask.bool() if 1 means visible"
        )
    _check_additive("attn_mask", mask)
    fits = mask.dim() in (2, 3, 4) and all(
        size in (1, wanted)
        for size, wanted in zip(mask.shape[-2:], (num_queries, num_keys), strict=True)
    )
    if not fits:
        raise UsageError(
            f"attn_mask must have 2 to 4 dimensions and broadcast to (batch, heads, {num_queries} "
            f"queries, {num_keys} keys), got {tuple(mask.shape)}"
        )
    leading = zip(mask.shape[:-2][::-1], (num_heads, batch), strict=False)
    if any(wanted is not None and size not in (1, wanted) for size, wanted in leading):
        raise UsageError(
            f"attn_mask must broadcast to (batch, heads, queries, keys) with batch {batch} and "
            f"{num_heads} heads, got {tuple(mask.shape)}"
        )


def _check_additive(name: str, mask: Tensor) -> None:
    """Raise on NaN and +inf, which would make every weight of a row NaN."""
    if mask.dtype == torch.bool or not mask.numel() or not can_read_without_sync(mask):
        return
    # The maximum of anything and NaN is NaN.
    if not mask.detach().amax() < torch.inf:
        raise UsageError(
            f"{name} must hold finite numbers or -inf, got NaN or +inf; 0 shows a key, -inf hides "
            "it"
        )


def _check_keep(keep: Tensor, num_keys: int, batch: int | None) -> None:
    if keep.dtype != torch.bool:
        raise UsageError(
            f"key_padding_mask must be boolean, True for tokens and False for padding, "
            f"got {keep.dtype}; write mask.bool()"
        )
    if keep.dim() != 2 or keep.shape[-1] != num_keys:
        raise UsageError(
            f"key_padding_mask must be (batch, {num_keys} keys), got {tuple(keep.shape)}; "
            "with a cache it covers the cached keys too"
        )
    if batch is not None and keep.shape[0] != batch:
        raise UsageError(
            f"key_padding_mask must have a row for each of the {batch} rows of the batch, "
            f"got {keep.shape[0]}"
        )


def _check_cu_seqlens(
    cu_seqlens: Tensor, num_queries: int, num_keys: int, max_seqlen: int | None
) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}; write .int()")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise UsageError(
            "cu_seqlens must be 1-D, the start of every document and the end of the last: "
            f"[0, ..., {num_keys}], got shape {tuple(cu_seqlens.shape)}"
        )
    if num_queries > num_keys:
        raise UsageError(
            "cu_seqlens bound the documents of a row of keys, of which the queries are the last: "
            f"got {num_queries} queries for {num_keys} keys"
        )
    if not can_read_without_sync(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise UsageError(
            f"cu_seqlens must start at 0, got {bounds}; they are bounds, not lengths: "
            "[0, *lengths.cumsum(0)]"
        )
    if bounds[-1] != num_keys:
        raise UsageError(
            f"cu_seqlens must end at the number of keys of a row, {num_keys}, got {bounds[-1]}: "
            "padding at the end is a document of its own; all rows share the bounds, and rows that "
            "are packed differently go by positions"
        )
    if any(later < earlier for earlier, later in itertools.pairwise(bounds)):
        raise UsageError(f"cu_seqlens must never fall, got {bounds}; they are bounds, not lengths")
    longest = max(later - earlier for earlier, later in itertools.pairwise(bounds))
    if max_seqlen is not None and longest > max_seqlen:
        raise UsageError(
            f"max_seqlen must be at least the longest document, {longest}, got {max_seqlen}"
        )


def _check_positions(
    positions: Tensor, is_causal: bool, num_queries: int, num_keys: int, batch: int | None
) -> None:
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise UsageError(
            "positions must be integers, counted from the start of every document, got "
            f"{positions.dtype}; write .long(), and {ROTARY_HINT}"
        )
    if positions.dim() not in (1, 2) or positions.shape[-1] != num_queries:
        raise UsageError(
            f"positions must be (queries,) or (batch, queries) with {num_queries} queries, "
            f"got {tuple(positions.shape)}"
        )
    if positions.dim() == 2 and batch is not None and positions.shape[0] not in (1, batch):
        raise UsageError(
            f"positions must be (queries,) or have a row for each of the {batch} rows of the "
            f"batch, got {positions.shape[0]}"
        )
    if not is_causal and num_queries != num_keys:
        raise UsageError(
            "positions without is_causal must cover every key, to show where a document ends: "
            f"got {num_queries} queries for {num_keys} keys; pass cu_seqlens or attn_mask instead"
        )
    if can_read_without_sync(positions) and (positions < 0).any():
        raise UsageError(
            f"positions must be at least 0, got {int(positions.min())}; count from the start of "
            "each document and give the padding any position that is not negative"
        )


def _check_order(
    positions: Tensor, is_causal: bool, num_keys: int, key_padding_mask: Tensor | None
) -> None:
    """Raise where positions do not say where a document starts, as far as they can be read.

    In the first document causal queries may leave positions out, as a cache does that has dropped
    keys: it starts with the row. Padding is free.
    """
    num_queries = positions.shape[-1]
    if not can_read_without_sync(positions) or num_queries < 2:
        return
    before, after = positions[..., :-1], positions[..., 1:]
    continues = after == before + 1
    if is_causal:
        starts = before == 0
        starts[..., 0] &= num_queries < num_keys
        continues |= (after > before) & (starts.cumsum(-1) == 0)
    is_wrong = ~continues & (after != 0)
    if key_padding_mask is not None and can_read_without_sync(key_padding_mask):
        # Those of the queries, the last keys; queries before the first key see nothing either.
        is_token = torch.nn.functional.pad(key_padding_mask, (num_queries - num_keys, 0))
        is_wrong = is_wrong & is_token[:, :-1] & is_token[:, 1:]
    if is_wrong.any():
        first = tuple(is_wrong.nonzero()[0].tolist())
        here, last = (int(part.expand(is_wrong.shape)[first]) for part in (after, before))
        raise UsageError(
            "positions must rise by 1 inside a document and begin the next one at 0, "
            f"got {here} after {last}; {ROTARY_HINT}"
        )
