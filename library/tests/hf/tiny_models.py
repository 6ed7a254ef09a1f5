"""Tiny models of many families, with an s that matters."""

import torch
import transformers as tf

SHARED = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
ENCODER = {key: value for key, value in SHARED.items() if key != "num_key_value_heads"}
BART = {
    "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "vocab_size": 99, "max_position_embeddings": 128,
}  # fmt: skip

CAUSAL = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SHARED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SHARED, head_dim=8)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SHARED, sliding_window=6)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**ENCODER)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SHARED)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**SHARED)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**SHARED, head_dim=8, sliding_window=6)
    ),
}
OTHERS = {
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**ENCODER)),
    "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**ENCODER)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=99)
    ),
}

MORE = {
    "gemma3_mixed": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            **SHARED, head_dim=8, sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "modernbert": lambda: tf.ModernBertForMaskedLM(
        tf.ModernBertConfig(**ENCODER, local_attention=8, global_attn_every_n_layers=2)
    ),
}  # fmt: skip

# Where a tiny Llama's parts are.
OFFLOADED = {
    "model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu",
    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk",
}  # fmt: skip


def build(name, *, seed=0, boost=30.0):
    """A model whose attention is sharp enough for s to matter."""
    torch.manual_seed(seed)
    model = (CAUSAL | OTHERS | MORE)[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_query = any(
                part in key for part in ("q_proj", "query", "qkv", "c_attn", ".q.", ".Wqkv")
            )
            if is_query and parameter.dim() == 2:
                parameter.mul_(boost)
    return model


def tokens_of(batch=2, length=11, seed=0):
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(model, tokens, mask=None):
    inputs = {"input_ids": tokens}
    if mask is not None:
        inputs["attention_mask"] = mask
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    return inputs


def randomise(model, seed=1):
    """An s and a b for every head."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("ssmax.s"):
                parameter.copy_(0.2 + 0.8 * torch.rand(parameter.shape, generator=generator))
            if name.endswith("ssmax.bias"):
                parameter.copy_(0.5 * torch.rand(parameter.shape, generator=generator))
    return model
