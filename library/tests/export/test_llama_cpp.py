"""llama.cpp itself on what was exported. `make test-engines` builds it, which takes minutes."""

import copy
import importlib.util

import pytest
import torch
from small_llama import byte_bpe, llama

import ssmax.hf
from ssmax.export import export

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None,
        reason="needs llama.cpp; make test-engines builds it",
    ),
]
TOKENIZER = byte_bpe()
NEW, FLOAT32_CACHE = 200, {"type_k": 0, "type_v": 0}
SAME_CHOICES = {"float32": 1.0, "bfloat16": 0.97, "q8_0": 0.95}
"""At least; measured were 1, 0.998 and 0.984."""


@pytest.fixture(scope="module")
def model():
    return llama(vocab_size=TOKENIZER.get_vocab_size())


@pytest.fixture(scope="module")
def prompt(model):
    # Nearly five times the training length.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (300,), generator=generator).tolist()


def continued(model, prompt):
    tokens = torch.tensor([prompt])
    everything = torch.ones_like(tokens)  # else the end of a text is taken for padding
    out = model.generate(
        tokens, attention_mask=everything, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
    )
    return out[0].tolist()[len(prompt) :]


def opened(model, prompt, folder, weights="float32", **cache):
    from llama_cpp import Llama

    export(model, folder, to="gguf", weights=weights, prompt=prompt, tokenizer=TOKENIZER.to_str())
    path = str(folder / "model.gguf")
    return Llama(path, n_ctx=1024, logits_all=True, verbose=False, n_threads=1, **cache)


def logits_of(engine, tokens):
    """Prefill."""
    engine.reset()
    engine.eval(tokens)
    return torch.tensor(engine.scores[: engine.n_tokens]).float()


def test_llama_cpp_continues_greedily_as_we_do_beyond_the_training_length(model, prompt, tmp_path):
    engine = opened(model, prompt, tmp_path / "out", **FLOAT32_CACHE)
    ours = continued(model, prompt)
    engine.eval(prompt)
    theirs = []
    for _ in range(NEW):
        theirs.append(int(engine.scores[engine.n_tokens - 1].argmax()))
        engine.eval(theirs[-1:])
    assert theirs == ours
    assert len(set(ours)) > NEW / 4  # no loop of a few tokens
    engine.close()


@torch.no_grad()
@pytest.mark.parametrize("weights", SAME_CHOICES)
def test_llama_cpp_agrees_as_far_as_its_weights_do(weights, model, prompt, tmp_path, capsys):
    tokens = prompt + continued(model, prompt)
    engine = opened(model, prompt, tmp_path / "out", weights, **FLOAT32_CACHE)
    theirs, ours = logits_of(engine, tokens), model(torch.tensor([tokens])).logits[0]
    engine.close()
    difference = (theirs - ours).abs().max().item()
    same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean().item()
    with capsys.disabled():
        print(f"\nllama.cpp, {weights}: logits within {difference:.2g}, {same:.1%} of choices same")
    assert same >= SAME_CHOICES[weights]
    plain = ssmax.hf.revert(copy.deepcopy(model))(torch.tensor([tokens])).logits[0]
    assert difference < 0.2 * (plain - ours).abs().max()


def test_llama_cpp_cuts_text_into_our_tokens(model, prompt, tmp_path):
    engine = opened(model, prompt, tmp_path / "out")
    text = "def f(x):\n\treturn x + 12345  # it's naïve — 世界 <|endoftext|>"
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert engine.tokenize(text.encode(), add_bos=False, special=False) == tokens
    assert engine.detokenize(tokens).decode() == text
    engine.close()
