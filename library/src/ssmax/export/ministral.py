"""A folded model as a stock Ministral 3, which Transformers, vLLM, SGLang and MLX load."""

from typing import Any

from ssmax._extras import require
from ssmax.export.folding import Folded

_KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def as_ministral(folded: Folded, *, context: int) -> Any:
    """Build the folded model in Transformers' own class."""
    transformers = require("transformers", install="ssmax[hf]", purpose="the form ministral")
    rope = {
        "rope_type": "default",
        "rope_theta": folded.config["rope_parameters"]["rope_theta"],
        "llama_4_scaling_beta": folded.beta,
        "original_max_position_embeddings": 1,
    }
    config = transformers.Ministral3Config(
        **{key: folded.config.get(key) for key in _KEPT},
        rope_parameters=rope,
        # vLLM reads the same two numbers from here alone.
        llama_4_scaling={"beta": folded.beta, "original_max_position_embeddings": 1},
        max_position_embeddings=context,
        sliding_window=None,
    )
    dtype = folded.weights["model.embed_tokens.weight"].dtype
    model = transformers.Ministral3ForCausalLM.from_pretrained(
        None, config=config, state_dict=dict(folded.weights), dtype=dtype
    )
    return model.eval()
