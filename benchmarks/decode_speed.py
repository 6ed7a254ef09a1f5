"""How fast does the paper's model decode, ours and in Transformers?

    python benchmarks/decode_speed.py             # 162 M parameters, on a GPU
    python benchmarks/decode_speed.py --quick     # a small model, anywhere

Random weights, the same for all: ours plainly and as a CUDA graph, Transformers' Llama with its
growing cache and with its static one, which it compiles. Every competitor has a process of its own,
reads a prompt and continues it greedily; the time of the prompt and of the first step, which may
capture a graph, is measured by itself and taken off. First the graph decoder's logits are
compared with the plain one's.
"""

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Callable

import torch

from harness import (
    DEVICE,
    SEED,
    in_processes,
    in_turns,
    parser,
    peak_mib,
    record,
    token_and_prompt,
)
from ssmax_lab.model import LM, LMConfig
from ssmax_lab.model.generation import CudaGraphDecoder, PlainDecoder

GROWING, STATIC = "Transformers, growing cache (yardstick)", "Transformers, static cache, compiled"
PLAIN, RECORDED = "ours, plain", "ours, CUDA graph"
COMPETITORS = (GROWING, STATIC, PLAIN, RECORDED)


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


def make_model(quick: bool) -> LM:
    torch.manual_seed(SEED)
    return LM(LMConfig(rule="ssmax", **(SMALL if quick else {}))).to(DEVICE).eval()


def narrow() -> contextlib.AbstractContextManager:
    on_gpu = DEVICE == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()


def check_agreement(model: LM) -> float:
    """Largest relative difference of the captured step's logits from the plain one's."""
    tokens = torch.randint(0, model.config.vocab_size, (2, 40), device=DEVICE)
    keep = torch.ones_like(tokens, dtype=torch.bool)
    keep[1, :13] = False
    room = {"batch": 2, "max_keys": 48}
    worst = 0.0
    with narrow():
        plain = PlainDecoder(model, **room)
        other = CudaGraphDecoder(model, **room, uses_graph=DEVICE == "cuda")
        plain.start(tokens, keep)
        other.start(tokens, keep)
        for step in range(6):
            one, two = (x.step(tokens[:, step]).float() for x in (plain, other))
            worst = max(worst, ((one - two).abs().max() / one.abs().max()).item())
    if not worst < 5e-2:
        raise SystemExit(f"the graph decoder differs by {worst:.1e}; nothing was timed")
    return worst


def continuer(name: str, case: Case, quick: bool) -> Callable[[int], None]:
    """A function that reads the prompts and makes so many tokens."""
    model = make_model(quick)
    shape = (case.batch, case.context)
    # No 0, which Transformers is told to take for padding.
    tokens = torch.randint(1, model.config.vocab_size, shape, device=DEVICE)
    if name in (PLAIN, RECORDED):
        decoder = "plain" if name == PLAIN or DEVICE == "cpu" else "cuda_graph"

        def ours(count: int) -> None:
            with narrow():
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
    llama = llama.to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32).eval()
    cache = {"cache_implementation": "static"} if name == STATIC else {}

    def theirs(count: int) -> None:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, **cache}
        llama.generate(tokens, **options, pad_token_id=0, eos_token_id=None)

    return theirs


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=COMPETITORS, help="one, in this process, as JSON")
    arguments.add_argument("--case", type=int, help="one of the shapes alone, from 0")
    given = arguments.parse_args()
    cases = QUICK if given.quick else CASES
    numbers = range(len(cases)) if given.case is None else [given.case]
    if given.only:
        case = cases[numbers[0]]
        run = continuer(given.only, case, given.quick)
        taken = in_turns({given.only: lambda: token_and_prompt(run, case.new)[0]}, turns=3)
        print(json.dumps({"ms": statistics.median(taken[given.only]), "mib": peak_mib()}))
        return
    error = check_agreement(make_model(given.quick))
    for number in numbers:
        words = ["--case", str(number), *(["--quick"] if given.quick else [])]
        found = in_processes(__file__, COMPETITORS, 1, *words)
        record(
            given.out,
            "decode_speed",
            str(cases[number]),
            "decode a token",
            {name: [one["ms"] for one in each] for name, each in found.items()},
            config=dataclasses.asdict(cases[number]),
            peaks={name: max(one["mib"] for one in each) for name, each in found.items()},
            errors={RECORDED: error},
        )


if __name__ == "__main__":
    main()
