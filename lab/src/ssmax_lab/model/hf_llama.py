"""A native model as a Hugging Face Llama with the same s, in memory and as a folder."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ssmax._extras import require
from ssmax._files import whole_folder
from ssmax.hf.adapter import attach_filled
from ssmax.hf.conversion import Conversion
from ssmax.hf.hook import ATTRIBUTE
from ssmax_lab.model.llama import to_llama_weights
from ssmax_lab.model.model import LM


def as_llama(model: LM, *, end: int | None = None) -> nn.Module:
    """Build the converted LlamaForCausalLM that computes the same; `end` ends a text."""
    transformers = require("transformers", install="ssmax-lab[hf]", purpose="exporting a run")
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
    llama: Any = as_llama(model, end=None if end is None else end[0])
    with whole_folder(folder) as partial:
        llama.save_pretrained(partial)
        if tokenizer is None:
            return
        (partial / "tokenizer.json").write_bytes(tokenizer.encode())
        about = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if end is not None:
            about["eos_token"] = end[1]
        (partial / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
