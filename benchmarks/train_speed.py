"""How fast does the paper's model train, ours and as one would write it in plain PyTorch?

    python benchmarks/train_speed.py             # the paper's model on a GPU
    python benchmarks/train_speed.py --pairs     # SSMax and softmax side by side
    python benchmarks/train_speed.py --quick     # a small one, anywhere

The yardstick is the plain loop: table 1's model from PyTorch's own modules, whole under
torch.compile, softmax by cuDNN, logits and cross entropy, fused AdamW, bfloat16 autocast. Beside it
Transformers' Llama of the same shape, as it is and compiled, in the same loop. Ours is the code
that `ssmax-lab pretrain` runs, with softmax and with SSMax, with a
residual stream as wide as the plain loop's, with fewer activations kept, and as `ssmax-lab
finetune` calls it, on packed questions. First all models are given the same weights and must
have the same loss and gradient; then each trains in a process of its own, turn after turn, on
random tokens. Rows are
appended to benchmarks/results.csv.
"""

# B batch, T tokens, C width, F feed-forward width, V vocabulary, H heads, D head width

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssmax_lab.data.stream import IGNORE, prefetched
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.model.llama import to_llama_weights
from ssmax_lab.records import BenchmarkRow, Provenance, append_csv
from ssmax_lab.train.config import OptimConfig, RunConfig
from ssmax_lab.train.dist import clip_gradients, single_process
from ssmax_lab.train.step import (
    Batch,
    Loss,
    Samples,
    accumulate_gradients,
    make_optimizer,
    parallel_loss,
)

RESULTS = Path(__file__).parent / "results.csv"
PLAIN, SOFTMAX, SSMAX = "plain loop, softmax (yardstick)", "ours, softmax", "ours, ssmax"
WIDE, LEAN = "ours, ssmax, float32 residual", "ours, ssmax, less memory"
LLAMA, LLAMA_COMPILED = "Transformers, softmax", "Transformers, softmax, compiled"
PACKED = "ours, ssmax, packed questions"
RULES = dict.fromkeys((PLAIN, LLAMA, LLAMA_COMPILED, SOFTMAX), "softmax")
RULES |= dict.fromkeys((SSMAX, WIDE, LEAN, PACKED), "ssmax")
CHANGES = {
    WIDE: {"residual": "float32"},
    LEAN: {"activation_memory_budget": 0.85},
}
PAIRS = [(SOFTMAX, SSMAX)]
SEED = 0


class PlainBlock(nn.Module):
    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_heads
        self.attention_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.ff_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.gate, self.up = (
            nn.Linear(width, config.intermediate_size, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(config.intermediate_size, width, bias=False)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x_BTC)
        q, k, v = (
            project(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        with by_cudnn(q.device):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.o(out.transpose(1, 2).flatten(2))
        h = self.ff_norm(x_BTC)
        return x_BTC + self.down(F.silu(self.gate(h)) * self.up(h))


def by_cudnn(device: torch.device) -> contextlib.AbstractContextManager:
    on_gpu = device.type == "cuda"
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu else contextlib.nullcontext()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class PlainModel(nn.Module):
    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        half = config.head // 2
        rates = config.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(config.train_length, dtype=torch.float64), rates)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor, *_: None) -> Tensor:
        x = self.embedding(inputs_BT)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="sum")


class LlamaModel(nn.Module):
    """Transformers' Llama with the plain loop's loss and its attention by cuDNN."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        import transformers

        weights, settings = to_llama_weights(LM(config))
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        self.model.load_state_dict(weights)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor, *_: None) -> Tensor:
        with by_cudnn(inputs_BT.device):
            logits = self.model(inputs_BT, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="sum")


def plain_weights(model: LM) -> dict[str, Tensor]:
    """Ours by the names of the plain model."""
    names = {".attention.": ".", "_proj.": ".", ".ff.": "."}
    weights = {}
    for name, weight in model.state_dict().items():
        for ours, plain in names.items():
            name = name.replace(ours, plain)
        weights[name] = weight
    return weights


def check_agreement() -> float:
    """Largest relative difference of loss and gradients, small model, float64."""
    torch.manual_seed(SEED)
    config = LMConfig(
        num_layers=2,
        num_heads=2,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=97,
        train_length=24,
    )
    model = LM(config).double()
    plain = PlainModel(config).double()
    plain.load_state_dict(plain_weights(model))
    tokens = torch.randint(0, 97, (3, 25))
    llama = LlamaModel(config).double()
    llama.model.load_state_dict(to_llama_weights(model)[0])
    found = []
    for module, loss in ((plain, plain), (model, Loss(model)), (llama, llama)):
        value = loss(tokens[:, :-1], tokens[:, 1:])
        gradients = torch.autograd.grad(value, [p for p in module.parameters() if p.dim() == 2])
        # Modules have their weights in different orders.
        norms = torch.stack([gradient.norm() for gradient in gradients]).sort().values
        found.append(torch.cat((value.detach()[None], norms)))
    worst = max(((other - found[0]) / found[0]).abs().max().item() for other in found[1:])
    if not worst < 1e-6:
        raise SystemExit(f"the models differ by {worst:.1e}; nothing was timed")
    return worst


class RandomTokens:
    """Samples that cost what shards cost, without their files."""

    fingerprint = "random"

    def __init__(self, config: LMConfig) -> None:
        self.config = config

    def batches(self, first: int, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(first)
        size = (count, self.config.train_length + 1)
        tokens = torch.randint(0, self.config.vocab_size, size, generator=generator)
        return [Batch(inputs_BT=tokens[:, :-1].contiguous(), targets_BT=tokens[:, 1:].contiguous())]


class RandomQuestions(RandomTokens):
    """As many tokens in questions as long as SQuAD's, of which only the answers count."""

    def batches(self, first: int, count: int) -> list[Batch]:
        (batch,) = super().batches(first, count)
        generator = torch.Generator().manual_seed(first)
        inputs, targets = batch.inputs_BT.flatten(), batch.targets_BT.flatten()
        longest = self.config.train_length // 3
        lengths = torch.randint(longest // 3, longest, (inputs.numel(),), generator=generator)
        ends = lengths.cumsum(0)
        ends = torch.cat((ends[ends < inputs.numel()], torch.tensor([inputs.numel()])))
        to_end = ends[torch.searchsorted(ends, torch.arange(inputs.numel()), right=True)]
        is_answer = to_end - torch.arange(inputs.numel()) <= 5
        packed = Batch(
            inputs_BT=inputs[None],
            targets_BT=torch.where(is_answer, targets, IGNORE)[None],
            cu_seqlens=torch.cat((torch.zeros(1), ends)).int(),
        )
        return [packed]


@contextlib.contextmanager
def trainer_of(
    name: str, config: LMConfig, batch: int
) -> Iterator[Callable[[int], tuple[float, float]]]:
    """A function that trains for so many steps: milliseconds of one, last loss."""
    torch.manual_seed(SEED)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    ranks = single_process(device)
    precision = "bfloat16" if on_gpu else "float32"
    run = RunConfig(precision=precision, compile=on_gpu, **CHANGES.get(name, {}))
    if name in (PLAIN, LLAMA, LLAMA_COMPILED):
        model: nn.Module = (PlainModel if name == PLAIN else LlamaModel)(config).to(device)
        if name == PLAIN:
            model.load_state_dict(plain_weights(LM(config)))
        loss: nn.Module = torch.compile(model) if on_gpu and name != LLAMA else model
    else:
        model = LM(config)
        loss = parallel_loss(model, run, ranks)
    optimizer = make_optimizer(model, OptimConfig(), device)
    samples: Samples = (RandomQuestions if name == PACKED else RandomTokens)(config)

    def batches(step: int) -> list[Batch]:
        rows = samples.batches(step * batch, batch)
        return [part.pinned() if on_gpu else part for part in rows]

    def some_steps(count: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(count):
            value = accumulate_gradients(loss, next(made), ranks, precision)
            clip_gradients(model, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        last = value.item()  # waits for the device
        return (time.perf_counter() - start) / count * 1e3, last

    with contextlib.closing(prefetched(batches)) as made:
        yield some_steps


def train_some(
    name: str, config: LMConfig, batch: int, steps: int, warmup: int
) -> dict[str, float]:
    """Milliseconds a step (median), peak memory, last loss."""
    with trainer_of(name, config, batch) as some_steps:
        some_steps(warmup)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        turns = [some_steps(5) for _ in range(steps // 5)]
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
    times, losses = zip(*turns, strict=True)
    return {"ms": statistics.median(times), "mib": peak, "loss": losses[-1]}


def in_turns(names: Sequence[str], shape: LMConfig, batch: int, turns: int) -> dict[str, list]:
    """Milliseconds a step of competitors that take turns in one process.

    Two runs of one competitor differ by a percent: what costs less shows only side by side.
    """
    taken: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(trainer_of(name, with_rule(shape, name), batch))
            for name in names
        }
        for turn in range(turns + 1):
            for name in sorted(runs, reverse=turn % 2 == 1):
                milliseconds, _ = runs[name](5)
                if turn:  # the first compiles
                    taken[name].append(milliseconds)
    return taken


def with_rule(shape: LMConfig, name: str) -> LMConfig:
    return dataclasses.replace(shape, rule=RULES[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--turns", type=int, default=2, help="runs of each; the best counts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    parser.add_argument("--pairs", action="store_true", help="SSMax against softmax, in turns")
    parser.add_argument("--names", nargs="+", choices=list(RULES), default=list(RULES),
                        metavar="NAME", help="these alone, beside the yardstick")  # fmt: skip
    parser.add_argument("--only", choices=list(RULES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = LMConfig()
    batch, steps, warmup = arguments.batch, 40, 10
    if arguments.quick:
        shape = LMConfig(
            num_layers=2,
            num_heads=4,
            hidden_size=64,
            intermediate_size=128,
            vocab_size=257,
            train_length=128,
        )
        batch, steps, warmup = 8, 10, 5
    if arguments.only:
        config = with_rule(shape, arguments.only)
        print("result", json.dumps(train_some(arguments.only, config, batch, steps, warmup)))
        return
    error = check_agreement()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    provenance = Provenance.here(
        config={"model": shape.to_dict(), "batch": batch, "steps": steps}, device=device, seed=SEED
    )
    shape_name = f"{shape.num_layers}x{shape.hidden_size} B{batch} T{shape.train_length}"
    if arguments.pairs:
        for pair in PAIRS:
            taken = in_turns(pair, shape, batch, turns=3 if arguments.quick else 20)
            rows = []
            for name, times in taken.items():
                sides = zip(times, taken[pair[0]], strict=True)
                ratio = statistics.median(mine / other for mine, other in sides)
                milliseconds = statistics.median(times)
                print(f"{name:34} {milliseconds:8.2f} ms  x {ratio:.4f}", flush=True)
                rows.append(
                    BenchmarkRow(
                        benchmark="train_speed",
                        competitor=name,
                        shape=shape_name,
                        mode="step, in turns",
                        milliseconds=round(milliseconds, 3),
                        ratio=round(ratio, 4),
                        peak_mib=0.0,
                        memory_ratio=0.0,
                        error=float(f"{error:.1e}"),
                        provenance=provenance,
                    )
                )
            append_csv(arguments.out, rows)
        return
    names = list(dict.fromkeys([PLAIN, *arguments.names]))
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    best: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for turn in range(arguments.turns):
        for name in names:
            command = [sys.executable, __file__, "--only", name, "--batch", str(batch)]
            command += ["--quick"] if arguments.quick else []
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if out.returncode:
                print(f"{name:34} failed: {out.stderr.strip()[-300:]}", flush=True)
                if name == PLAIN:
                    raise SystemExit("without the yardstick there is no ratio")
                continue
            line = out.stdout.strip().splitlines()[-1].removeprefix("result ")
            results[name].append(json.loads(line))
            print(f"{name:34} {line}", flush=True)
            if turn < arguments.turns - 1:
                continue
            best[name] = min(found["ms"] for found in results[name])
            peaks[name] = max(found["mib"] for found in results[name])
            speed = batch * shape.train_length / best[name] * 1e3
            print(f"{'':34} {best[name]:8.2f} ms  {speed:10,.0f} tokens/s  {peaks[name]:8.0f} MiB")
            row = BenchmarkRow(
                benchmark="train_speed",
                competitor=name,
                shape=shape_name,
                mode="step",
                milliseconds=round(best[name], 3),
                ratio=round(best[name] / best[PLAIN], 4),
                peak_mib=round(peaks[name], 1),
                memory_ratio=round(peaks[name] / peaks[PLAIN], 4) if peaks[PLAIN] else 0.0,
                error=float(f"{error:.1e}"),
                provenance=provenance,
            )
            append_csv(arguments.out, [row])


if __name__ == "__main__":
    main()
