"""What does conversion cost a Hugging Face model, in training and in compiled decoding?

    python benchmarks/hf_cost.py             # a Llama of 1.1 B, on a GPU
    python benchmarks/hf_cost.py --quick     # a small one, anywhere

A Llama with random weights and its copy, converted with s and b learnable, take turns in one
process: training steps (forward, backward, fused AdamW, bfloat16), and tokens by Transformers' own
`generate` with the static cache, which it compiles on a GPU. First the freshly converted copy must
give the same logits, bit for bit; then s is given the paper's first values, and n decides.
"""

import copy
import dataclasses
from collections.abc import Callable

import torch
import transformers
from torch import Tensor

import ssmax.hf
from harness import DEVICE, SEED, in_turns, milliseconds, parser, record, token_and_prompt
from ssmax import initial_s

PLAIN, CONVERTED = "Transformers, softmax (yardstick)", "converted"


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    shape: dict[str, int]
    batch: int
    tokens: int
    steps: int
    """Of one turn of training."""
    decoded: int
    """Tokens of one turn of decoding: many, so that the prompt's noise is not theirs."""
    turns: int
    """Hosts are shared: what a step takes changes by more than is measured."""

    def __str__(self) -> str:
        return f"{self.name} B{self.batch} T{self.tokens}"


LLAMA = Case("Llama 1.1 B", {"hidden_size": 2048, "intermediate_size": 5632,
                             "num_hidden_layers": 22, "num_attention_heads": 32,
                             "num_key_value_heads": 4, "vocab_size": 32000},
             8, 4096, 2, 256, 15)  # fmt: skip
QUICK = Case("small Llama", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_key_value_heads": 2,
                             "vocab_size": 256}, 2, 128, 2, 4, 3)  # fmt: skip


def random_tokens(case: Case) -> Tensor:
    return torch.randint(0, case.shape["vocab_size"], (case.batch, case.tokens), device=DEVICE)


def models_of(case: Case) -> dict[str, transformers.PreTrainedModel]:
    """One and its converted copy, of the same logits until s and b get the paper's values."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**case.shape, max_position_embeddings=2 * case.tokens)
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    converted = ssmax.hf.convert(copy.deepcopy(model))
    tokens = random_tokens(case)[:1]
    with torch.no_grad():
        if not torch.equal(model(tokens).logits, converted(tokens).logits):
            raise SystemExit(f"{case.name}: the converted copy differs; nothing was timed")
        for name, parameter in converted.named_parameters():
            if name.endswith("ssmax.s"):
                parameter.fill_(initial_s(case.tokens))
            elif name.endswith("ssmax.bias"):
                parameter.zero_()
    return {PLAIN: model, CONVERTED: converted}


def trainer_of(
    model: transformers.PreTrainedModel, tokens: Tensor, steps: int
) -> Callable[[], float]:
    """Make the function that trains and returns the milliseconds of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=tokens.is_cuda)

    def some_steps() -> None:
        for _ in range(steps):
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return lambda: milliseconds(some_steps) / steps


def decoder_of(
    model: transformers.PreTrainedModel, tokens: Tensor, count: int
) -> Callable[[], tuple[float, float]]:
    """Make the function that continues the prompts; milliseconds of a token and of a prompt."""

    def some_tokens(number: int) -> None:
        # The same lengths in every turn: cuDNN makes a plan for each, which takes longer than the
        # token, and whoever came first would pay for the other.
        model.generate(
            tokens, cache_implementation="static", do_sample=False, max_new_tokens=number,
            min_new_tokens=number, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip

    return lambda: token_and_prompt(some_tokens, count)


def main() -> None:
    given = parser(__doc__).parse_args()
    case = QUICK if given.quick else LLAMA
    models, tokens = models_of(case), random_tokens(case)

    def keep(mode: str, times: dict[str, list[float]]) -> None:
        record(given.out, "hf_cost", str(case), mode, times, config=dataclasses.asdict(case))

    runs = {name: trainer_of(model, tokens, case.steps) for name, model in models.items()}
    keep("train a step", in_turns(runs, case.turns))
    # Last: it takes minutes to compile.
    decoded = in_turns(
        {name: decoder_of(model, tokens, case.decoded) for name, model in models.items()},
        case.turns,
    )
    for i, mode in enumerate(("decode a token, static cache, compiled", "read a prompt")):
        keep(mode, {name: [one[i] for one in each] for name, each in decoded.items()})


if __name__ == "__main__":
    main()
