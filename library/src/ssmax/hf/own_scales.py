"""Layers that scale their query by its position already, as some families of Transformers do."""

import inspect
from typing import Any


def own_scale(module: Any) -> tuple[str, str] | None:
    """Find what an attention layer multiplies its query by, and how to turn that off."""
    # Llama 4. Layers that rotate leave the query as it is.
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        beta, floor = module.attn_scale, module.floor_scale
        return (
            f"1 + {beta} log(1 + floor((position + 1) / {floor})) (attn_temperature_tuning)",
            "for SSMax alone, load the model with attn_temperature_tuning=False in its text config",
        )
    # Ministral 3 and Mistral 4. Others may have it in their configs, and do not read it.
    if "llama_4_scaling_beta" in inspect.unwrap(type(module).forward).__code__.co_consts:
        rope = module.config.rope_parameters
        beta, floor = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        if beta:
            return (
                f"1 + {beta} log(1 + floor(position / {floor})) (llama_4_scaling_beta)",
                "for SSMax alone, set rope_parameters['llama_4_scaling_beta'] = 0.0 in its text "
                "config",
            )
    if type(module).__name__ == "BeamAttention":
        config = module.config
        # Layers that rotate are given none when they are called.
        if config.rope_parameters[config.layer_types[module.layer_idx]] is None:
            return (
                "(1 + (position + 1) / 2048)^0.1 (a scale of its own)",
                "it cannot be turned off; layers=a function that says False for them leaves them "
                "out",
            )
    return None
