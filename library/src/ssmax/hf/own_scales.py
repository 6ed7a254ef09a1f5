"""Layers that scale their query by its position already, as some families of Transformers do."""

import inspect
from typing import Any

from torch import nn


def own_scale(module: nn.Module) -> tuple[str, str] | None:
    """Find what an attention layer multiplies its query by, and how to turn that off."""
    return _of_llama4(module) or _of_ministral3(module) or _of_beam(module)


def _of_llama4(module: Any) -> tuple[str, str] | None:
    # Layers that rotate leave the query as it is.
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    beta, floor = module.attn_scale, module.floor_scale
    return (
        f"1 + {beta} log(1 + floor((position + 1) / {floor})) (attn_temperature_tuning)",
        "for SSMax alone, load the model with attn_temperature_tuning=False in its text config",
    )


def _of_ministral3(module: Any) -> tuple[str, str] | None:
    # Others may have it in their configs, and do not read it.
    if "llama_4_scaling_beta" not in inspect.unwrap(type(module).forward).__code__.co_consts:
        return None
    rope = module.config.rope_parameters
    beta, floor = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta:
        return None
    return (
        f"1 + {beta} log(1 + floor(position / {floor})) (llama_4_scaling_beta)",
        "for SSMax alone, set rope_parameters['llama_4_scaling_beta'] = 0.0 in its text config",
    )


def _of_beam(module: Any) -> tuple[str, str] | None:
    # Layers that rotate are given none when they are called.
    if type(module).__name__ != "BeamAttention" or _rotates(module.config, module.layer_idx):
        return None
    return (
        "(1 + (position + 1) / 2048)^0.1 (a scale of its own)",
        "it cannot be turned off; layers=a function that says False for them leaves them out",
    )


def _rotates(config: Any, layer: int) -> bool:
    return config.rope_parameters[config.layer_types[layer]] is not None
