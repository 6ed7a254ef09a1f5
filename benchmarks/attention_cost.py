"""What does Scalable-Softmax cost in attention, ours and the ways a user would pick instead?

    python benchmarks/attention_cost.py             # this machine: CUDA if it has it, else the CPU
    python benchmarks/attention_cost.py --quick     # the smallest shape only
    python benchmarks/attention_cost.py --mode decode

Every competitor rotates q and k and attends causally with s and b learnable; the yardstick does the
same without SSMax: compiled RoPE and the fastest softmax attention, cuDNN's. First the output of
each is compared with float64 on sampled queries, and a wrong one of ours stops the run. Then all
are timed in turns, round after round, and the medians are divided by the yardstick's. Rows are
appended to benchmarks/results.csv. PyPI's `scalable-softmax` is measured where it can be imported.
On the CPU nothing is rotated: there the question is ssmax_attention against SDPA, as they are.
Kernels alone, with RoPE fused; what a user pays in wall-clock, host included, is wall_clock.py's.
On the CPU set MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ to 1000000000: page faults of
freed memory would drown a few percent.
"""

# B batch, T queries, S keys, H query heads, G key heads, D head width

import argparse
import functools
import importlib.util
import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssmax import (
    apply_rope,
    initial_s,
    rope_tables,
    ssmax_attention,
    ssmax_factor,
    visible_keys,
)
from ssmax.ops.backends import attend
from ssmax.ops.rope_scale.api import rope_ssmax
from ssmax.ops.visible import mask_spec
from ssmax_lab.records import BenchmarkRow, Provenance, append_csv

RESULTS = Path(__file__).parent / "results.csv"
# On the CPU a turn is one call: repeated, a competitor would have the caches to itself.
ROUNDS = {"cuda": 5, "cpu": 61}
# A decoding step takes microseconds, and the clock drifts by percents: more, shorter turns.
DECODE_ROUNDS = 15
# The compiler picks between kernels that take 1 to 2 us by timing each a few times: what it makes
# of one program differs by percents from one compilation to the next. So it is asked five times.
DECODE_ROUNDS_PER_COMPILATION = 3
YARDSTICK = "softmax (yardstick)"
FLEX = "flex score_mod"
CLOSE = (YARDSTICK, "ours", "q scaled, compiled", "q scaled, eager")
SEED = 0
MODES = ("forward", "forward+backward", "decode")


@dataclass(frozen=True)
class Shape:
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        tokens = f"T{self.queries}" if self.queries == self.keys else f"T1 S{self.keys}"
        return f"B{self.batch} {tokens} H{self.heads}/{self.kv_heads} D{self.head_dim}"


CUDA_SHAPES = [
    Shape(32, 1024, 1024, 12, 12, 64),
    Shape(8, 8192, 8192, 12, 12, 64),
    Shape(4, 4096, 4096, 32, 8, 128),
    Shape(1, 32768, 32768, 32, 8, 128),
]
CUDA_DECODE = [
    Shape(1, 1, keys, heads, kv_heads, head_dim)
    for heads, kv_heads, head_dim in ((12, 12, 64), (32, 8, 128))
    for keys in (1024, 32768, 131072)
]
CPU_SHAPES = [Shape(1, length, length, 12, 12, 64) for length in (1024, 2048, 4096)]


@dataclass(frozen=True)
class Inputs:
    """One attention call. In decoding k and v are the cache and `k_new` is the token's own key."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_new: Tensor
    s: Tensor
    b: Tensor
    cos: Tensor
    sin: Tensor
    n: Tensor
    grad: Tensor

    @property
    def learned(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.s, self.b


def make_inputs(shape: Shape, device: str, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator(device).manual_seed(SEED)

    def heads(number: int, tokens: int) -> Tensor:
        # Laid out as a projection leaves it: (B, T, H, D), seen as (B, H, T, D).
        size = (shape.batch, tokens, number, shape.head_dim)
        x = torch.randn(size, device=device, dtype=dtype, generator=generator)
        return x.transpose(1, 2).requires_grad_()

    q, k, v = (
        heads(shape.heads, shape.queries),
        heads(shape.kv_heads, shape.keys),
        heads(shape.kv_heads, shape.keys),
    )
    positions = torch.arange(shape.keys - shape.queries, shape.keys, device=device)
    cos, sin = rope_tables(positions if device == "cuda" else 0 * positions, shape.head_dim)
    return Inputs(
        q=q,
        k=k,
        v=v,
        k_new=heads(shape.kv_heads, shape.queries) if shape.queries != shape.keys else k,
        # As training starts: the mean factor is 1, so all competitors see logits of one size.
        s=torch.full((shape.heads,), initial_s(shape.keys), device=device).requires_grad_(),
        b=torch.zeros(shape.heads, device=device).requires_grad_(),
        cos=cos,
        sin=sin,
        n=visible_keys(shape.queries, shape.keys, is_causal=True, device=device),
        grad=for_projection(heads(shape.heads, shape.queries)).detach(),
    )


def for_projection(out: Tensor) -> Tensor:
    """(B, T, H D), as the output projection takes it; its gradient comes back laid out like this.

    A copy where the attention left its output as (B, H, T, D) in memory, as in any model.
    """
    return out.transpose(1, 2).flatten(2)


def fastest_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped, is_causal = q.shape[1] != k.shape[1], q.shape[2] > 1
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)
    return for_projection(out)


def rotated(x: Inputs) -> tuple[Tensor, Tensor]:
    return apply_rope(x.q, x.cos, x.sin), apply_rope(x.k_new, x.cos, x.sin)


def keys_of(x: Inputs, k_new: Tensor) -> Tensor:
    """The keys to attend to: in decoding the cache, though the new key is made too.

    Competitors return the new key, so that none leaves it out, but detached: as an output with a
    gradient it would cost each of them a tensor of zeros, and a sum, that no model has.
    """
    return k_new if x.k_new is x.k else x.k


def sdpa_on_cpu(x: Inputs) -> tuple[Tensor, Tensor]:
    out = F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)
    return for_projection(out), x.k


def ours_on_cpu(x: Inputs) -> tuple[Tensor, Tensor]:
    out = ssmax_attention(x.q, x.k, x.v, x.s, bias=x.b, is_causal=True)
    return for_projection(out), x.k


def yardstick(x: Inputs) -> tuple[Tensor, Tensor]:
    q, k = rotated(x)
    return fastest_softmax(q, keys_of(x, k), x.v), k.detach()


def ours(x: Inputs) -> tuple[Tensor, Tensor]:
    q, k = rope_ssmax(x.q, x.k_new, x.cos, x.sin, x.n, x.s, x.b)
    spec = mask_spec(q.shape[2], x.v.shape[2], is_causal=True, device=q.device)
    return for_projection(attend(q, keys_of(x, k), x.v, spec)), k.detach()


def scaled_query(rotate: Callable[[Inputs], tuple[Tensor, Tensor]], x: Inputs):
    q, k = rotate(x)
    q = (q * ssmax_factor(x.n, x.s, x.b).unsqueeze(-1)).to(q.dtype)
    return fastest_softmax(q, keys_of(x, k), x.v), k.detach()


def flex_score_mod(x: Inputs, *, block_mask, from_table: bool) -> tuple[Tensor, Tensor]:
    """The factor from s and b of the head, as one would write it; or from a table made before."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k = rotated(x)
    table = ssmax_factor(x.n, x.s, x.b)

    def scaled(score, b, h, i, j):
        return score * (table[h, i] if from_table else x.s[h] * (i + 1).float().log() + x.b[h])

    grouped = q.shape[1] != k.shape[1]
    keys = keys_of(x, k)
    out = flex_attention(q, keys, x.v, score_mod=scaled, block_mask=block_mask, enable_gqa=grouped)
    return for_projection(out), k.detach()


def explicit_logits(softmax: Callable[[Tensor], Tensor] | None, x: Inputs):
    q, k_new = rotated(x)
    group = x.q.shape[1] // x.k.shape[1]
    k, v = (y.repeat_interleave(group, dim=1) for y in (keys_of(x, k_new), x.v))
    z = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if softmax is None:
        z = z * ssmax_factor(x.n, x.s, x.b).unsqueeze(-1)
    if z.shape[-2] > 1:
        hidden = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(1)
        z = z.masked_fill(hidden, -torch.inf)
    weights = z.softmax(-1) if softmax is None else softmax(z)
    return for_projection(weights.to(v.dtype) @ v), k_new.detach()


def competitors(x: Inputs) -> dict[str, Callable[[Inputs], tuple[Tensor, Tensor]]]:
    """Name to function; fresh graphs for every shape, so that none runs one made for another."""
    if not x.q.is_cuda:
        every: dict[str, Callable] = {YARDSTICK: sdpa_on_cpu, "ours": ours_on_cpu}
        return every | {"explicit logits": functools.partial(explicit_logits, None)}
    torch.compiler.reset()
    compiled = functools.partial(torch.compile, dynamic=False)
    every = {
        YARDSTICK: compiled(yardstick),
        "ours": compiled(ours),
        "q scaled, compiled": compiled(functools.partial(scaled_query, rotated)),
        "q scaled, eager": functools.partial(scaled_query, compiled(rotated)),
        "explicit logits": functools.partial(explicit_logits, None),
    }
    if x.q.shape[2] > 1:
        from torch.nn.attention.flex_attention import create_block_mask

        block_mask = create_block_mask(
            lambda b, h, i, j: j <= i, None, None, x.q.shape[2], x.k.shape[2], device="cuda"
        )
        for name, from_table in ((FLEX, False), (f"{FLEX}, table", True)):
            options = {"block_mask": block_mask, "from_table": from_table}
            every[name] = compiled(functools.partial(flex_score_mod, **options))
    if importlib.util.find_spec("scalable_softmax") is not None:
        from scalable_softmax import ScalableSoftmax

        # One s per module, so one module for each head would be needed; one for all is kinder.
        peer = ScalableSoftmax(s=x.s[0].item(), bias=True).to(x.q.device)
        every["PyPI scalable-softmax"] = functools.partial(explicit_logits, peer)
    return every


def is_hopeless(name: str, shape: Shape, mode: str) -> bool:
    """Every element of the backward pass adds to one of a few s: seconds for one call."""
    return name == FLEX and mode == "forward+backward" and shape.queries > 1024


def error_on_sampled_queries(out: Tensor, x: Inputs, *, softmax: bool) -> float:
    """Largest deviation from float64 over a few queries of the first row, relative."""
    tokens = x.q.shape[2]
    rows = torch.tensor(sorted({0, 1, tokens // 3, tokens // 2, tokens - 1} & set(range(tokens))))
    rows = rows.to(x.q.device)
    with torch.no_grad():
        tables = (x.cos[rows].double(), x.sin[rows].double())
        q = apply_rope(x.q[:1, :, rows].double(), *tables)
        k = x.k[:1].double()
        if x.k_new is x.k:
            k = apply_rope(k, x.cos.double(), x.sin.double())
        if not softmax:
            q = q * ssmax_factor(x.n[rows], x.s.double(), x.b.double()).unsqueeze(-1)
        group = q.shape[1] // k.shape[1]
        z = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = torch.arange(k.shape[2], device=q.device) < x.n[rows].unsqueeze(-1)
        weights = z.masked_fill(~seen, -torch.inf).softmax(-1)
        exact = weights @ x.v[:1].double().repeat_interleave(group, 1)
        error = (out[:1, rows].double() - for_projection(exact)).abs().max()
        return (error / exact.abs().max()).item()


def forward(function: Callable, x: Inputs) -> None:
    with torch.no_grad():
        function(x)


def forward_backward(function: Callable, x: Inputs) -> None:
    out, _ = function(x)
    torch.autograd.grad(out, x.learned, x.grad, allow_unused=True)


def milliseconds(
    run: Callable[[], None], *, on_gpu: bool, as_graph: bool, turn_ms: int = 30
) -> float:
    """Median of one turn, on the GPU of a CUDA graph: the time of the kernels.

    Launching from the host takes longer than the smallest shapes run; a training step hides that
    behind its other work and a decoder captures it, so it is left out for everyone who is close.
    """
    if not on_gpu:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    import triton.testing

    if as_graph:
        return triton.testing.do_bench_cudagraph(run, rep=turn_ms, return_mode="median")
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    return once * 1e3 if once > 0.2 else triton.testing.do_bench(run, 10, 60, return_mode="median")


def peak_mib(run: Callable[[], None], *, on_gpu: bool) -> float:
    if not on_gpu:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def measure(shape: Shape, mode: str, device: str, provenance: Provenance) -> list[BenchmarkRow]:
    """Gate, memory, then rounds in turns."""
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    x = make_inputs(shape, device, dtype)
    step = forward_backward if mode == "forward+backward" else forward
    runs, errors, peaks = {}, {}, {}
    for name, function in competitors(x).items():
        if is_hopeless(name, shape, mode):
            print(
                f"{shape!s:24} {mode:17} {name:24} left out: it would take seconds a call",
                flush=True,
            )
            continue
        run = functools.partial(step, function, x)
        try:
            with torch.no_grad():
                out, _ = function(x)
            errors[name] = error_on_sampled_queries(out, x, softmax=name == YARDSTICK)
            del out
            run()
            peaks[name] = peak_mib(run, on_gpu=on_gpu)
            runs[name] = run
        except torch.OutOfMemoryError:
            print(f"{shape!s:24} {mode:17} {name:24} out of memory", flush=True)
            torch.cuda.empty_cache()
    tolerance = 2e-2 if on_gpu else 1e-4
    if not errors["ours"] < tolerance:
        raise SystemExit(f"ours is wrong at {shape}: error {errors['ours']:.1e}; nothing was timed")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(DECODE_ROUNDS if mode == "decode" else ROUNDS[device]):
        if mode == "decode" and turn and turn % DECODE_ROUNDS_PER_COMPILATION == 0:
            runs |= {
                name: functools.partial(step, function, x)
                for name, function in competitors(x).items()
                if name in CLOSE
            }
        # Each follows another in every turn: what ran before leaves the chip warmer or cooler.
        for name in random.Random(turn).sample(list(runs), len(runs)):
            # The slow ones are slower by factors, not by percents: one turn tells enough.
            if turn and times[name][0] > 3 * times[YARDSTICK][0]:
                continue
            as_graph = name in CLOSE or mode == "decode"
            turn_ms = 10 if mode == "decode" else 30
            times[name].append(
                milliseconds(runs[name], on_gpu=on_gpu, as_graph=as_graph, turn_ms=turn_ms)
            )
    base = statistics.median(times[YARDSTICK])
    base_peak = peaks[YARDSTICK]
    rows = []
    for name, taken in times.items():
        median = statistics.median(taken)
        row = BenchmarkRow(
            benchmark="attention_cost",
            competitor=name,
            shape=str(shape),
            mode=mode,
            milliseconds=round(median, 5),
            ratio=round(median / base, 4),
            peak_mib=round(peaks[name], 1),
            memory_ratio=round(peaks[name] / base_peak, 4) if base_peak else 0.0,
            error=float(f"{errors[name]:.2e}"),
            provenance=provenance,
        )
        rows.append(row)
        print(
            f"{shape!s:24} {mode:17} {name:24} {row.milliseconds:10.4f} ms  x {row.ratio:7.3f}  "
            f"memory x {row.memory_ratio:5.3f}  error {row.error:.0e}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest shape only")
    parser.add_argument("--mode", choices=MODES, help="only this; by default all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    torch.compiler.config.force_disable_caches = True
    shapes = CUDA_SHAPES if device == "cuda" else CPU_SHAPES
    plan = [(shape, mode) for shape in shapes for mode in MODES[:2]]
    plan += [(shape, "decode") for shape in CUDA_DECODE] if device == "cuda" else []
    plan = [(shape, mode) for shape, mode in plan if arguments.mode in (None, mode)]
    provenance = Provenance.here(
        config={"plan": plan, "rounds": (ROUNDS[device], DECODE_ROUNDS)}, device=name, seed=SEED
    )
    for shape, mode in plan[:1] if arguments.quick else plan:
        append_csv(arguments.out, measure(shape, mode, device, provenance))


def _cpu_name() -> str:
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
