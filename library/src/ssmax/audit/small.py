"""A small model with random weights and another's scale: what engines do shows without its size."""

import re
from pathlib import Path
from typing import Any

import torch

from ssmax._extras import require
from ssmax.audit.scales import text_config
from ssmax.errors import UsageError
from ssmax.hf.sources import read_config
from ssmax.hf.written_config import KEY

LAYERS = 4
_SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "intermediate_size_mlp": 192,
    "moe_intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": LAYERS, "num_dense_layers": LAYERS,
    "interleave_moe_layer_step": LAYERS + 1,
}  # fmt: skip
_HEADS = {"head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 16, "v_head_dim": 32, "qk_head_dim": 32}  # fmt: skip
SHARPER = 80.0
"""Of queries: with logits this far apart a few of thousands of keys are seen."""
FARTHER = 20.0
"""Of the logits of tokens."""


def write_small(folder: Path, out: Path) -> Path:
    """Write a small random model of a config's type, which keeps all that concerns its scale."""
    transformers = require("transformers", install="ssmax[hf]", purpose="ssmax.audit")
    values = text_config(read_config(folder))
    if KEY in values:
        raise UsageError("a small copy has other heads than s was made for; leave small out")
    if values["model_type"] not in transformers.CONFIG_MAPPING:
        raise UsageError(f"Transformers has no type {values['model_type']!r} to make smaller")
    kind = transformers.CONFIG_MAPPING[values["model_type"]]
    depth = values.get("num_hidden_layers") or kind().num_hidden_layers
    config = kind.from_dict({**values, **_changes(kind(), values, depth)})
    torch.manual_seed(0)
    # Not by its Auto class, which does not know all of them.
    name = re.sub(r"(Text)?Config$", "ForCausalLM", kind.__name__)
    model = getattr(transformers, name)._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "q_b_proj.weight")):
                parameter.mul_(SHARPER)
            if name.endswith("q_norm.weight"):
                parameter.fill_(4.0)
        model.get_output_embeddings().weight.mul_(FARTHER)
    model.save_pretrained(out)
    return out


def _changes(default: Any, values: dict[str, Any], depth: int) -> dict[str, Any]:
    """Find what makes a config small, of the keys that it knows."""
    known = default.to_dict()
    changes: dict[str, Any] = {
        key: size for key, size in {**_SIZES, **_HEADS}.items() if known.get(key) is not None
    }
    changes["head_dim"] = _HEADS["head_dim"]
    if values.get("num_key_value_heads") == values.get("num_attention_heads"):
        changes["num_key_value_heads"] = _SIZES["num_attention_heads"]
    for key, value in values.items():
        # The pattern of layers repeats to the end.
        if isinstance(value, list) and len(value) == depth:
            changes[key] = value[-LAYERS:]
        if key.endswith("_token_id"):
            changes[key] = None
    if "moe_layers" in known:
        changes["moe_layers"] = []
    changes |= {"tie_word_embeddings": False, "quantization_config": None, "dtype": "float32"}
    return changes
