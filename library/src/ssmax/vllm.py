"""Models of vLLM with Scalable-Softmax: the plugin that `ssmax[vllm]` brings.

vLLM calls `register` by the entry point `vllm.general_plugins`. A checkpoint of the types here then
runs in vLLM's own class of its family: paged attention, continuous batching, cached prefixes and
tensor parallelism are vLLM's; n is a token's position in its sequence plus one, in a window at most
the window. Without the plugin vLLM refuses such a checkpoint, or runs the code in its folder.
"""

# T tokens of a step, H query heads of this rank, D head_dim

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.hf.conversion import Conversion, check_tensors_fit, scale_for
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.written_config import CLASS_PREFIX, KEY, TYPE_PREFIX, OwnType
from ssmax.nn import RULES, SSMaxScale

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
}
"""Classes that rotate the query last before attention, by Transformers' name, and their types."""


def register() -> None:
    """Tell vLLM which class runs a converted model of each family, and which config it has."""
    mapping = require("transformers", install="ssmax[vllm]", purpose="the plugin").CONFIG_MAPPING
    registry = require("vllm", install="ssmax[vllm]", purpose="the plugin").ModelRegistry
    for kind, model_type in FAMILIES.items():
        config = _config_class(model_type)
        mapping.register(TYPE_PREFIX + model_type, config, exist_ok=True)
        # By name: vLLM looks at a class in another process before it imports it here.
        registry.register_model(CLASS_PREFIX + kind, f"{__name__}:{CLASS_PREFIX}{kind}")


def __getattr__(name: str) -> Any:
    """Make the classes of models and configs when they are asked for: vLLM takes seconds."""
    kind = name.removeprefix(CLASS_PREFIX)
    if name != kind and kind in FAMILIES:
        return _model_class(kind)
    for model_type in FAMILIES.values():
        if name == f"{CLASS_PREFIX}_{model_type}":
            return _config_class(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _model_class(kind: str) -> type:
    registry = require("vllm", install="ssmax[vllm]", purpose="the plugin").ModelRegistry
    plain = registry.models[kind].load_model_cls()
    return type(CLASS_PREFIX + kind, (_Scaled, plain), {"__module__": __name__})


@cache
def _config_class(model_type: str) -> type:
    """Make the class that reads a config of its own type as one of the plain type."""
    mapping = require("transformers", install="ssmax[vllm]", purpose="the plugin").CONFIG_MAPPING
    name = f"{CLASS_PREFIX}_{model_type}"
    return type(name, (OwnType, mapping[model_type]), {"__module__": __name__})


class _Scaled:
    """Mixed into a class of vLLM: gives the layers of its config's record an ssmax."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # pyright: ignore[reportCallIssue]
        # A part of vLLM, like those below, that exists where this class does.
        from vllm.model_executor.models.utils import (  # pyright: ignore[reportMissingImports]
            is_pp_missing_parameter,
        )

        model: Any = self
        record = Conversion.from_dict(getattr(vllm_config.model_config.hf_config, KEY))
        for name in record.layers:
            if not is_pp_missing_parameter(f"{name}.{ATTRIBUTE}", model):
                _attach(model.get_submodule(name), name, record)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Load them as vLLM does; raise where an s or b is missing."""
        model: Any = self
        loaded = super().load_weights(weights)  # pyright: ignore[reportAttributeAccessIssue]
        missing = [
            name
            for name, parameter in model.named_parameters()
            if f".{ATTRIBUTE}." in name and parameter.isnan().any()
        ]
        check_tensors_fit("the checkpoint", missing, (), ())
        return loaded


def _attach(attention: Any, name: str, record: Conversion) -> None:
    """Give an attention layer of vLLM its heads' part of s and b, not a number until loaded."""
    missing = [part for part in ("attn", "num_heads", "rotary_emb") if not hasattr(attention, part)]
    if missing:
        raise UsageError(
            f"{name} is {type(attention).__name__} without {missing[0]} in this vLLM, so that its "
            "query cannot be scaled; run the form hf with --model-impl transformers "
            "--trust-remote-code"
        )
    scale = scale_for(record, attention.num_heads)
    with torch.no_grad():
        for parameter_name, parameter in scale.named_parameters():
            parameter.fill_(torch.nan)
            parameter.requires_grad_(False)
            if parameter_name in RULES[record.rule].learned:
                parameter.weight_loader = _load_own_heads  # pyright: ignore
    attention.add_module(ATTRIBUTE, scale)
    attention.rotary_emb = ScaledRotary(attention.rotary_emb, scale, attention.attn.sliding_window)


def _load_own_heads(parameter: Tensor, loaded: Tensor) -> None:
    """Copy what belongs to this rank's heads, which follow those of the rank before."""
    from vllm import distributed  # pyright: ignore[reportMissingImports]

    ranks = distributed.get_tensor_model_parallel_world_size()
    if loaded.shape != (ranks * parameter.shape[0],):
        raise UsageError(
            f"the checkpoint has {tuple(loaded.shape)} for the s or b of a layer with "
            f"{ranks * parameter.shape[0]} heads"
        )
    rank = distributed.get_tensor_model_parallel_rank()
    parameter.data.copy_(loaded.chunk(ranks)[rank])


class ScaledRotary(nn.Module):
    """A rotation after which every query is multiplied by its factor, which commutes with it."""

    def __init__(self, rotary: nn.Module, scale: SSMaxScale, window: int | None) -> None:
        super().__init__()
        self.rotary = rotary
        self.window = window
        # In a tuple: it is registered by the attention, under the checkpoint's name.
        self._scale = (scale,)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate both and scale the query (T, H * D) by n of positions (T,)."""
        query, key = self.rotary(positions, query, key, *rest)
        return self.scaled(positions, query), key

    def scaled(self, positions: Tensor, query: Tensor) -> Tensor:
        """Multiply queries (T, H * D) by the factors of positions (T,), and round once."""
        if positions.dim() != 1:
            raise UsageError(
                f"n is known from one position a token, got positions {tuple(positions.shape)}"
            )
        n_T = positions + 1
        if self.window is not None:
            n_T = n_T.clamp_max(self.window)
        factor_HT = self._scale[0](n_T)
        query_THD = query.reshape(query.shape[0], factor_HT.shape[0], -1)
        scaled_THD = query_THD * factor_HT.t().unsqueeze(-1)
        return scaled_THD.to(query.dtype).view(query.shape)
