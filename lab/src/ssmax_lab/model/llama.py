"""Bring a model into the layout of Transformers' Llama, as weights or as a folder with s."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ssmax._extras import require
from ssmax._files import whole_folder
from ssmax.errors import UsageError
from ssmax_lab.model.config import LMConfig
from ssmax_lab.model.model import LM

_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INNER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "ff_norm.weight": "post_attention_layernorm.weight",
    "ff.gate.weight": "mlp.gate_proj.weight",
    "ff.up.weight": "mlp.up_proj.weight",
    "ff.down.weight": "mlp.down_proj.weight",
}


def to_llama_weights(model: LM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Give the state dict and configuration of the LlamaForCausalLM that computes the same.

    Llama knows softmax attention with full rotation only: anything else is refused, because it
    would load and score as another model.
    """
    config = model.config
    for name, plain in (("rule", "softmax"), ("qk_norm", False), ("window", None)):
        if getattr(config, name) != plain:
            raise UsageError(
                f"Llama has no {name}={getattr(config, name)!r}; only {name}={plain!r} can be "
                "written in its layout"
            )
    if config.rotary != config.head:
        raise UsageError(f"Llama rotates whole heads, got rotary_dim={config.rotary}")
    state = model.state_dict()
    weights = {theirs: state[ours] for ours, theirs in _names(config)}
    return weights, {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.train_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.theta},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "attention_dropout": config.dropout_p,
        # Llama's own would be 1 and 2, which are text here: generation would stop at them.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def as_llama(model: LM, *, end: int | None = None) -> nn.Module:
    """Build the converted LlamaForCausalLM that computes the same; `end` ends a text."""
    transformers = require("transformers", install="ssmax-lab[hf]", purpose="exporting a run")
    from ssmax.hf.adapter import attach_filled
    from ssmax.hf.conversion import Conversion
    from ssmax.hf.hook import ATTRIBUTE

    weights, values = to_llama_weights(model.with_rule("softmax"))
    config = transformers.LlamaConfig(**{**values, "eos_token_id": end})
    dtype = weights["model.embed_tokens.weight"].dtype
    llama = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=dict(weights), dtype=dtype
    )
    names = [f"model.layers.{layer}.self_attn" for layer in range(model.config.num_layers)]
    record = Conversion(
        rule=model.config.rule,
        init="paper",
        train_length=model.config.train_length,
        layers=tuple(names),
    )
    tensors: dict[str, Tensor] = {}
    blocks: Any = model.blocks
    for name, block in zip(names, blocks, strict=True):
        learned = block.attention.ssmax.state_dict()
        tensors |= {f"{name}.{ATTRIBUTE}.{key}": value for key, value in learned.items()}
        if model.table is not None:
            tensors[f"{name}.{ATTRIBUTE}.table.p"] = model.table.p.detach()
    return attach_filled(llama.eval(), record, tensors, what="the native model").eval()


def save_as_llama(
    model: LM, folder: Path, *, tokenizer: str | None = None, end: tuple[int, str] | None = None
) -> None:
    """Write the folder that `ssmax.hf.from_pretrained` loads.

    `tokenizer` is the content of a tokenizer.json, `end` the token that ends a text and its name.
    """
    with whole_folder(folder) as partial:
        llama: Any = as_llama(model, end=None if end is None else end[0])
        llama.save_pretrained(partial)
        if tokenizer is None:
            return
        (partial / "tokenizer.json").write_bytes(tokenizer.encode())
        about = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if end is not None:
            about["eos_token"] = end[1]
        (partial / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def _names(config: LMConfig) -> list[tuple[str, str]]:
    """Pair our name and Llama's for every weight that both have."""
    names = list(_OUTER.items())
    for layer in range(config.num_layers):
        names += [
            (f"blocks.{layer}.{ours}", f"model.layers.{layer}.{theirs}")
            for ours, theirs in _INNER.items()
        ]
    return names
