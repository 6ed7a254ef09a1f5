"""Every family of the installed Transformers, built tiny, converted and looked at.

    python tests/hf/families.py            the whole survey as a table
    python tests/hf/families.py llama t5   some of it

A family is built from its own default configuration made small; one that cannot be, for reasons of
its own, is named with the reason. What is right: converted it is the same to the bit, every
converted layer counts the keys that its eager attention gives weight to, behind padding too,
`verify` says so with eager code and SDPA, a padded batch, decoded with a cache where the family
decodes, gives the logits of every row alone and in one forward, as far as the unconverted model
does, saved and loaded it is the same, also by remote code, and reverted it is what it was.
"""

import inspect
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import torch
import transformers
from transformers import AttentionInterface
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import CONFIG_MAPPING, modeling_auto

import ssmax.hf
from ssmax.hf.adapter import ssmax_tensors
from ssmax.hf.hook import watched
from ssmax.hf.layers import converted_modules

MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}
SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32,
    "embedding_size": 32, "projection_dim": 32, "out_hidden_size": 32, "output_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "n_inner": 48, "ffn_hidden_size": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "depth": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_kv": 8, "d_head": 8,
    "vocab_size": 64, "vocab_size_per_layer_input": 64, "entity_vocab_size": 64,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16,
    "base_channels": 32, "num_embeddings": 64, "num_res_blocks": 1,
    "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Not given by default but taken from others that are.
DERIVED = ("head_dim", "num_key_value_heads")
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
# What a family, or a part of one, needs beside.
PATCHES = {
    "bailing_hybrid": {"num_expert_group": 1, "num_experts_per_token": 2},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "cosmos3_edge_text": {"rope_parameters": MROPE},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {
        "num_key_value_heads": 4, "adapter_input_size": 32, "adapter_out_dim": 32,
        "downsample_hidden_size": 4, "conv_output_size": 64,
    },
    "dots3_note_text": {
        "per_layer_config": {
            "1": {
                "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16,
                "kv_lora_rank": 16, "head_dim": 16, "qk_nope_head_dim": 12, "v_head_dim": 8,
                "qk_rope_head_dim": 4,
            }
        },
        "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8,
        "shared_experts_intermediate_size": 16,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "esm": {"vocab_size": 64, "mask_token_id": 3, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "mamba_d_state": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"global_head_dim": 8},
    "glm4v_moe_text": {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "glmga_text": {"rope_parameters": MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_vl_text": {"rope_parameters": MROPE},
    "inkling2_vision": {"text_hidden_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "mamba2": {"num_heads": 8},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        }
    },
    "neomme": {"head_dim": 16, "hidden_size": 64},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 1, "ngram_vocab_size_base": 64, "ple_embed_dim": 32,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "num_key_value_heads": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "step3p5": {"sliding_window": 6},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
LARGEST = 30_000_000
UNEQUAL, EQUAL, NEW = (10, 7), (10, 10), 4
TOLERANCE = 1e-4
# Parts of others, which no Auto class makes from their configs.
NO_AUTO_CLASS = ("Emu3ForCausalLM", "EvollaForProteinText2Text", "MllamaForCausalLM")


def small(config_class):
    """A configuration of its class that is small, its parts too."""
    default = config_class()
    values = {}
    for name, value in SMALL.items():
        before = default.__dict__.get(name)
        is_number = isinstance(before, int) and not isinstance(before, bool)
        is_derived = name in default.__dict__ and name in DERIVED
        if is_number or is_derived:
            values[name] = value
    if "kv_lora_rank" in values:
        values |= {"num_key_value_heads": 4, "head_dim": 8}
    kinds = default.__dict__.get("layer_types")
    if kinds:
        # One layer of each kind, so that none is missed.
        values["layer_types"] = list(dict.fromkeys(kinds))
        values["num_hidden_layers"] = len(values["layer_types"])
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            values[name] = small(type(part)).to_dict()
    # What is told layer by layer is told of as many as there are.
    depth = default.__dict__.get("num_hidden_layers")
    for name, value in default.__dict__.items():
        if isinstance(value, list) and len(value) == depth and name not in values:
            values[name] = value[: values["num_hidden_layers"]]
    return config_class(**values | PATCHES.get(config_class.model_type, {}))


def build(kind, family):
    """A tiny model with attention of ordinary sharpness."""
    model_class = MAPPINGS[kind][CONFIG_MAPPING[family]]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    config = small(model_class.config_class or CONFIG_MAPPING[family])
    if kind in ("causal", "masked") and hasattr(config, "is_decoder"):
        # The same encoder is in both tables: it decodes in one.
        config.is_decoder = kind == "causal"
    # As shapes first: a size that none of these names reaches would fill the memory.
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its tiny configuration has {size:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ("att" in name.lower() or name.endswith("linear.weight")):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            if name.endswith("qk_norm.temp"):  # Zaya's keys start as nothing
                parameter.fill_(1.0)
    return model


def rows(kind, lengths=UNEQUAL):
    """Two rows, and where each of them is real."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 40, (2, lengths[0]), generator=generator)
    mask = torch.ones_like(tokens)
    # Encoders take padding at the end; what is decoded must have it at the start.
    hidden = slice(lengths[1], None) if kind in ("masked", "seq2seq") else slice(0, -lengths[1])
    mask[1, hidden] = 0
    return tokens * mask, mask


def call(model, **inputs):
    """One forward without a cache, whatever the family takes."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return model(**inputs)


@torch.no_grad()
def logits_of(model, inputs):
    """What padding is given may be no number."""
    return call(model, **inputs).logits.nan_to_num()


@torch.no_grad()
def gap(model, kind, lengths):
    """How far a batch, decoded with a cache if the family decodes, is from each row alone."""
    tokens, mask = rows(kind, lengths)
    alone = [row[real.bool()][None] for row, real in zip(tokens, mask, strict=True)]
    if kind == "masked":
        batch = call(model, input_ids=tokens, attention_mask=mask).logits
        pairs = [
            (call(model, input_ids=row).logits[0], logits[real.bool()])
            for row, logits, real in zip(alone, batch, mask, strict=True)
        ]
    else:
        out = model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, num_beams=1,
            eos_token_id=None, pad_token_id=0, decoder_start_token_id=1, use_cache=True,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        steps = torch.stack(out.logits, dim=1)
        pairs = []
        for row, logits, sequence in zip(alone, steps, out.sequences, strict=True):
            if kind == "seq2seq":
                inputs = {"input_ids": row, "decoder_input_ids": sequence[None, :-1]}
            else:
                inputs = {"input_ids": torch.cat((row, sequence[None, -NEW:-1]), dim=1)}
            pairs.append((call(model, **inputs).logits[0, -NEW:], logits))
    return max((one - other).abs().max().item() for one, other in pairs)


@torch.no_grad()
def count_against_weights(model):
    """Raises where a layer's n is not the number of keys that eager attention gives weight to."""
    tokens, mask = rows("causal")
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
        if "decoder_attention_mask" in inspect.signature(model.forward).parameters:
            inputs["decoder_attention_mask"] = mask
    names = {module: name for name, module in converted_modules(model)}
    counts, weights, handles = {}, {}, []
    for module in names:

        def keep(module, arguments, outputs):
            # Weights are never negative, as T5's position bias beside them is; some come in parts.
            found = [out for out in outputs if isinstance(out, torch.Tensor) and out.dim() == 4]
            found = [out for out in found if out.min() >= 0 and out.max() > 0]
            weights.setdefault(module, torch.cat(found, dim=-1) if found else None)

        handles.append(module.register_forward_hook(keep))
    with watched(lambda module, n, *_: counts.setdefault(module, n)):
        call(model, **inputs)
    for handle in handles:
        handle.remove()
    told = 0
    for module, n in counts.items():
        if weights.get(module) is None:
            continue
        told += 1
        seen_BHQ = (weights[module] > 0).sum(-1)
        n_BHQ = (n.unsqueeze(1) if n.dim() == 2 else n).expand_as(seen_BHQ)
        real = mask.bool()[:, None, -seen_BHQ.shape[-1] :].expand_as(seen_BHQ)
        if not torch.equal(seen_BHQ[real], n_BHQ[real]):
            raise ValueError(f"{names[module]}: n = {n.tolist()} for {seen_BHQ[:, 0].tolist()}")
    return told


def comes_back(model, inputs):
    """True where a whole checkpoint gives the same s, to the bit, and the same logits.

    The class of remote code has to read all of its weights, to the bit.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = ssmax.hf.from_pretrained(folder, attn_implementation="eager").eval()
        if type(model).__name__ not in NO_AUTO_CLASS:
            ssmax.hf.save_remote_code(model, folder)
            check_weights(model, remote_weights(model, folder))
    mine, theirs = ssmax_tensors(model), ssmax_tensors(loaded)
    has_s = all(torch.equal(theirs.pop(name), s) for name, s in mine.items()) and not theirs
    # Weights that are read from a file may be aligned otherwise, and sums end in another bit.
    return has_s and torch.allclose(logits_of(loaded, inputs), logits_of(model, inputs), atol=1e-5)


def check_weights(model, found):
    for name, wanted in model.state_dict().items():
        if not torch.equal(found.pop(name, torch.empty(0)).nan_to_num(), wanted.nan_to_num()):
            raise ValueError(f"remote code reads another {name}")


def remote_weights(model, folder):
    """As remote code reads them; nothing of it stays, neither its hook nor its modules."""
    hook, path = AttentionInterface.get_interface, [*sys.path]
    name = f"modeling_ssmax.SSMax{type(model).__name__}"
    try:
        with mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", f"{folder}/modules"):
            remote = get_class_from_dynamic_module(name, folder)
        return remote.from_pretrained(folder).state_dict()
    finally:
        AttentionInterface.get_interface, sys.path[:] = hook, path
        for module in [one for one in sys.modules if one.startswith("transformers_modules")]:
            del sys.modules[module]


def randomise(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, module in converted_modules(model):
            scale = module.ssmax
            scale.s.copy_(0.2 + 0.8 * torch.rand(scale.s.shape, generator=generator))
            scale.bias.copy_(0.5 * torch.rand(scale.bias.shape, generator=generator))


@dataclass(kw_only=True)
class Found:
    """What a look at a family gave."""

    kind: str
    family: str
    outcome: str
    """right; unpadded or own gap, where the unconverted model itself differs behind padding or at
    all; wrong, refused or not built."""
    detail: str = ""
    layers: int = 0
    weights: int = 0
    """Layers whose own weights were compared; the kernel was asked for all of them."""
    plain_gap: float = float("nan")
    gap: float = float("nan")
    effect: float = float("nan")
    """How much s and b change the logits: what a wrong n would show in."""

    def __str__(self):
        numbers = f"{self.layers:3} {self.weights:3} {self.plain_gap:8.1e} {self.gap:8.1e}"
        line = f"{self.kind:10} {self.family:26} {self.outcome:9} {numbers} {self.effect:8.1e}"
        return f"{line} {self.detail}".rstrip()


HEADER = f"{'kind':10} {'family':26} {'outcome':9} lay wei plain gap      gap   effect"


def look(kind, family):
    """Build, convert and compare one family."""
    found = Found(kind=kind, family=family, outcome="not built")
    try:
        model = build(kind, family)
    except Exception as error:  # whatever a family's own checks raise, or it is too large
        found.detail = _line(error)
        return found
    attention = "all" if kind in ("masked", "seq2seq") else "self"
    try:
        ssmax.hf.convert(model, layers="all", attention=attention)
    except ValueError as error:
        found.outcome, found.detail = "refused", _line(error)
        return found
    if kind == "seq2seq" and not model.config.is_encoder_decoder:
        kind = "causal"
    tokens, mask = rows(kind)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    ssmax.hf.revert(model)
    model.set_attn_implementation("eager")
    try:
        before = logits_of(model, inputs)
    except Exception as error:  # what is built, but does not run on text alone
        found.detail = f"does not run: {_line(error)}"
        return found
    ssmax.hf.convert(model, layers="all", attention=attention)
    found.outcome = "wrong"
    try:
        if not torch.equal(logits_of(model, inputs), before):
            raise ValueError("s = 0 and b = 1 change its logits")
        for implementation in ("eager", "sdpa"):
            if implementation == "sdpa" and not model._supports_sdpa:
                continue
            model.set_attn_implementation(implementation)
            found.layers = ssmax.hf.verify(model).layers
            if implementation == "eager":
                found.weights = count_against_weights(model)
        try:
            # s = 0 and b = 1: the unconverted model, to the bit.
            found.plain_gap = gap(model, kind, UNEQUAL)
            is_padded = found.plain_gap < TOLERANCE
            if not is_padded and gap(model, kind, EQUAL) >= TOLERANCE:
                found.outcome = "own gap"
                return found
        except Exception as error:  # the family's own generation does not run
            found.outcome, found.detail = "own gap", f"does not generate: {_line(error)}"
            return found
        randomise(model)
        found.gap = gap(model, kind, UNEQUAL if is_padded else EQUAL)
        model.set_attn_implementation("eager")
        found.effect = (logits_of(model, inputs) - before).abs().max().item()
        if not comes_back(model, inputs):
            raise ValueError("saved and loaded, it is another")
        if not torch.equal(logits_of(ssmax.hf.revert(model), inputs), before):
            raise ValueError("reverted, it is not what it was")
    except Exception as error:
        found.detail = _line(error)
        return found
    if found.gap < min(TOLERANCE, found.effect / 10):
        found.outcome = "right" if is_padded else "unpadded"
    return found


def _line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())


def families():
    """(kind, family) of every one; by name, for each loads its code when it is looked at."""
    for kind, mapping in MAPPINGS.items():
        for family in mapping._model_mapping:
            if family in CONFIG_MAPPING:
                yield kind, family


def main(wanted):
    """Print the survey, of some kinds or families if any are named."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    tally = Counter()
    print(HEADER)
    for kind, family in families():
        if not wanted or {family, kind} & set(wanted):
            found = look(kind, family)
            tally[kind, found.outcome] += 1
            print(found, flush=True)
    for (kind, outcome), count in sorted(tally.items()):
        print(f"{kind:10} {outcome:9} {count}")


if __name__ == "__main__":
    main(sys.argv[1:])
