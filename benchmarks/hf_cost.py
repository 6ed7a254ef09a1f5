"""What does conversion cost a Hugging Face model, in training and in decoding?

    python benchmarks/hf_cost.py             # a Llama of 1.1 B and the paper's 162 M, on a GPU
    python benchmarks/hf_cost.py --only compiled --batch 8    # one part of it, for 8 prompts
    python benchmarks/hf_cost.py --quick     # a small one, anywhere

A Llama with random weights and its copy, converted with s and b learnable, take turns in one
process: training steps (forward, backward, fused AdamW, bfloat16), a prompt of the training length
read by Transformers' own `generate`, and tokens after it. There a third copy multiplies its queries
by ones: whoever scales queries in eager code launches that much. First the freshly converted copy
must give the same logits, bit for bit; then s is given the paper's first values, and n decides.
Of compiled tokens the kernels are listed too, as a profiler sees them.
Rows are appended to benchmarks/results.csv, those of a mode when it is done; the ratio is a model's
time over that of the unconverted one, the median over turns.
"""

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import ssmax.hf
from ssmax import initial_s
from ssmax_lab.records import BenchmarkRow, Provenance, append_csv
from train_profile import watched

RESULTS = Path(__file__).parent / "results.csv"
PLAIN, CONVERTED = "Transformers, softmax (yardstick)", "converted"
FLOOR = "queries times ones"
# Hosts are shared: what a step takes changes from second to second, by more than is measured. So
# there are many turns. Compiled tokens take little beside the prompt, which comes off: so they are
# many too, or the prompt's noise would be theirs.
TRAINING_TURNS, EAGER_TURNS, COMPILED_TURNS = 9, 15, 15
COMPILED_TOKENS = 256
PARTS = ("eager", "training", "compiled")
SEED = 0
BEFORE = 2  # tokens: the prompt gives one, the first step, which may record a graph, the other


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    shape: dict[str, int]
    batch: int
    tokens: int
    steps: int
    """Of one turn of training."""
    decoded: int
    """Tokens of one turn of eager decoding."""


CASES = [
    Case("Llama 162 M", {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
                         "num_attention_heads": 12, "num_key_value_heads": 12,
                         "vocab_size": 50257}, 32, 1024, 5, 32),
    Case("Llama 1.1 B", {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                         "num_attention_heads": 32, "num_key_value_heads": 4,
                         "vocab_size": 32000}, 8, 4096, 2, 32),
]  # fmt: skip
QUICK = Case("small Llama", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_key_value_heads": 2,
                             "vocab_size": 256}, 2, 128, 2, 4)  # fmt: skip


class TimesOnes(nn.Module):
    """A projection whose output is multiplied, head by head, by ones."""

    def __init__(self, projection: nn.Module, width: int, device: str) -> None:
        super().__init__()
        self.projection = projection
        self.ones = torch.ones(width, dtype=torch.bfloat16, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden) * self.ones


def models_of(case: Case, device: str) -> dict[str, transformers.PreTrainedModel]:
    """One and its converted copy, of the same logits until s and b get the paper's values."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**case.shape, max_position_embeddings=2 * case.tokens)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    converted = ssmax.hf.convert(copy.deepcopy(model))
    tokens = random_tokens(case, device)[:1]
    with torch.no_grad():
        if not torch.equal(model(tokens).logits, converted(tokens).logits):
            raise SystemExit(f"{case.name}: the converted copy differs; nothing was timed")
        for name, parameter in converted.named_parameters():
            if name.endswith("ssmax.s"):
                parameter.fill_(initial_s(case.tokens))
            elif name.endswith("ssmax.bias"):
                parameter.zero_()
    multiplied = copy.deepcopy(model)
    for layer in multiplied.model.layers:
        attention = layer.self_attn
        attention.q_proj = TimesOnes(attention.q_proj, case.shape["hidden_size"], device)
    return {PLAIN: model, FLOOR: multiplied, CONVERTED: converted}


def random_tokens(case: Case, device: str) -> Tensor:
    return torch.randint(0, case.shape["vocab_size"], (case.batch, case.tokens), device=device)


def trainer_of(model: transformers.PreTrainedModel, tokens: Tensor) -> Callable[[int], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=tokens.is_cuda)

    def some_steps(count: int) -> None:
        for _ in range(count):
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return some_steps


def decoder_of(
    model: transformers.PreTrainedModel, tokens: Tensor, cache: str = "dynamic"
) -> Callable[[int], None]:
    """After these prompts."""
    options: dict[str, Any] = {"cache_implementation": cache, "do_sample": False}

    def some_tokens(count: int) -> None:
        # The same lengths in every turn: cuDNN makes a plan for each, which takes longer than the
        # token, and whoever came first would pay for the other.
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        model.generate(tokens, **options, **lengths, pad_token_id=0, eos_token_id=None)

    return some_tokens


def static_decoder_of(model: transformers.PreTrainedModel, tokens: Tensor) -> Callable[[int], None]:
    """Transformers compiles the step of a cache that does not grow, on a GPU."""
    return decoder_of(model, tokens, cache="static")


def in_turns(
    runs: dict[str, Callable[[int], None]],
    counts: Sequence[int],
    turns: int,
    synchronize: Callable[[], None],
) -> dict[str, list[list[float]]]:
    """Milliseconds of every turn for each count; the first turn, which compiles, is left out."""
    taken: dict[str, list[list[float]]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name in sorted(runs, reverse=turn % 2 == 1):
            times = []
            for count in counts:
                synchronize()
                start = time.perf_counter()
                runs[name](count)
                synchronize()
                times.append((time.perf_counter() - start) * 1e3)
            if turn:
                taken[name].append(times)
    return taken


def kernels_of(run: Callable[[int], None], count: int) -> dict[str, tuple[float, float]]:
    """Microseconds and launches of a token by the kernel's name; the prompt's come off."""
    whole, prompt = watched(run, count + BEFORE), watched(run, BEFORE)
    kernels = {}
    for name in {*whole, *prompt}:
        taken, launches = whole.get(name, (0.0, 0))
        before, launches_before = prompt.get(name, (0.0, 0))
        kernels[name] = (taken - before) * 1e3 / count, (launches - launches_before) / count
    return kernels


def print_kernels(runs: dict[str, Callable[[int], None]], count: int) -> None:
    """What a token's kernels take, plain and converted, and those that differ by half a launch."""
    plain, converted = (kernels_of(runs[name], count) for name in (PLAIN, CONVERTED))
    for name, kernels in ((PLAIN, plain), (CONVERTED, converted)):
        taken, launches = (sum(each[i] for each in kernels.values()) for i in (0, 1))
        print(f"    {name:34} {taken:8.1f} us in {launches:5.1f} kernels a token")
    for name in sorted({*plain, *converted}):
        before, after = plain.get(name, (0.0, 0.0)), converted.get(name, (0.0, 0.0))
        if abs(after[1] - before[1]) >= 0.5:
            print(f"    {before[1]:6.1f} -> {after[1]:6.1f} launches  "
                  f"{before[0]:8.1f} -> {after[0]:8.1f} us  {name:.110}")  # fmt: skip


def measure(
    case: Case, parts: Sequence[str], batch: int, device: str, provenance: Provenance, out: Path
) -> None:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    models, tokens = models_of(case, device), random_tokens(case, device)
    compiled = "decode a token, static cache, compiled"
    kinds = {
        "eager": ("decode a token", decoder_of, case.decoded, EAGER_TURNS),
        "training": ("train a step", trainer_of, case.steps, TRAINING_TURNS),
        # Last: it takes minutes to compile.
        "compiled": (compiled, static_decoder_of, COMPILED_TOKENS, COMPILED_TURNS),
    }
    for kind, make, count, turns in (kinds[part] for part in parts):
        rows_of = case.batch if make is trainer_of else min(batch, case.batch)
        runs = {
            name: make(model, tokens[:rows_of])
            for name, model in models.items()
            if name != FLOOR or make is decoder_of
        }
        found: dict[str, dict[str, list[float]]] = {}
        if make is trainer_of:
            taken = in_turns(runs, [count], turns, synchronize)
            found[kind] = {name: [whole / count for (whole,) in taken[name]] for name in runs}
        else:
            # The longer first: a static cache then has one size.
            taken = in_turns(runs, [count + BEFORE, BEFORE], turns, synchronize)
            prompt = kind.replace("decode a token", "read a prompt").removesuffix(", compiled")
            found[prompt] = {name: [short for _, short in taken[name]] for name in runs}
            found[kind] = {
                name: [(long - short) / count for long, short in taken[name]] for name in runs
            }
        rows = []
        for mode, each in found.items():
            for name, times in each.items():
                milliseconds = statistics.median(times)
                # Turn by turn: what else the machine does comes and goes.
                pairs = zip(times, each[PLAIN], strict=True)
                ratio = statistics.median(mine / plain for mine, plain in pairs)
                shape = f"{case.name} B{rows_of} T{case.tokens}"
                print(f"{shape:24} {mode:40} {name:34} {milliseconds:9.3f} ms  x {ratio:.4f}",
                      flush=True)  # fmt: skip
                rows.append(
                    BenchmarkRow(
                        benchmark="hf_cost",
                        competitor=name,
                        shape=shape,
                        mode=mode,
                        milliseconds=round(milliseconds, 4),
                        ratio=round(ratio, 4),
                        peak_mib=0.0,
                        memory_ratio=0.0,
                        error=0.0,
                        provenance=provenance,
                    )
                )
        append_csv(out, rows)
        if device == "cuda" and make is static_decoder_of:
            print_kernels(runs, case.decoded)
        del runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    names = [case.name for case in CASES]
    parser.add_argument("--case", choices=names, help="one of the models alone")
    parser.add_argument("--only", choices=PARTS, help="a part of it; compiled needs a GPU")
    parser.add_argument(
        "--batch", type=int, default=1, help="prompts at a time, at most those of training"
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    chosen = [case for case in CASES if arguments.case in (None, case.name)]
    # Transformers compiles on a GPU alone.
    there = PARTS if device == "cuda" else PARTS[:-1]
    parts = [part for part in there if arguments.only in (None, part)]
    for case in [QUICK] if arguments.quick else chosen:
        provenance = Provenance.here(config=dataclasses.asdict(case), device=name, seed=SEED)
        measure(case, parts, arguments.batch, device, provenance, arguments.out)


if __name__ == "__main__":
    main()
