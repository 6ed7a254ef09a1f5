"""A folded model as one file of llama.cpp, of its architecture mistral3; and back, to check it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.export.folding import Folded

ARCHITECTURE = "mistral3"
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    folded: Folded,
    path: Path,
    *,
    weights: str,
    context: int,
    vocabulary: dict[str, Any] | None,
) -> None:
    """Write every matrix in the chosen type but W_q, which stays float32: s / beta is too small."""
    gguf = require("gguf", install="ssmax[export]", purpose="the form gguf")
    types = gguf.GGMLQuantizationType
    chosen = {"float32": types.F32, "bfloat16": types.BF16, "q8_0": types.Q8_0}[weights]
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _write_shape(gguf, writer, folded, context=context)
    writer.add_file_type(
        {types.F32: gguf.LlamaFileType.ALL_F32, types.BF16: gguf.LlamaFileType.MOSTLY_BF16,
         types.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0}[chosen]
    )  # fmt: skip
    _write_vocabulary(writer, vocabulary)
    for ours, theirs in _names(folded.config):
        if ours not in folded.weights:
            continue  # a tied head, which llama.cpp takes from the embedding
        tensor = _reordered(ours, folded.weights[ours].float().cpu(), folded.config, to_gguf=True)
        kind = types.F32 if tensor.dim() == 1 or "attn_q" in theirs else chosen
        try:
            stored = gguf.quants.quantize(tensor.numpy(), kind)
        except gguf.quants.QuantError as error:
            raise UsageError(
                f"{weights} stores rows in blocks, and {ours} has rows of {tensor.shape[-1]} "
                f"({error}); take float32 or bfloat16"
            ) from error
        writer.add_tensor(theirs, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_weights(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Read the weights of a file in Llama's layout, float32 whatever they are stored in."""
    gguf = require("gguf", install="ssmax[export]", purpose="reading GGUF")
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = {}
    for ours, theirs in _names(config):
        if theirs in stored:
            values = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
            tensor = torch.from_numpy(values.copy())
            weights[ours] = _reordered(ours, tensor, config, to_gguf=False)
    return weights


def _write_shape(gguf: Any, writer: Any, folded: Folded, *, context: int) -> None:
    config = folded.config
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(context)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    # llama.cpp takes beta from the first, and M from the length that YaRN would start at.
    writer.add_float32(f"{ARCHITECTURE}.attention.temperature_scale", folded.beta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_orig_ctx_len(1)


def _write_vocabulary(writer: Any, vocabulary: dict[str, Any] | None) -> None:
    if vocabulary is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_eos_token_id(vocabulary["end"])
    writer.add_add_bos_token(False)


def _reordered(name: str, tensor: Tensor, config: dict[str, Any], *, to_gguf: bool) -> Tensor:
    """Reorder channels: llama.cpp rotates neighbours, Llama's layout those half a head apart."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    pairs = (2, -1) if to_gguf else (-1, 2)
    heads = tensor.unflatten(0, (-1, _head_dim(config)))
    return heads.unflatten(1, pairs).transpose(1, 2).flatten(0, 2).contiguous()


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _names(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Pair Llama's name of every weight with llama.cpp's."""
    names = list(_OUTER.items())
    for layer in range(config["num_hidden_layers"]):
        names += [
            (f"model.layers.{layer}.{ours}.weight", f"blk.{layer}.{theirs}.weight")
            for ours, theirs in _INNER.items()
        ]
    return names
