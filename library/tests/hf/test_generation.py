"""generate, in every way it decodes: what it says is what one full forward says of it.

Prompts are unequal and batched where the way of decoding takes batches; the full forward has no
cache, no padding and one row.
"""

import itertools

import pytest
import torch
from flash_stand_in import flash_attn  # noqa: F401 (a fixture)
from tiny_models import build, randomise, tokens_of
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import ssmax.hf

FAMILIES = ("llama", "qwen3", "mistral", "gpt2", "gemma3_mixed")
LENGTHS, NEW = (9, 4, 13), 6
OPTIONS = {
    "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip
BATCHED = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prefill in chunks": {"prefill_chunk_size": 4},
}


# Outside slow tests: all families with a cache, two in all ways.
ALL_WAYS = ("llama", "gemma3_mixed")


def ways(names, *, for_all=()):
    return [
        pytest.param(family, way, marks=() if is_few else pytest.mark.slow)
        for family in FAMILIES
        for way in names
        for is_few in [family in ALL_WAYS or way in for_all]
    ]


def converted(family):
    return randomise(ssmax.hf.convert(build(family), layers="all"))


def prompts():
    return [tokens_of(1, length, seed=length) for length in LENGTHS]


def left_padded():
    rows = [torch.nn.functional.pad(row[0], (max(LENGTHS) - row.shape[1], 0)) for row in prompts()]
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


@torch.no_grad()
def full_forward(model, tokens, length):
    """The logits from which the tokens after the prompt were taken."""
    return model(input_ids=tokens, use_cache=False).logits[0, length - 1 : -1]


@torch.no_grad()
def greedy_alone(model, prompt):
    for _ in range(NEW):
        logits = model(input_ids=prompt, use_cache=False).logits
        prompt = torch.cat((prompt, logits[:, -1:].argmax(-1)), dim=1)
    return prompt


@pytest.mark.parametrize(("family", "way"), ways(BATCHED, for_all=["dynamic cache"]))
def test_batches_of_unequal_prompts_give_the_logits_of_the_full_forward(family, way):
    model = converted(family)
    out = model.generate(**left_padded(), **OPTIONS, **BATCHED[way])
    for row, length in enumerate(LENGTHS):
        tokens = out.sequences[row : row + 1, -length - NEW :]
        wanted = full_forward(model, tokens, length)
        found = torch.stack(out.logits)[:, row]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(tokens, greedy_alone(model, prompts()[row]))


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_have_the_probabilities_of_the_full_forward(family):
    model = converted(family)
    out = model.generate(
        **left_padded(), **OPTIONS, num_beams=3, num_return_sequences=3, length_penalty=0.0,
        output_scores=True,
    )  # fmt: skip
    for i, (sequence, score) in enumerate(zip(out.sequences, out.sequences_scores, strict=True)):
        length = LENGTHS[i // 3]
        tokens = sequence[None, -length - NEW :]
        log_p = full_forward(model, tokens, length).log_softmax(-1)
        wanted = log_p.gather(-1, tokens[0, length:, None]).sum()
        torch.testing.assert_close(score, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "way"), ways(["assistant", "prompt lookup"]))
def test_guessed_tokens_are_checked_as_the_full_forward_would(family, way):
    model = converted(family)
    options = {"prompt_lookup_num_tokens": 3}
    if way == "assistant":
        options = {"assistant_model": build(family, seed=1)}
    for prompt in prompts():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS, **options)
        assert torch.equal(out.sequences, greedy_alone(model, prompt))
        found = torch.cat(out.logits)
        wanted = full_forward(model, out.sequences, prompt.shape[1])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


FEW = (("llama", "sdpa"), ("gemma3_mixed", "flash_attention_2"))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(*pair, marks=() if pair in FEW else pytest.mark.slow)
        for pair in itertools.product(
            ["llama", "qwen3", "mistral", "gemma3_mixed"], ["sdpa", "eager", "flash_attention_2"]
        )
    ],
)
def test_continuous_batching_is_greedy_alone(family, kind, flash_attn):  # noqa: F811 (the fixture)
    model = converted(family)
    alone = [greedy_alone(model, prompt) for prompt in prompts()]
    steps = [full_forward(model, tokens, n) for tokens, n in zip(alone, LENGTHS, strict=True)]
    model.config._attn_implementation = kind
    out = model.generate_batch(
        [prompt[0].tolist() for prompt in prompts()],
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        # Few tokens at a time: prompts are prefilled in parts, beside others that decode.
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=32, page_size=16, max_batch_tokens=16, max_blocks_per_request=0,
            auto_switch_to_flash=False, return_logprobs=True,
        ),
    )  # fmt: skip
    for answer, tokens, logits in zip(out.values(), alone, steps, strict=True):
        assert answer.generated_tokens == tokens[0, -NEW:].tolist()
        found = torch.tensor(answer.logprobs)
        wanted = logits.log_softmax(-1).amax(-1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
