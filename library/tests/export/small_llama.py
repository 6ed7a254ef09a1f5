"""A converted Llama, small enough to be written in seconds and sharp enough for s to matter."""

import torch
import transformers
from tiny_models import randomise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import ssmax.hf

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
END = "<|endoftext|>"


def llama(rule="ssmax", *, train_length=64, **changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    model = transformers.LlamaForCausalLM(config).eval()
    ssmax.hf.convert(model, rule=rule, init="paper", train_length=train_length)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.weight"):
                parameter.mul_(30)
        # Choices that rounding does not change.
        model.lm_head.weight.mul_(40)
    return randomise(model)


def byte_bpe():
    """A tokenizer of bytes and common pairs, digits one by one, whose first token ends a text."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    cuts = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cuts])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the return of the other in the end " * 20], trainer)
    return tokenizer
