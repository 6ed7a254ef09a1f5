"""What one rank of a split sequence computes, and how attention grows up to a million tokens.

    python benchmarks/context_parallel.py share      # one GPU, half a minute
    python benchmarks/context_parallel.py growth     # one GPU, a minute

`share` times one rank's part of attention over 32 k and 128 k tokens, forward and backward, in one
process: keys and values lie gathered, nothing is communicated. `growth` times whole attention from
4 k to 1 M tokens. Both put ours beside the same kernels without SSMax; a share is first compared
with those rows of the whole.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness import DEVICE, in_turns, milliseconds, parser, peak_mib, record, reset_peak
from ssmax import initial_s, ssmax_attention
from ssmax.distributed import SequenceShard, zigzag
from ssmax.ops.backends import attend
from ssmax.ops.backends.sdpa import FASTEST_FIRST
from ssmax.ops.visible import mask_spec

SOFTMAX, OURS = "softmax (yardstick)", "ours"
SHARES = [(32_768, 8), (131_072, 8), (131_072, 64)]
HEADS = [(12, 12, 64), (32, 8, 128)]
LENGTHS = [4096, 16_384, 65_536, 262_144, 1_048_576]
GROWTH_HEADS = (2, 2, 128)


class AloneShard(SequenceShard):
    """One rank of several, the others of which only seem to be there."""

    def __init__(self, length: int, size: int, rank: int) -> None:
        self.shares = [zigzag(length, size, each).to(DEVICE) for each in range(size)]
        self._known: Tensor | None = None
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            super().__init__(self.shares[rank])
        finally:
            dist.destroy_process_group()

    def _gathered(self, x_TF: Tensor) -> Tensor:
        if x_TF.shape == (1, 2):
            return x_TF.expand(self.size, -1)
        if not x_TF.is_floating_point():
            return torch.cat(self.shares)[:, None]
        assert self._known is not None
        return self._known.view_as(self._known)

    def know(self, k_BGSD: Tensor, v_BGSD: Tensor) -> None:
        """Take the keys and values of the sequence for what would be gathered."""
        held = torch.cat(self.shares)
        parts = [x[:, :, held].permute(2, 0, 1, 3).flatten(1) for x in (k_BGSD, v_BGSD)]
        self._known = torch.cat(parts, dim=1)

    def _summed(self, x_SF: Tensor) -> Tensor:
        return x_SF[: x_SF.shape[0] // self.size]


def heads(number: int, tokens: int, width: int) -> Tensor:
    x = torch.randn(1, tokens, number, width, device=DEVICE, dtype=torch.bfloat16)
    return x.transpose(1, 2).requires_grad_()


def forward_backward(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    out = attend(*inputs)
    torch.autograd.grad(out, [x for x in inputs if x.requires_grad], torch.ones_like(out))


def timed(runs: dict[str, Callable[[], None]], rounds: int):
    """Times of each in turns, and the memory that each adds at its peak."""
    peaks = {}
    for key, run in runs.items():
        run()
        reset_peak()
        before = torch.cuda.memory_allocated()
        run()
        peaks[key] = peak_mib() - before / 2**20
    timers = {key: functools.partial(milliseconds, run) for key, run in runs.items()}
    return in_turns(timers, rounds), peaks


def share(keep: Callable[..., None], rounds: int, shrink: int) -> None:
    for length, size in SHARES:
        length //= shrink
        for num_heads, kv_heads, width in HEADS:
            shard = AloneShard(length, size, 0)
            q_S, k_S, v_S = (heads(n, length, width) for n in (num_heads, kv_heads, kv_heads))
            mine = shard.shares[0]
            q, k, v = (x.detach()[:, :, mine].requires_grad_() for x in (q_S, k_S, v_S))
            s = torch.full((num_heads,), initial_s(length), device=DEVICE).requires_grad_()
            with torch.no_grad():
                shard.know(k_S, v_S)
                grouped = num_heads != kv_heads
                whole = ssmax_attention(q_S, k_S, v_S, s, is_causal=True, enable_gqa=grouped)
                exact, out_ = whole[:, :, mine].float(), shard.attention(q, k, v, s).float()
                errors = {OURS: ((out_ - exact).abs().max() / exact.abs().max()).item()}
                del whole, exact, out_
            softmax = functools.partial(softmax_of_share, half=len(mine) // 2)
            constant = functools.partial(shard.attention, s=0.0, bias=1.0)
            runs = {
                SOFTMAX: functools.partial(forward_backward, softmax, (q, k_S, v_S)),
                OURS: functools.partial(forward_backward, shard.attention, (q, k, v, s)),
                "ours, without n": functools.partial(forward_backward, constant, (q, k, v)),
            }
            times, peaks = timed(runs, rounds)
            shape = f"T{length} of {size} ranks H{num_heads}/{kv_heads} D{width}"
            keep("context_parallel", shape, "forward+backward", times, peaks=peaks, errors=errors)


def softmax_of_share(q: Tensor, k: Tensor, v: Tensor, *, half: int) -> Tensor:
    """Attend from the first and the last chunk to the keys up to each, queries as they are."""
    chunks = ((q[:, :, :half], half), (q[:, :, half:], k.shape[2]))
    parts = []
    for queries, keys in chunks:
        spec = mask_spec(half, keys, is_causal=True, device=q.device)
        parts.append(attend(queries, k[:, :, :keys], v[:, :, :keys], spec))
    return torch.cat(parts, dim=2)


def growth(keep: Callable[..., None], rounds: int, shrink: int) -> None:
    num_heads, kv_heads, width = GROWTH_HEADS

    def softmax(q, k, v):
        with sdpa_kernel(FASTEST_FIRST, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    ours = functools.partial(ssmax_attention, is_causal=True)
    for length in (each // shrink for each in LENGTHS):
        q, k, v = (heads(n, length, width) for n in (num_heads, kv_heads, kv_heads))
        s = torch.full((num_heads,), initial_s(length), device=DEVICE).requires_grad_()
        shape = f"B1 T{length} H{num_heads}/{kv_heads} D{width}"
        runs = {
            SOFTMAX: functools.partial(forward_backward, softmax, (q, k, v)),
            OURS: functools.partial(forward_backward, ours, (q, k, v, s)),
        }
        # A turn of the longest is seconds.
        times, peaks = timed(runs, 1 if length * shrink == LENGTHS[-1] else rounds)
        keep("growth of context", shape, "forward+backward", times, peaks=peaks)


def main() -> None:
    arguments = parser(__doc__, quick="lengths divided by 256, which a CPU can try")
    arguments.add_argument("what", choices=["share", "growth"])
    arguments.add_argument("--rounds", type=int, default=7)
    given = arguments.parse_args()
    if DEVICE == "cpu" and not given.quick:
        raise SystemExit("this benchmark needs a GPU; with --quick it runs on a CPU, for a try")

    def keep(benchmark: str, shape: str, mode: str, times, **more) -> None:
        record(given.out, benchmark, shape, mode, times, config={"shape": shape}, **more)

    {"share": share, "growth": growth}[given.what](keep, given.rounds, 256 if given.quick else 1)


if __name__ == "__main__":
    main()
