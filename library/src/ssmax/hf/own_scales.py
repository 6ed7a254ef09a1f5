"""Layers that scale their query by its position already, as some families of Transformers do."""

import inspect
from typing import Any


def own_scale(module: Any) -> str:
    """Say how to turn off what an attention layer multiplies its query by; "" where it does not."""
    # Llama 4. Layers that rotate leave the query as it is.
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        return "for SSMax alone, load the model with attn_temperature_tuning=False in its config"
    # Ministral 3 and Mistral 4. Others may have it in their configs, and do not read it.
    if "llama_4_scaling_beta" in inspect.unwrap(type(module).forward).__code__.co_consts:
        if module.config.rope_parameters.get("llama_4_scaling_beta"):
            return "for SSMax alone, set rope_parameters['llama_4_scaling_beta'] = 0 in its config"
    # Beam's layers that rotate are given none when they are called.
    elif type(module).__name__ == "BeamAttention":
        config = module.config
        if config.rope_parameters[config.layer_types[module.layer_idx]] is None:
            return "it cannot be turned off; layers=a function that says False leaves it out"
    return ""
