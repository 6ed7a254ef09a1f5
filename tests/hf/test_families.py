"""Every family that can be built tiny: n is the number of keys that eager attention weighs.

Families are built from their own default configuration made small; one that cannot be, for reasons
of its own, is counted and named. What is converted is compared, left-padded, with the weights that
attention gives: no mask is read by the test.
"""

import inspect
import warnings

import pytest
import torch
from transformers.models.auto import modeling_auto

import ssmax.hf
from ssmax.hf.hook import watched

SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "n_inner": 48, "ffn_hidden_size": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_kv": 8, "d_head": 8,
    "vocab_size": 64, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LENGTH, PADDING = 10, 3
LARGEST = 5_000_000


def tiny(config_class, model_class):
    config = config_class()
    text = config.get_text_config()
    for target in {id(config): config, id(text): text}.values():
        for name, value in SMALL.items():
            is_there = getattr(target, name, None) is not None
            if name == "head_dim" and hasattr(target, "qk_rope_head_dim"):
                value = target.qk_rope_head_dim = 8
            if name == "num_key_value_heads" and hasattr(target, "kv_lora_rank"):
                value = 4
            if is_there and not isinstance(getattr(target, name), (list, dict, bool)):
                setattr(target, name, value)
        kinds = getattr(target, "layer_types", None)
        if kinds:
            # One layer of each kind, so that none is missed.
            every = list(dict.fromkeys(kinds))
            target.layer_types = every
            target.num_hidden_layers = len(every)
        target.use_cache = False
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True
    config._attn_implementation = "eager"
    # As shapes first: a size that none of these names reaches would fill the memory.
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its tiny configuration has {size:,} parameters")
    torch.manual_seed(0)
    return model_class(config).eval()


@torch.no_grad()
def disagreement(model):
    """None where every converted layer counts as its weights do; else what differs."""
    tokens = torch.arange(3, 3 + LENGTH).view(1, -1)
    mask = torch.ones_like(tokens)
    mask[:, :PADDING] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    ssmax.hf.convert(model, layers="all")
    names = {module: name for name, module in ssmax.hf.conversion.converted_modules(model)}
    counts, weights = {}, {}
    handles = []
    for module in names:

        def keep(module, arguments, outputs):
            found = [out for out in outputs if isinstance(out, torch.Tensor) and out.dim() == 4]
            if found:
                weights.setdefault(module, found[0][0])

        handles.append(module.register_forward_hook(keep))
    with watched(lambda module, n, query: counts.setdefault(module, n)):
        model(**inputs)
    for handle in handles:
        handle.remove()
    if not counts:
        return "no converted layer was reached"
    for module, n in counts.items():
        if module not in weights:
            continue
        seen = (weights[module] > 0).sum(-1)
        mine = n.reshape(-1, n.shape[-1])[-1]
        if not torch.equal(seen[0][PADDING:], mine[PADDING:]):
            return f"{names[module]}: {mine.tolist()} for {seen[0].tolist()}"
    return None if weights else "no attention weights came back"


def survey(mapping):
    right, wrong, refused, not_built = [], {}, {}, {}
    for config_class, model_class in mapping.items():
        name = config_class.model_type
        model_class = model_class[0] if isinstance(model_class, tuple) else model_class
        try:
            model = tiny(config_class, model_class)
        except Exception as error:  # whatever a family's own checks raise, or it is too large
            not_built[name] = f"{type(error).__name__}: {error}"
            continue
        try:
            found = disagreement(model)
        except ValueError as error:
            refused[name] = str(error)
        except Exception as error:  # a tiny configuration that builds but does not run
            not_built[name] = f"{type(error).__name__}: {error}"
        else:
            if found is None:
                right.append(name)
            else:
                wrong[name] = found
    return right, wrong, refused, not_built


@pytest.mark.filterwarnings("ignore")
def test_every_causal_family_counts_what_it_sees():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right, wrong, refused, _ = survey(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING)
    assert not wrong
    assert {"bloom", "mpt", "gptj"} <= set(refused)
    assert len(right) >= 100
