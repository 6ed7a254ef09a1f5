"""Read from a config.json what a checkpoint multiplies its queries by."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ssmax.errors import UsageError
from ssmax.hf.layers import window_of
from ssmax.hf.written_config import KEY
from ssmax.ops.scale import clamp_factor, llama4_factor, ministral3_factor


def leave_out_scale(model: Any) -> None:
    """Make the families that Transformers scales by itself leave that out."""
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = False
        rope = getattr(getattr(module, "config", None), "rope_parameters", None)
        if isinstance(rope, dict) and "llama_4_scaling_beta" in rope:
            rope["llama_4_scaling_beta"] = 0.0
        if type(module).__name__ == "BeamAttention":
            module.register_forward_pre_hook(
                lambda _, arguments, options: (arguments, {**options, "attention_scaling": None}),
                with_kwargs=True,
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a config declares: the factor of the query that sees n keys, n - 1 its position."""

    where: str
    """The key of the config that declares it."""
    formula: str
    begins: int
    """The first position whose factor is not 1."""
    factor: Callable[[Any, Tensor], Tensor]
    """Computes an attention layer's factor, (queries,) or (heads, queries), from n (queries,)."""
    applies: Callable[[Any], bool] = lambda module: True
    """True for the attention layers that are scaled."""
    switch_off: Callable[[Any], None] = leave_out_scale
    """Makes a model of Transformers leave out the scale that it applies by itself."""


def text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Find the part of a config that describes the model of text."""
    return values.get("text_config") or values


def find_scale(values: dict[str, Any]) -> Scale:
    """Find the scale that a config declares; raise where there is none that is known."""
    text = text_config(values)
    for look in (_ours, _steps_of_positions, _llama4, _beam, _qwen):
        found = look(text)
        if found is not None:
            return found
    raise UsageError(
        f"this config of type {values['model_type']!r} declares no scale of the queries that is "
        f"known: none of {KEY}, llama_4_scaling_beta, llama_4_scaling, attn_temperature_tuning, "
        "use_logn_attn, and no Beam"
    )


def _ours(text: dict[str, Any]) -> Scale | None:
    """Find a conversion of this package. Its factors are in the model, found when it is loaded."""
    if KEY not in text:
        return None
    scales: dict[Any, Any] = {}

    def keep(model: Any) -> None:
        from ssmax.hf import revert
        from ssmax.hf.layers import converted_modules

        scales.update({module: module.ssmax for _, module in list(converted_modules(model))})
        revert(model)

    def factor(module: Any, n: Tensor) -> Tensor:
        window = window_of(module)
        return scales[module](n if window is None else n.clamp_max(window))

    rule = text[KEY]["rule"]
    return Scale(
        where=KEY, formula=f"the rule {rule} of every head", begins=1, factor=factor,
        applies=lambda module: module in scales, switch_off=keep,
    )  # fmt: skip


def _steps_of_positions(text: dict[str, Any]) -> Scale | None:
    """Find the scale of Ministral 3 and Mistral 4, by either of its names."""
    found = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name)
        if isinstance(rope, dict) and rope.get("llama_4_scaling_beta") is not None:
            length = rope.get("original_max_position_embeddings")
            found[f"llama_4_scaling_beta of {name}"] = (rope["llama_4_scaling_beta"], length)
    own = text.get("llama_4_scaling")
    if isinstance(own, dict) and own.get("beta") is not None:
        found["llama_4_scaling"] = (own["beta"], own.get("original_max_position_embeddings"))
    if not found:
        return None
    if len(set(found.values())) > 1:
        raise UsageError(f"this config declares two scales that differ: {found}; remove one")
    (where, (beta, length)), *_ = found.items()
    _check_beta(where, beta)
    if not length:
        raise UsageError(f"this config has {where} and no original_max_position_embeddings")

    return Scale(
        where=" and ".join(found),
        formula=f"1 + {beta:g} log(1 + floor((n - 1) / {length}))",
        begins=int(length),
        factor=lambda module, n: ministral3_factor(n, float(beta), int(length)),
    )


def _check_beta(where: str, beta: float) -> None:
    if beta == 0:
        raise UsageError(
            f"this config declares a beta of 0 ({where}), a factor of 1 everywhere: an engine that "
            "drops it computes the same, so that there is nothing to audit"
        )


def _llama4(text: dict[str, Any]) -> Scale | None:
    """Find the scale of Llama 4, whose layers with rotation have none."""
    is_llama4 = text["model_type"].startswith("llama4")
    if not text.get("attn_temperature_tuning", is_llama4):
        return None
    beta, length = text.get("attn_scale", 0.1), int(text.get("floor_scale", 8192))
    _check_beta("attn_scale", beta)

    return Scale(
        where="attn_temperature_tuning",
        formula=f"1 + {beta:g} log(1 + floor(n / {length})) in layers without rotation",
        begins=length - 1,
        factor=lambda module, n: llama4_factor(n, float(beta), length),
        applies=lambda module: not getattr(module, "use_rope", False),
    )


def _beam(text: dict[str, Any]) -> Scale | None:
    """Find the scale of Beam, which its code applies to layers without rotation."""
    if text["model_type"] != "beam":
        return None

    def applies(module: Any) -> bool:
        config = module.config
        return config.rope_parameters[config.layer_types[module.layer_idx]] is None

    return Scale(
        where="model_type",
        formula="(1 + n / 2048)^0.1 in layers without rotation",
        begins=1,
        factor=lambda module, n: (1.0 + n.float() / 2048).pow(0.1),
        applies=applies,
    )


def _qwen(text: dict[str, Any]) -> Scale | None:
    """Find the log n of Qwen, first version."""
    if not text.get("use_logn_attn"):
        return None
    length = text.get("seq_length")
    if not isinstance(length, int) or length < 2:
        raise UsageError(f"this config has use_logn_attn and seq_length = {length!r}, no length")
    return Scale(
        where="use_logn_attn",
        formula=f"max(1, log n / log {length})",
        begins=length,
        factor=lambda module, n: clamp_factor(n, length),
    )
