"""The first Qwen, which Transformers has no class for, as the Qwen 2 that computes the same."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmax._extras import require
from ssmax.errors import UsageError

_NAMES = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".attn.c_proj.": ".self_attn.o_proj.",
    # It computes w1(x) silu(w2(x)).
    ".mlp.w1.": ".mlp.up_proj.",
    ".mlp.w2.": ".mlp.gate_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}


def as_qwen2(transformers: Any, folder: Path, values: dict[str, Any]) -> Any:
    """Load it in float32."""
    if values.get("use_dynamic_ntk"):
        raise UsageError(
            "use_dynamic_ntk changes the rotation with the length of the text, which no reference "
            "here does; set it to false in a copy of the folder to audit use_logn_attn"
        )
    config = transformers.Qwen2Config(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"] // 2,
        num_hidden_layers=values["num_hidden_layers"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values["num_attention_heads"],
        max_position_embeddings=values["max_position_embeddings"],
        rms_norm_eps=values["layer_norm_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": values.get("rotary_emb_base", 1e4)},
        tie_word_embeddings=values.get("tie_word_embeddings", False),
    )
    weights: dict[str, Tensor] = {}
    for name, tensor in _read(folder).items():
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        if ".attn.c_attn." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                weights[name.replace(".attn.c_attn.", f".self_attn.{part}_proj.")] = rows
        else:
            weights[name] = tensor
    return transformers.Qwen2ForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    )


def _read(folder: Path) -> dict[str, Tensor]:
    require("safetensors", install="ssmax[hf]", purpose="reading checkpoints")
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no .safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
