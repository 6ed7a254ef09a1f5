"""What does a user pay for SSMax? Wall-clock of the op, the layer and a converted model.

    python benchmarks/wall_clock.py                       # all parts, on CUDA or the CPU
    python benchmarks/wall_clock.py --only op --only hf   # some of them
    python benchmarks/wall_clock.py --quick               # the smallest case of each part
    python benchmarks/wall_clock.py --case "both ways" --case "prompt 512"   # cases by their names

Three competitors take turns in one process: softmax (`scaled_dot_product_attention`, cuDNN's kernel
first), the two lines that one would write (`q * factor`, log n made beforehand, then SDPA), and
ours. Times are what a loop of calls takes from the host's first to the device's last, per call;
`kernels` is a CUDA graph of the same call, where the host costs nothing. Ratios are taken turn by
turn against softmax, and their median is shown. First each output is compared with float64, and a
wrong one of ours stops the run. Rows are appended to benchmarks/results.csv.
"""

# B batch, T queries, S keys, H query heads, G key heads, D head_dim, C hidden size

import argparse
import contextlib
import copy
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssmax import initial_s, rope_tables, ssmax_attention, ssmax_factor
from ssmax.nn import KVCache, RMSNorm, SelfAttention
from ssmax.ops.backends import attend
from ssmax.ops.rope_scale.api import rope_ssmax
from ssmax.ops.visible import MaskSpec
from ssmax_lab.records import BenchmarkRow, Provenance, append_csv

RESULTS = Path(__file__).parent / "results.csv"
YARDSTICK, TWO_LINES, OURS = "softmax (yardstick)", "two lines", "ours"
SEED = 0
TURNS, TURN_SECONDS = 7, 0.02
PARTS = ("op", "layer", "decode", "masks", "hf")
Run = Callable[[], Any]
Runs = dict[str, Run]


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


def square(batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> Shape:
    return Shape(batch, tokens, tokens, heads, kv_heads, head_dim)


GPU_SHAPES = [
    square(1, 128, 12, 12, 64),
    square(64, 512, 12, 12, 64),
    square(32, 1024, 12, 12, 64),
    square(16, 2048, 16, 4, 128),
    square(4, 4096, 32, 8, 128),
]
GPU_STEPS = [Shape(1, 1, 4096, 12, 12, 64), Shape(8, 1, 4096, 32, 8, 128)]
CPU_SHAPES = [square(1, 16, 12, 12, 64), square(1, 1024, 12, 12, 64)]
CPU_STEPS = [Shape(1, 1, 1024, 12, 12, 64)]


class Bench:
    """Times competitors in turns and keeps the rows."""

    def __init__(
        self, device: str, name: str, turns: int, *, kernels: bool, cases: list[str] | None = None
    ) -> None:
        self.device, self.turns, self.kernels, self.cases = device, turns, kernels, cases
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.provenance = Provenance.here(config={"turns": turns}, device=name, seed=SEED)
        self.rows: list[BenchmarkRow] = []

    def wants(self, case: str) -> bool:
        """True for all cases, or those of which a part of the name was asked for."""
        return not self.cases or any(part in case for part in self.cases)

    def compare(self, case: str, mode: str, runs: Runs, errors: dict[str, float] | None = None):
        """Wall-clock of every run, per call."""
        for run in runs.values():
            for _ in range(3):
                run()
        self._synchronize()
        calls = {name: self._calls(run) for name, run in runs.items()}
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(self.turns):
            for name in sorted(runs, reverse=turn % 2 == 1):
                taken[name].append(self._milliseconds(runs[name], calls[name]))
        self._keep(case, mode, taken, errors or {})

    def compare_kernels(self, case: str, mode: str, runs: Runs) -> None:
        """Time CUDA graphs of the same calls."""
        if self.device != "cuda" or not self.kernels:
            return
        import triton.testing

        graph = triton.testing.do_bench_cudagraph
        taken = {name: [graph(run, rep=20, return_mode="median")] for name, run in runs.items()}
        self._keep(case, mode, taken, {})

    def _calls(self, run: Run) -> int:
        once = max(min(self._milliseconds(run, 5) for _ in range(2)), 1e-3)
        return min(max(int(TURN_SECONDS * 1e3 / once), 3), 2000)

    def _milliseconds(self, run: Run, calls: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        self._synchronize()
        return (time.perf_counter() - start) * 1e3 / calls

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _keep(self, case: str, mode: str, taken: dict[str, list[float]], errors) -> None:
        base = taken[next(iter(taken))]
        shown = []
        for name, times in taken.items():
            ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
            row = BenchmarkRow(
                benchmark="wall_clock",
                competitor=name,
                shape=case,
                mode=mode,
                milliseconds=round(statistics.median(times), 5),
                ratio=round(ratio, 4),
                peak_mib=0.0,
                memory_ratio=0.0,
                error=float(f"{errors.get(name, 0.0):.2e}"),
                provenance=self.provenance,
            )
            self.rows.append(row)
            shown.append(f"{name} {row.milliseconds:.4f} x{row.ratio:.3f}")
        print(f"{case:34} {mode:32} " + " | ".join(shown), flush=True)


@contextlib.contextmanager
def fastest(num_queries: int, device: str) -> Iterator[None]:
    """Give everyone the fastest kernel; cuDNN would make a plan for every length of a cache."""
    if device != "cuda":
        yield
        return
    first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    order = first if num_queries > 1 else first[::-1]
    with sdpa_kernel([*order, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield


def heads_of(bench: Bench, batch: int, heads: int, tokens: int, head_dim: int) -> Tensor:
    """Random heads, laid out as a projection leaves them."""
    size = (batch, tokens, heads, head_dim)
    x = torch.randn(size, device=bench.device, dtype=bench.dtype).transpose(1, 2)
    return x.requires_grad_()


def two_lines(q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_n: Tensor, **options: Any) -> Tensor:
    q = q * (s.unsqueeze(-1) * log_n).unsqueeze(-1).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, **options)


def error_of(out: Tensor, q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, is_causal: bool) -> float:
    """Largest deviation from float64 in a few rows, relative."""
    tokens, keys = q.shape[2], k.shape[2]
    rows = sorted({0, tokens // 3, tokens // 2, tokens - 1})
    at = torch.tensor(rows, device=q.device)
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.detach()[:1].double() for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    n = at + keys - tokens + 1 if is_causal else torch.full_like(at, keys)
    q = q[:, :, at] * ssmax_factor(n, s.detach().double()).unsqueeze(-1)
    z = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.arange(keys, device=q.device) >= n.unsqueeze(-1)
    exact = z.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return ((out.detach()[:1, :, at].double() - exact).abs().max() / exact.abs().max()).item()


def op(bench: Bench, shape: Shape, *, is_causal: bool = True, compiled: bool = True) -> None:
    """Measure ssmax_attention itself."""
    case = f"{shape}" + ("" if is_causal else " both ways")
    if not bench.wants(case):
        return
    q = heads_of(bench, shape.batch, shape.heads, shape.queries, shape.head_dim)
    k, v = (heads_of(bench, shape.batch, shape.kv_heads, shape.keys, shape.head_dim) for _ in "kv")
    s = torch.full((shape.heads,), initial_s(shape.keys), device=bench.device, requires_grad=True)
    first = shape.keys - shape.queries + 1
    n = torch.arange(first, shape.keys + 1, device=bench.device)
    log_n = (n if is_causal else torch.full_like(n, shape.keys)).float().log()
    gqa = shape.heads != shape.kv_heads
    sdpa = {"is_causal": is_causal and shape.queries > 1, "enable_gqa": gqa}

    def softmax(q, k, v, s):
        return F.scaled_dot_product_attention(q, k, v, **sdpa)

    def by_hand(q, k, v, s):
        return two_lines(q, k, v, s, log_n, **sdpa)

    def ours(q, k, v, s):
        return ssmax_attention(q, k, v, s, is_causal=is_causal, enable_gqa=gqa)

    functions = {YARDSTICK: softmax, TWO_LINES: by_hand, OURS: ours}
    errors = {
        name: error_of(function(q, k, v, s), q, k, v, s, is_causal=is_causal)
        for name, function in functions.items()
        if name != YARDSTICK
    }
    if errors[OURS] > max(2 * errors[TWO_LINES], 1e-5):
        raise SystemExit(f"{case}: ours errs by {errors[OURS]:.1e}; nothing was timed")
    grad = torch.randn_like(q)

    def forward(function: Callable) -> Run:
        def run() -> None:
            with torch.no_grad():
                function(q, k, v, s)

        return run

    def forward_backward(function: Callable, inputs: tuple[Tensor, ...]) -> Run:
        return lambda: torch.autograd.grad(function(q, k, v, s), inputs, grad)

    ways = {"eager": functions}
    if compiled and bench.device == "cuda":
        torch.compiler.reset()
        ways["compiled"] = {
            name: torch.compile(function, dynamic=False) for name, function in functions.items()
        }
    with fastest(shape.queries, bench.device):
        for way, each in ways.items():
            runs = {name: forward(function) for name, function in each.items()}
            bench.compare(case, f"forward, {way}", runs, errors)
            bench.compare_kernels(case, f"forward, {way}, kernels", runs)
            if shape.queries == 1:
                continue
            runs = {
                name: forward_backward(f, (q, k, v) if name == YARDSTICK else (q, k, v, s))
                for name, f in each.items()
            }
            bench.compare(case, f"forward+backward, {way}", runs)
            bench.compare_kernels(case, f"forward+backward, {way}, kernels", runs)


class PlainAttention(nn.Module):
    """Self-attention as one would write it, with or without the two lines."""

    def __init__(self, hidden_size: int, heads: int, tokens: int, *, scales: bool) -> None:
        super().__init__()
        self.heads, self.scales = heads, scales
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(hidden_size, hidden_size, bias=False))
        self.s = nn.Parameter(torch.full((heads,), initial_s(tokens)))
        cos, sin = rope_tables(torch.arange(tokens), hidden_size // heads)
        self.register_buffer("cos", torch.cat((cos, cos), -1))
        self.register_buffer("sin", torch.cat((sin, sin), -1))
        self.register_buffer("log_n", torch.arange(1, tokens + 1).float().log())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self._rotate(q), self._rotate(k)
        if self.scales:
            q = q * (self.s.unsqueeze(-1) * self.log_n).unsqueeze(-1).to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def _rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
        return x * self.cos.to(x.dtype) + turned * self.sin.to(x.dtype)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(RMSNorm(hidden_size) for _ in range(2))
        self.up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(4 * hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def layer(bench: Bench, batch: int, tokens: int, heads: int, layers: int, compiled: bool) -> None:
    """Measure SelfAttention alone, or a stack of blocks."""
    case = f"B{batch} T{tokens} H{heads} D64, " + ("layer" if layers == 1 else f"{layers} blocks")
    if not bench.wants(case):
        return
    hidden_size = 64 * heads

    def stack(make: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(SEED)
        if layers == 1:
            return make().to(bench.device)
        return nn.Sequential(*(Block(make(), hidden_size) for _ in range(layers))).to(bench.device)

    def narrow(model: nn.Module) -> nn.Module:
        return model.to(bench.dtype)

    models = {
        YARDSTICK: stack(lambda: PlainAttention(hidden_size, heads, tokens, scales=False)),
        TWO_LINES: stack(lambda: PlainAttention(hidden_size, heads, tokens, scales=True)),
        OURS: stack(lambda: SelfAttention(hidden_size, heads, train_length=tokens)),
    }
    x = torch.randn(batch, tokens, hidden_size, device=bench.device, dtype=bench.dtype)
    grad = torch.randn_like(x)
    ways = {"eager": {name: narrow(model) for name, model in models.items()}}
    if compiled and bench.device == "cuda":
        torch.compiler.reset()
        each = ways["eager"].items()
        ways["compiled"] = {name: torch.compile(model, dynamic=False) for name, model in each}
    with fastest(tokens, bench.device):
        for way, each in ways.items():

            def forward(model: nn.Module) -> Run:
                def run() -> None:
                    with torch.no_grad():
                        model(x)

                return run

            def forward_backward(model: nn.Module) -> Run:
                def run() -> None:
                    model(x).backward(grad)
                    model.zero_grad(set_to_none=True)

                return run

            bench.compare(case, f"forward, {way}", {n: forward(m) for n, m in each.items()})
            runs = {name: forward_backward(model) for name, model in each.items()}
            bench.compare(case, f"forward+backward, {way}", runs)


def decode(bench: Bench, batch: int, keys: int, heads: int) -> None:
    """Measure a cached step: RoPE and SDPA in eager code against ours, the op and the layer."""
    case = f"B{batch} T1 S{keys} H{heads} D64, "
    if not (bench.wants(case + "RoPE") or bench.wants(case + "layer")):
        return
    q, k_new = (heads_of(bench, batch, heads, 1, 64).detach() for _ in "qk")
    k, v = (heads_of(bench, batch, heads, keys, 64).detach() for _ in "kv")
    s = torch.full((heads,), initial_s(keys), device=bench.device)
    n = torch.full((1,), keys, device=bench.device)
    cos, sin = rope_tables(n - 1, 64)
    wide = [torch.cat((t, t), -1).to(bench.dtype) for t in (cos, sin)]
    log_n = n.float().log()

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * wide[0] + torch.cat((-high, low), -1) * wide[1]

    def softmax() -> Tensor:
        rotate(k_new)
        return F.scaled_dot_product_attention(rotate(q), k, v)

    def by_hand() -> Tensor:
        rotate(k_new)
        return two_lines(rotate(q), k, v, s, log_n)

    spec = MaskSpec(num_queries=1, num_keys=keys, is_causal=True, device=q.device)

    def ours() -> Tensor:
        turned, _ = rope_ssmax(q, k_new, cos, sin, n, s)
        return attend(turned, k, v, spec)

    with fastest(1, bench.device), torch.no_grad():
        runs = {YARDSTICK: softmax, TWO_LINES: by_hand, OURS: ours}
        bench.compare(case + "RoPE", "step, eager", runs)
        plain = PlainAttention(64 * heads, heads, keys, scales=False).to(bench.device, bench.dtype)
        attention = SelfAttention(64 * heads, heads, train_length=keys)
        attention = attention.to(bench.device, bench.dtype).eval()
        cache = KVCache.preallocated(
            1, batch=batch, num_kv_heads=heads, max_keys=keys, head_dim=64, device=bench.device,
            dtype=bench.dtype,
        )  # fmt: skip
        x = torch.randn(batch, 1, 64 * heads, device=bench.device, dtype=bench.dtype)
        cache.write(0, *(heads_of(bench, batch, heads, keys - 1, 64) for _ in "kv"))
        cache.advance(keys - 1)

        def plain_step() -> Tensor:
            a, b, c = (
                p(x).unflatten(-1, (heads, -1)).transpose(1, 2)
                for p in (plain.q_proj, plain.k_proj, plain.v_proj)
            )
            k[:, :, -1:], v[:, :, -1:] = rotate(b), c
            out = F.scaled_dot_product_attention(rotate(a), k, v)
            return plain.o_proj(out.transpose(1, 2).flatten(-2))

        runs = {YARDSTICK: plain_step, OURS: lambda: attention(x, cache=cache)}
        bench.compare(case + "layer", "step, eager", runs)


def masks(bench: Bench) -> None:
    """Measure other masks, each against what an expert would call."""
    windows(bench)
    padding(bench)
    op(bench, square(16, 1024, 12, 12, 64), is_causal=False, compiled=False)


def windows(bench: Bench) -> None:
    """Measure a causal window against FlexAttention."""
    window, tokens = 4096, 16384
    case = f"window {window} T{tokens} H16/4 D64"
    if not bench.wants(case):
        return
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    q, k, v = (heads_of(bench, 1, heads, tokens, 64) for heads in (16, 4, 4))
    s = torch.full((16,), initial_s(tokens), device=bench.device, requires_grad=True)
    log_n = torch.arange(1, tokens + 1, device=bench.device).clamp_max(window).float().log()
    block_mask = create_block_mask(
        lambda b, h, i, j: (j <= i) & (i - j < window), None, None, tokens, tokens, "cuda"
    )
    flex = torch.compile(flex_attention, dynamic=False)

    def by_flex(q, k, v, s):
        return flex(q, k, v, block_mask=block_mask, enable_gqa=True)

    def by_flex_scaled(q, k, v, s):
        q = q * (s.unsqueeze(-1) * log_n).unsqueeze(-1).to(q.dtype)
        return by_flex(q, k, v, s)

    def windowed(q, k, v, s):
        return ssmax_attention(q, k, v, s, is_causal=True, window=window, enable_gqa=True)

    functions = {"flex (yardstick)": by_flex, "flex, two lines": by_flex_scaled, OURS: windowed}
    _both_ways(bench, case, functions, (q, k, v, s))


def padding(bench: Bench) -> None:
    """Measure padded rows against the call without padding, and SDPA with a mask."""
    batch, tokens = 4, 8192
    q, k, v = (heads_of(bench, batch, 12, tokens, 64) for _ in "qkv")
    s = torch.full((12,), initial_s(tokens), device=bench.device, requires_grad=True)
    log_n = torch.arange(1, tokens + 1, device=bench.device).float().log()
    pads = torch.tensor([0, 512, 1024, 2048], device=bench.device).unsqueeze(-1)
    index = torch.arange(tokens, device=bench.device)
    for side, keep in (("left", index >= pads), ("right", index < tokens - pads)):
        case = f"{side} padding B{batch} T{tokens} H12 D64"
        if not bench.wants(case):
            continue
        both = keep[:, None, None, :] & (index <= index.unsqueeze(-1))

        def unpadded(q, k, v, s):
            return two_lines(q, k, v, s, log_n, is_causal=True)

        def masked(q, k, v, s, both=both):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=both)

        def padded(q, k, v, s, keep=keep):
            return ssmax_attention(q, k, v, s, is_causal=True, key_padding_mask=keep)

        functions = {
            "unpadded, two lines (yardstick)": unpadded,
            "SDPA, mask": masked,
            OURS: padded,
        }
        with fastest(tokens, bench.device):
            _both_ways(bench, case, functions, (q, k, v, s))


def _both_ways(bench: Bench, case: str, functions: dict[str, Callable], inputs: tuple) -> None:
    grad = torch.randn_like(inputs[0])

    def forward(function: Callable) -> Run:
        def run() -> None:
            with torch.no_grad():
                function(*inputs)

        return run

    bench.compare(case, "forward, eager", {n: forward(f) for n, f in functions.items()})
    runs = {
        name: lambda f=function: torch.autograd.grad(f(*inputs), inputs, grad, allow_unused=True)
        for name, function in functions.items()
    }
    bench.compare(case, "forward+backward, eager", runs)


def hf(bench: Bench, *, quick: bool) -> None:
    """Measure a converted Llama of 135 M against the same model unconverted."""
    import transformers

    import ssmax.hf

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}  # fmt: skip
    if quick:
        shape |= {"num_hidden_layers": 2, "vocab_size": 256}
    config = transformers.LlamaConfig(**shape, max_position_embeddings=8192)
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(config).to(bench.device, bench.dtype)
    converted = ssmax.hf.convert(copy.deepcopy(model))
    models = {YARDSTICK: model, OURS: converted}
    for name, parameter in converted.named_parameters():
        if name.endswith("ssmax.s"):
            nn.init.constant_(parameter, 0.16)
    for batch, tokens in [(2, 64)] if quick else [(8, 1024), (2, 8192)]:
        case = f"Llama 135 M B{batch} T{tokens}"
        if not bench.wants(case):
            continue
        x = torch.randint(0, shape["vocab_size"], (batch, tokens), device=bench.device)

        def step(model: Any, x: Tensor = x) -> None:
            model(x, labels=x, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)

        def read(model: Any, x: Tensor = x) -> None:
            with torch.no_grad():
                model(x, logits_to_keep=1)

        bench.compare(
            case, "training step, eager", {n: lambda m=m: step(m) for n, m in models.items()}
        )
        bench.compare(case, "prefill, eager", {n: lambda m=m: read(m) for n, m in models.items()})
    tokens = 16 if quick else 512
    slow = replace_turns(bench, 5)
    for batch in (1, 8):
        case = f"Llama 135 M B{batch} prompt {tokens}" + (", left padded" if batch > 1 else "")
        if not bench.wants(case):
            continue
        x = torch.randint(0, shape["vocab_size"], (batch, tokens), device=bench.device)
        keep = torch.ones_like(x)
        for row in range(1, batch):
            keep[row, : row * tokens // 16] = 0

        def generate(model: Any, x: Tensor = x, keep: Tensor = keep) -> None:
            model.generate(
                x, attention_mask=keep, max_new_tokens=24, min_new_tokens=24, do_sample=False,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip

        runs = {name: lambda m=m: generate(m) for name, m in models.items()}
        slow.compare(case, "generate 24 tokens, eager", runs)
    bench.rows += slow.rows


def replace_turns(bench: Bench, turns: int) -> Bench:
    other = copy.copy(bench)
    other.turns, other.rows = turns, []
    return other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; by default all")
    parser.add_argument(
        "--case", action="append", help="cases whose names hold this; by default all"
    )
    parser.add_argument("--quick", action="store_true", help="the smallest case of each part")
    parser.add_argument("--no-compile", action="store_true", help="eager code alone")
    parser.add_argument("--no-kernels", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, 1 thread"
    if not on_gpu:
        torch.set_num_threads(1)
    turns = 3 if arguments.quick else TURNS
    device, kernels = "cuda" if on_gpu else "cpu", not arguments.no_kernels
    bench = Bench(device, name, turns, kernels=kernels, cases=arguments.case)
    torch.manual_seed(SEED)
    try:
        run_parts(bench, arguments)
    finally:
        append_csv(arguments.out, bench.rows)


def run_parts(bench: Bench, arguments: argparse.Namespace) -> None:
    on_gpu, wanted = bench.device == "cuda", arguments.only or PARTS
    shapes, steps = (GPU_SHAPES, GPU_STEPS) if on_gpu else (CPU_SHAPES, CPU_STEPS)
    last = 1 if arguments.quick else None
    compiled = not arguments.no_compile
    if "op" in wanted:
        for shape in [*shapes[:last], *steps[:last]]:
            op(bench, shape, compiled=compiled and shape.queries > 1)
    if "layer" in wanted:
        sizes = [(1, 128), (32, 1024)] if on_gpu else [(1, 16)]
        for batch, tokens in sizes[:last]:
            for layers in (1, 12):
                layer(bench, batch, tokens, 12, layers, compiled and layers == 12)
    if "decode" in wanted:
        decode(bench, 1, 4096 if on_gpu else 512, 12)
    if "masks" in wanted and on_gpu:
        masks(bench)
    if "hf" in wanted:
        hf(bench, quick=arguments.quick or not on_gpu)


if __name__ == "__main__":
    main()
