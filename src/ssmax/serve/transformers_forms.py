"""Folders that Transformers loads: with an s of its own, or folded into a stock Ministral 3."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ssmax._extras import require
from ssmax.hf.adapter import attach_filled
from ssmax.hf.conversion import Conversion
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.remote_code import save_remote_code
from ssmax.lm import LM
from ssmax.serve.folding import Folded, native_as_softmax_llama
from ssmax.serve.vocabulary import End

_KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def write_converted(model: Any, folder: Path, *, end: int | None = None) -> None:
    """What `ssmax.hf.from_pretrained` loads: the model as converted, or the native one as Llama.

    With the file of code beside it, for those who have Transformers alone. `end` is the token that
    ends a text of a native model.
    """
    converted: Any = as_llama(model, end=end) if isinstance(model, LM) else model
    save_remote_code(converted, folder)


def as_llama(model: LM, *, end: int | None = None) -> nn.Module:
    """A native model as a converted LlamaForCausalLM."""
    transformers = require("transformers", extra="hf", purpose="the form hf")
    weights, values = native_as_softmax_llama(model)
    config = transformers.LlamaConfig(**{**values, "eos_token_id": end})
    llama = build(transformers, config, weights)
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
        learnt = block.attention.ssmax.state_dict()
        tensors |= {f"{name}.{ATTRIBUTE}.{key}": value for key, value in learnt.items()}
        if model.table is not None:
            tensors[f"{name}.{ATTRIBUTE}.table.p"] = model.table.p.detach()
    return attach_filled(llama, record, tensors, what="the native model").eval()


def write_ministral(folded: Folded, folder: Path, *, context: int) -> None:
    """Write a stock Ministral3ForCausalLM, which Transformers, vLLM and MLX load as it is."""
    as_ministral(folded, context=context).save_pretrained(folder)


def write_tokenizer_config(folder: Path, end: End | None) -> None:
    """What Transformers' tokenizer has to be told beside its tokenizer.json: what ends a text."""
    values = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end is not None:
        values["eos_token"] = end.text
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n")


def as_ministral(folded: Folded, *, context: int) -> Any:
    """The folded model, in Transformers' own class."""
    transformers = require("transformers", extra="hf", purpose="the form ministral")
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
    return build(transformers, config, folded.weights)


def build(transformers: Any, config: Any, weights: dict[str, Tensor]) -> Any:
    """A model of Transformers with these weights, in their dtype."""
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    dtype = weights["model.embed_tokens.weight"].dtype
    model = kind.from_pretrained(None, config=config, state_dict=dict(weights), dtype=dtype)
    return model.eval()
