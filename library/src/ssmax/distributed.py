"""Context parallelism: attention over a sequence whose tokens are split over ranks, in any order.

n of a query is what it sees of the whole sequence, never of its rank's share. Keys and values are
gathered once for every layer; their gradients are summed and scattered back.
"""

# B batch, H query heads, G key heads, T tokens of this rank, S of the sequence, D head_dim, N ranks

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssmax.errors import UsageError
from ssmax.ops.attention import ssmax_attention
from ssmax.ops.backends import Backend
from ssmax.ops.dtypes import check_tensor
from ssmax.ops.scale import Number
from ssmax.ops.visible import Span
from ssmax.ops.window import UNBOUNDED, Window, window_pair

MOST_RUNS = 16
"""Of neighbouring tokens on a rank, each a call of a causal kernel; shares that are cut up further
attend through masks."""
ROWS_PER_MASK = 1024


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Number,
    *,
    positions: Tensor,
    documents: Tensor | None = None,
    group: "dist.ProcessGroup | None" = None,
    bias: Number | None = None,
    window: Window = None,
    scale: float | None = None,
) -> Tensor:
    """Attend causally from this rank's tokens to the whole sequence: its share of the one output.

    q is (B, H, T, D), k and v (B, G, T, D): any tokens of the sequence, in any order; ranks may
    hold unequal numbers. `positions`, (T,) or (B, T), count each token from the start of its
    document, and `documents` name the document, which is needed where positions repeat and the
    ranks of `group` do not hold the sequence in its order. s, bias and window are those of
    `ssmax_attention`; s and bias get the gradient of this rank's queries, to be summed with that of
    every other parameter. In a model make a `SequenceShard` once for all layers.
    """
    shard = SequenceShard(positions, documents=documents, group=group)
    return shard.attention(q, k, v, s, bias=bias, window=window, scale=scale)


def zigzag(length: int, size: int, rank: int) -> Tensor:
    """Choose a rank's tokens so that causal work is even: chunks r and 2N - 1 - r of 2N."""
    if not 0 <= rank < size or length < 2 * size:
        raise UsageError(
            f"zigzag needs a rank below {size} and at least {2 * size} tokens, two for each rank, "
            f"got rank {rank} and {length} tokens"
        )
    chunks = torch.arange(length).tensor_split(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


class SequenceShard:
    """The tokens of a sequence that this rank holds, among all that its group holds.

    All ranks make it together, once a step: it reads the positions, so a GPU is waited for.
    Arguments are those of `context_parallel_attention`.
    """

    def __init__(
        self,
        positions: Tensor,
        *,
        documents: Tensor | None = None,
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        check_tensor("positions", positions)
        if positions.dim() not in (1, 2) or positions.is_floating_point() or not positions.numel():
            raise UsageError(
                "positions must be integers, (tokens,) or (batch, tokens), at least one token on "
                f"every rank, got {positions.dtype} of shape {tuple(positions.shape)}"
            )
        if documents is not None and documents.shape != positions.shape:
            raise UsageError(
                f"documents must name one for each position, {tuple(positions.shape)}, got "
                f"{tuple(documents.shape)}"
            )
        self.group = group
        # Left out of graphs, since what it calls depends on the values of positions. Said here, not
        # where it is defined: it needs torch's compiler, which takes seconds to import.
        self._uncompiled: Any = torch.compiler.disable(SequenceShard._attention)
        is_split = dist.is_available() and dist.is_initialized()
        self.size: int = dist.get_world_size(group) if is_split else 1
        self.rank: int = dist.get_rank(group) if is_split else 0
        self.positions = positions
        here = positions if documents is None else torch.stack((positions, documents))
        here = here.reshape(-1, positions.shape[-1]).to(torch.int64)
        sizes = self._gathered(here.new_tensor([[here.shape[1], here.shape[0]]]))
        self.sizes: list[int] = sizes[:, 0].tolist()
        if len(set(sizes[:, 1].tolist())) > 1:
            raise UsageError("ranks must agree in their rows of positions and in giving documents")
        self.most: int = max(self.sizes)
        everyone = self._gathered(self._padded(here.t())).cpu().unflatten(0, (self.size, -1))
        held = torch.cat(
            [part[:number] for part, number in zip(everyone, self.sizes, strict=True)]
        ).t()
        has_documents = documents is not None
        rows = held.unflatten(0, (1 + has_documents, -1)).unbind(1)
        layouts = [_layout(row[0], row[1] if has_documents else None) for row in rows]
        if all(torch.equal(row, rows[0]) for row in rows):
            layouts = layouts[:1]
        first = sum(self.sizes[: self.rank])
        last = first + self.sizes[self.rank]
        gathered = torch.cat(
            [torch.arange(n) + rank * self.most for rank, n in enumerate(self.sizes)]
        )
        device = positions.device
        self._rows = [
            _Row.of(order, starts, slice(first, last), gathered, self.most * self.size, device)
            for order, starts in layouts
        ]

    def num_keys(self, window: Window = None) -> Tensor:
        """Count n of this rank's queries: (T,), or (B, T) where rows differ."""
        left, _ = window_pair(window)
        counts = [row.num_keys for row in self._rows]
        counts = counts[0] if len(counts) == 1 else torch.stack(counts)
        return counts if left == UNBOUNDED else counts.clamp_max(left + 1)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        s: Number,
        *,
        bias: Number | None = None,
        window: Window = None,
        scale: float | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """Compute `context_parallel_attention`."""
        self._check(q, k, v)
        attend = functools.partial(
            ssmax_attention, s=s, bias=bias, scale=scale, backend=backend,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        left, _ = window_pair(window)
        return self._uncompiled(self, attend, q, k, v, left)

    def _attention(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, left: int
    ) -> Tensor:
        # Token by token the gathered tensor is the sequence, and one collective serves both.
        kv_TF = torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in (k, v)], dim=1)
        kv_SF = _AllGather.apply(self._padded(kv_TF), self)
        assert isinstance(kv_SF, Tensor)
        heads, keys = k.shape[:2], k.shape[:2].numel() * k.shape[3]
        k_SF, v_SF = kv_SF.split([keys, kv_SF.shape[1] - keys], dim=1)
        k_SBGD = k_SF.unflatten(1, (*heads, k.shape[3]))
        v_SBGD = v_SF.unflatten(1, (*heads, v.shape[3]))
        if len(self._rows) == 1:
            return self._rows[0].attention(attend, q, k_SBGD, v_SBGD, left)
        rows = [
            row.attention(attend, q[b : b + 1], k_SBGD[:, b : b + 1], v_SBGD[:, b : b + 1], left)
            for b, row in enumerate(self._rows)
        ]
        return torch.cat(rows)

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        tokens, rows = self.sizes[self.rank], len(self._rows)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4 or x.shape[2] != tokens or rows not in (1, x.shape[0]):
                batch = "batch" if rows == 1 else str(rows)
                raise UsageError(
                    f"{name} must be ({batch}, heads, {tokens} tokens, head_dim), as positions "
                    f"are, got {tuple(x.shape)}"
                )

    def _padded(self, x_TF: Tensor) -> Tensor:
        """Add rows up to the largest share: collectives want equal ones."""
        missing = self.most - x_TF.shape[0]
        return torch.nn.functional.pad(x_TF, (0, 0, 0, missing)) if missing else x_TF.contiguous()

    def _gathered(self, x_TF: Tensor) -> Tensor:
        if self.size == 1:
            return x_TF
        out = x_TF.new_empty(self.size * x_TF.shape[0], *x_TF.shape[1:])
        # torch 2.13 renamed it, and the one below.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, x_TF.contiguous(), group=self.group)
        return out

    def _summed(self, x_SF: Tensor) -> Tensor:
        if self.size == 1:
            return x_SF
        out = x_SF.new_empty(x_SF.shape[0] // self.size, *x_SF.shape[1:])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out, x_SF.contiguous(), group=self.group)
        return out


class _AllGather(torch.autograd.Function):
    """All ranks' tokens; the gradient of each comes home summed over the ranks."""

    @staticmethod
    def forward(ctx, x_TF, shard):
        ctx.shard = shard
        return shard._gathered(x_TF)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.shard._summed(gradients[0]), None


class _Take(torch.autograd.Function):
    """Rows by their index; the gradient comes back by index too, where torch would add it up."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,), (back,) = gradients, ctx.saved_tensors
        if len(back) > len(gradient):
            gradient = torch.cat((gradient, torch.zeros_like(gradient[:1])))
        return gradient.index_select(0, back), None, None


def _layout(positions_S: Tensor, documents_S: Tensor | None) -> tuple[Tensor, Tensor]:
    """Order the held tokens by document and position; find where each document starts.

    Both are (S,): which held token comes at a place, and the place where its document starts.
    """
    if documents_S is None:
        documents_S = _documents_in_order(positions_S)
    by_position = positions_S.argsort(stable=True)
    order = by_position[documents_S[by_position].argsort(stable=True)]
    positions, documents = positions_S[order], documents_S[order]
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[1:] = documents[1:] != documents[:-1]
    if ((positions[1:] == positions[:-1]) & ~is_start[1:]).any():
        raise UsageError("positions must differ within a document; some token is held twice")
    place = torch.arange(len(order))
    return order, torch.where(is_start, place, 0).cummax(0).values


def _documents_in_order(positions_S: Tensor) -> Tensor:
    """Number the documents of tokens held in the sequence's order; one if no position repeats."""
    if positions_S.unique().numel() == positions_S.numel():
        return torch.zeros_like(positions_S)
    starts = positions_S == 0
    goes_on = positions_S[1:] == positions_S[:-1] + 1
    if not (starts[1:] | goes_on).all():
        raise UsageError(
            "positions repeat, so there are several documents, and the ranks do not hold them in "
            "the sequence's order; pass documents, the number of each token's document"
        )
    return starts.cumsum(0)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Queries that are neighbours in the sequence, of one document or of whole ones."""

    queries: tuple[int, int]
    """First and one past the last, among this rank's."""
    place: int
    """Of the first query in the sequence."""
    start: int
    """The place where its document starts."""
    cu_seqlens: Tensor | None
    """Bounds of several whole documents."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row of this rank's share."""

    num_keys: Tensor
    """n without a window, (T,)."""
    taken: tuple[Tensor, Tensor] | None
    """Where each token of the sequence lies among the gathered, (S,), and back, padding counted as
    one past the last; None: they are in order."""
    places: Tensor
    """Of this rank's tokens in the sequence, rising, (T,)."""
    starts: Tensor
    """The place where the document of each starts, (T,)."""
    by_place: Tensor | None
    """This rank's tokens in that order, (T,); None: they are in it."""
    runs: list[_Run]
    """Empty where they would be too many: then masks serve."""

    @classmethod
    def of(
        cls,
        order: Tensor,
        starts: Tensor,
        mine: slice,
        gathered: Tensor,
        number_gathered: int,
        device: torch.device,
    ) -> "_Row":
        """Make it of a layout, of which held tokens are this rank's, and where they are gathered.

        The gathered are more than the held where shares are unequal.
        """
        place_of = torch.empty_like(order)
        place_of[order] = torch.arange(len(order))
        own = place_of[mine]
        places, by_place = own.sort()
        source = gathered[order]
        back = torch.full((number_gathered,), len(order))
        back[source] = torch.arange(len(order))
        is_ordered = len(order) == number_gathered and bool((source.diff() == 1).all())
        return cls(
            num_keys=(own - starts[own] + 1).to(device),
            taken=None if is_ordered else (source.to(device), back.to(device)),
            places=places.to(device),
            starts=starts[places].to(device),
            by_place=None if torch.equal(own, places) else by_place.to(device),
            runs=_runs(places, starts[places], device),
        )

    def attention(
        self,
        attend: Callable[..., Tensor],
        q: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        left: int,
    ) -> Tensor:
        """Attend from the queries of this row to all of its keys."""
        if self.taken is not None:
            k_SBGD, v_SBGD = (_Take.apply(x, *self.taken) for x in (k_SBGD, v_SBGD))
        k, v = k_SBGD.permute(1, 2, 0, 3), v_SBGD.permute(1, 2, 0, 3)
        q = q if self.by_place is None else q.index_select(2, self.by_place)
        parts = [
            attend(q[:, :, a:b], k[:, :, start:stop], v[:, :, start:stop], **visible)
            for (a, b), (start, stop), visible in (self._causal if self.runs else self._masked)(
                left
            )
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return out if self.by_place is None else out.index_select(2, self.by_place.argsort())

    def _causal(self, left: int) -> Iterator[tuple[Span, Span, dict[str, Any]]]:
        """Yield the queries and the keys of each run, and what a causal kernel is told of them."""
        window = None if left == UNBOUNDED else left + 1
        for run in self.runs:
            a, b = run.queries
            start = run.start if window is None else max(run.start, run.place - left)
            visible = {"is_causal": True, "window": window, "cu_seqlens": run.cu_seqlens}
            yield run.queries, (start, run.place + b - a), visible

    def _masked(self, left: int) -> Iterator[tuple[Span, Span, dict[str, Any]]]:
        """Yield blocks of queries, each with an explicit mask over the keys up to its last."""
        starts = self.starts if left == UNBOUNDED else self.starts.maximum(self.places - left)
        for a in range(0, len(starts), ROWS_PER_MASK):
            start_T1, place_T1 = (x[a : a + ROWS_PER_MASK, None] for x in (starts, self.places))
            key = torch.arange(int(place_T1[-1]) + 1, device=starts.device)
            mask = (start_T1 <= key) & (key <= place_T1)
            yield (a, a + len(mask)), (0, len(key)), {"attn_mask": mask}


def _runs(places: Tensor, starts: Tensor, device: torch.device) -> list[_Run]:
    """Cut a rank's tokens into runs; none if they would be too many."""
    cuts = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist(), len(places)]
    if len(cuts) - 1 > MOST_RUNS:
        return []
    runs = []
    for a, b in itertools.pairwise(cuts):
        # The first document may have begun on other ranks; those after it are whole as far as
        # causal queries look.
        whole = a + int((starts[a:b] <= places[a]).sum())
        runs.append(
            _Run(queries=(a, whole), place=int(places[a]), start=int(starts[a]), cu_seqlens=None)
        )
        if whole == b:
            continue
        place = int(places[whole])
        bounds = starts[whole:b].unique_consecutive() - place
        bounds = torch.cat((bounds, bounds.new_tensor([b - whole]))).to(device, torch.int32)
        runs.append(
            _Run(
                queries=(whole, b),
                place=place,
                start=place,
                cu_seqlens=bounds if len(bounds) > 2 else None,
            )
        )
    return runs
