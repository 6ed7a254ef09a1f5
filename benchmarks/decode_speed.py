"""How fast does the paper's model decode, ours and in Transformers?

    python benchmarks/decode_speed.py             # 162 M parameters, on a GPU
    python benchmarks/decode_speed.py --quick     # a small model, anywhere

Random weights, the same for all: ours plainly and as a CUDA graph, Transformers' Llama with its
growing cache and with its static one, which it compiles. Every competitor has a process of its own,
reads a prompt and continues it greedily; the time of the prompt and of the first step, which may
capture a graph, is measured by itself and taken off. First the graph decoder's logits are
compared with the plain one's. Rows are appended to benchmarks/results.csv, each when it is there;
the ratio is the time over that of Transformers' growing cache.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ssmax_lab.model import LM, LMConfig
from ssmax_lab.model.generation import CudaGraphDecoder, PlainDecoder
from ssmax_lab.records import BenchmarkRow, Provenance, append_csv

RESULTS = Path(__file__).parent / "results.csv"
GROWING, STATIC = "Transformers, growing cache (yardstick)", "Transformers, static cache, compiled"
PLAIN, RECORDED = "ours, plain", "ours, CUDA graph"
COMPETITORS = (GROWING, STATIC, PLAIN, RECORDED)
SEED, TURNS = 0, 3
BEFORE = 2  # tokens: the prompt gives one, the first step the other


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    context: int
    new: int

    def __str__(self) -> str:
        return f"B{self.batch} S{self.context}"


CASES = [Case(1, 1024, 64), Case(1, 16384, 64), Case(16, 8192, 64)]
QUICK = [Case(2, 24, 6)]
SMALL = {"num_layers": 2, "num_heads": 4, "hidden_size": 64, "intermediate_size": 96,
         "vocab_size": 257, "train_length": 64}  # fmt: skip


def make_model(quick: bool, device: str) -> LM:
    torch.manual_seed(SEED)
    return LM(LMConfig(rule="ssmax", **(SMALL if quick else {}))).to(device).eval()


def narrow(device: str) -> contextlib.AbstractContextManager:
    on_gpu = device == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()


def check_agreement(model: LM, device: str) -> float:
    """Largest relative difference of the captured step's logits from the plain one's."""
    tokens = torch.randint(0, model.config.vocab_size, (2, 40), device=device)
    keep = torch.ones_like(tokens, dtype=torch.bool)
    keep[1, :13] = False
    room = {"batch": 2, "max_keys": 48}
    worst = 0.0
    with narrow(device):
        plain = PlainDecoder(model, **room)
        other = CudaGraphDecoder(model, **room, uses_graph=device == "cuda")
        plain.start(tokens, keep)
        other.start(tokens, keep)
        for step in range(6):
            one, two = (x.step(tokens[:, step]).float() for x in (plain, other))
            worst = max(worst, ((one - two).abs().max() / one.abs().max()).item())
    if not worst < 5e-2:
        raise SystemExit(f"the graph decoder differs by {worst:.1e}; nothing was timed")
    return worst


def continuer(name: str, case: Case, quick: bool, device: str) -> Callable[[int], None]:
    """A function that reads the prompts and makes so many tokens."""
    model = make_model(quick, device)
    shape = (case.batch, case.context)
    # No 0, which Transformers is told to take for padding.
    tokens = torch.randint(1, model.config.vocab_size, shape, device=device)
    if name in (PLAIN, RECORDED):
        decoder = "plain" if name == PLAIN or device == "cpu" else "cuda_graph"

        def ours(count: int) -> None:
            with narrow(device):
                model.generate(tokens, count, decoder=decoder)

        return ours

    import transformers

    config = model.config
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            vocab_size=config.vocab_size,
            max_position_embeddings=case.context + case.new,
        )
    )
    llama = llama.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    cache = {"cache_implementation": "static"} if name == STATIC else {}

    def theirs(count: int) -> None:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, **cache}
        llama.generate(tokens, **options, pad_token_id=0, eos_token_id=None)

    return theirs


def time_one(name: str, case: Case, quick: bool, device: str) -> dict[str, float]:
    """Milliseconds of a step after the first, medians; and the peak in MiB."""
    run = continuer(name, case, quick, device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    # The longer first: Transformers' static cache then has one size.
    taken: dict[int, list[float]] = {case.new + BEFORE: [], BEFORE: []}
    for turn in range(TURNS + 1):
        for count, times in taken.items():
            synchronize()
            start = time.perf_counter()
            run(count)
            synchronize()
            if turn:
                times.append(time.perf_counter() - start)
    long, short = (statistics.median(times) for times in taken.values())
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return {"ms": (long - short) / case.new * 1e3, "first_ms": short * 1e3, "mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    parser.add_argument("--only", choices=COMPETITORS, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, help="one of the shapes alone, from 0")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = QUICK if arguments.quick else CASES
    numbers = range(len(cases)) if arguments.case is None else [arguments.case]
    if arguments.only:
        found = time_one(arguments.only, cases[numbers[0]], arguments.quick, device)
        print("result", json.dumps(found))
        return
    error = check_agreement(make_model(arguments.quick, device), device)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    for number in numbers:
        case = cases[number]
        provenance = Provenance.here(config=dataclasses.asdict(case), device=where, seed=SEED)
        base: dict[str, float] = {}
        for name in COMPETITORS:
            command = [sys.executable, __file__, "--only", name, "--case", str(number)]
            command += ["--quick"] if arguments.quick else []
            out = subprocess.run(command, capture_output=True, text=True, check=False)
            if out.returncode:
                print(f"{case!s:12} {name:40} failed: {out.stderr.strip()[-300:]}", flush=True)
                if not base:
                    break  # without the yardstick there is no ratio
                continue
            found = json.loads(out.stdout.strip().splitlines()[-1].removeprefix("result "))
            base = base or found
            speed = case.batch / found["ms"] * 1e3
            print(
                f"{case!s:12} {name:40} {found['ms']:9.3f} ms  {speed:10,.0f} tokens/s, "
                f"first {BEFORE} {found['first_ms']:.0f} ms",
                flush=True,
            )
            row = BenchmarkRow(
                benchmark="decode_speed",
                competitor=name,
                shape=str(case),
                mode="decode a token",
                milliseconds=round(found["ms"], 4),
                ratio=round(found["ms"] / base["ms"], 4),
                peak_mib=round(found["mib"], 1),
                memory_ratio=round(found["mib"] / base["mib"], 4) if base["mib"] else 0.0,
                error=float(f"{error:.1e}"),
                provenance=provenance,
            )
            append_csv(arguments.out, [row])


if __name__ == "__main__":
    main()
