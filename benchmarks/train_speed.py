"""How fast does the paper's model train, ours and as one would write it in plain PyTorch?

    python benchmarks/train_speed.py             # the paper's model on a GPU
    python benchmarks/train_speed.py --pairs     # SSMax and softmax side by side
    python benchmarks/train_speed.py --quick     # a small one, anywhere

The yardstick is the plain loop: table 1's model from PyTorch's own modules, whole under
torch.compile, softmax by cuDNN, logits and cross entropy, fused AdamW, bfloat16 autocast. Beside it
Transformers' Llama of the same shape, as it is and compiled, in the same loop. Ours is the code
that `ssmax-lab pretrain` runs, with softmax and with SSMax, with a residual stream as wide as the
plain loop's, with fewer activations kept, and as `ssmax-lab finetune` calls it, on packed
questions. First all models are given the same weights and must have the same loss and gradient;
then each trains in a process of its own, turn after turn, on random tokens.
"""

# B batch, T tokens, C width, F feed-forward width, V vocabulary, H heads, D head width

import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import DEVICE, SEED, in_processes, in_turns, parser, peak_mib, record, reset_peak
from ssmax_lab.data.stream import IGNORE, prefetched
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.model.llama import to_llama_weights
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

PLAIN, SOFTMAX, SSMAX = "plain loop, softmax (yardstick)", "ours, softmax", "ours, ssmax"
WIDE, LEAN = "ours, ssmax, float32 residual", "ours, ssmax, less memory"
LLAMA, LLAMA_COMPILED = "Transformers, softmax", "Transformers, softmax, compiled"
PACKED = "ours, ssmax, packed questions"
NAMES = (PLAIN, LLAMA, LLAMA_COMPILED, SOFTMAX, SSMAX, WIDE, LEAN, PACKED)
CHANGES = {WIDE: {"residual": "float32"}, LEAN: {"activation_memory_budget": 0.85}}
SMALL = {
    "num_layers": 2, "num_heads": 4, "hidden_size": 64, "intermediate_size": 128,
    "vocab_size": 257, "train_length": 128,
}  # fmt: skip
STEPS = 5
"""Timed together."""


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
def trainer_of(name: str, shape: LMConfig, batch: int) -> Iterator[Callable[[], float]]:
    """Give a function that trains for some steps and returns the milliseconds of one."""
    torch.manual_seed(SEED)
    on_gpu = DEVICE == "cuda"
    device = torch.device(DEVICE, 0) if on_gpu else torch.device(DEVICE)
    ranks = single_process(device)
    precision = "bfloat16" if on_gpu else "float32"
    run = RunConfig(precision=precision, compile=on_gpu, **CHANGES.get(name, {}))
    config = dataclasses.replace(shape, rule="ssmax" if "ssmax" in name else "softmax")
    if name in (PLAIN, LLAMA, LLAMA_COMPILED):
        model: nn.Module = (PlainModel if name == PLAIN else LlamaModel)(config).to(device)
        loss: nn.Module = torch.compile(model) if on_gpu and name != LLAMA else model
    else:
        model = LM(config)
        loss = parallel_loss(model, run, ranks)
    optimizer = make_optimizer(model, OptimConfig(), device)
    samples: Samples = (RandomQuestions if name == PACKED else RandomTokens)(config)

    def batches(step: int) -> list[Batch]:
        rows = samples.batches(step * batch, batch)
        return [part.pinned() if on_gpu else part for part in rows]

    def some_steps() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            value = accumulate_gradients(loss, next(made), ranks, precision)
            clip_gradients(model, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value.item()  # waits for the device
        return (time.perf_counter() - start) / STEPS * 1e3

    with contextlib.closing(prefetched(batches)) as made:
        yield some_steps


def train_alone(name: str, shape: LMConfig, batch: int) -> dict[str, float]:
    """Milliseconds a step (median) and peak memory."""
    with trainer_of(name, shape, batch) as some_steps:
        for _ in range(2):
            some_steps()
        reset_peak()
        return {"ms": statistics.median(some_steps() for _ in range(8)), "mib": peak_mib()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--turns", type=int, help="by default 2, and 20 of --pairs")
    arguments.add_argument("--pairs", action="store_true", help="SSMax against softmax, in turns")
    arguments.add_argument("--names", nargs="+", choices=NAMES, default=NAMES, metavar="NAME",
                           help="these alone, beside the yardstick")  # fmt: skip
    arguments.add_argument("--only", choices=NAMES, help="one, in this process, as JSON")
    given = arguments.parse_args()
    shape, batch = (LMConfig(**SMALL), 8) if given.quick else (LMConfig(), 64)
    if given.only:
        print(json.dumps(train_alone(given.only, shape, batch)))
        return
    keep = functools.partial(
        record, given.out, "train_speed",
        f"{shape.num_layers}x{shape.hidden_size} B{batch} T{shape.train_length}",
        config={"model": shape.to_dict(), "batch": batch},
    )  # fmt: skip
    error = check_agreement()
    if given.pairs:
        with contextlib.ExitStack() as stack:
            runs = {
                name: stack.enter_context(trainer_of(name, shape, batch))
                for name in (SOFTMAX, SSMAX)
            }
            taken = in_turns(runs, given.turns or 20)
        keep("step, in turns", taken, errors=dict.fromkeys(taken, error))
        return
    names = list(dict.fromkeys([PLAIN, *given.names]))
    words = ["--quick"] if given.quick else []
    found = in_processes(__file__, names, given.turns or 2, *words)
    keep(
        "step",
        {name: [one["ms"] for one in each] for name, each in found.items()},
        peaks={name: max(one["mib"] for one in each) for name, each in found.items()},
        errors=dict.fromkeys(found, error),
    )


if __name__ == "__main__":
    main()
