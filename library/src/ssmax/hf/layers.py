"""The attention layers of a model of Transformers: which there are, and what each is like."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ssmax.errors import UsageError
from ssmax.hf.hook import scale_of

# What torch.compile and activation checkpointing put into the names of single layers.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
# Towers that look at pictures or listen: not the text whose length grows.
_TOWERS = ("vision", "visual", "image", "audio", "speech", "video")


def converted_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the attention modules that carry an ssmax, by name."""
    for name, module in model.named_modules():
        if scale_of(module) is not None:
            yield _WRAPPERS.sub("", name), module


def attention_modules(
    model: nn.Module,
    *,
    layers: str | Callable[[str, nn.Module], bool],
    attention: str,
) -> Iterator[tuple[str, nn.Module]]:
    """Find the chosen modules that ask for their attention function where the hook is."""
    modules = ((_WRAPPERS.sub("", name), module) for name, module in model.named_modules())
    routed = [(name, module) for name, module in modules if routes(module)]
    if attention == "self":
        routed = [(name, module) for name, module in routed if _is_self(name, module)]
        # Beside a decoder, an encoder's length is not the one that grows.
        routed = [each for each in routed if getattr(each[1], "is_causal", False)] or routed
    for name, module in routed:
        if (
            layers(name, module)
            if callable(layers)
            else layers == "all" or window_of(module) is None
        ):
            yield name, module


def unreached_attention(model: nn.Module, chosen: Iterable[nn.Module]) -> dict[str, str]:
    """Name a module of every kind, beside the chosen, that has attention code of its own."""
    inside = {part for module in chosen for part in module.modules()}
    return {
        type(module).__name__: name
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__
        and module not in inside
        and "softmax(" in _source(type(module).forward)
        and not routes(module)
    }


def count_alike(model: nn.Module, names: Iterable[str]) -> int:
    """Count the attention layers in the same stacks as these, converted or not."""
    stacks = {stack_of(name) for name in names}
    every = attention_modules(model, layers="all", attention="all")
    return sum(stack_of(name) in stacks for name, _ in every)


def stack_of(name: str) -> str:
    """Mask the layer numbers in a name: the layers of a stack have it in common."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def routes(module: nn.Module) -> bool:
    """True where a module's own code asks for its attention function."""
    return "get_interface(" in _source(type(module).forward)


@functools.cache
def _source(forward: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):
        return ""


def _is_self(name: str, module: nn.Module) -> bool:
    last = name.rsplit(".", 1)[-1].lower()
    is_cross = getattr(module, "is_cross_attention", False) or any(
        word in last for word in ("cross", "encdec", "encoder_attn")
    )
    return not (is_cross or in_tower(name))


def in_tower(name: str) -> bool:
    """True for a layer that looks at pictures or listens."""
    return any(tower in name for tower in _TOWERS)


def window_of(module: nn.Module) -> int | None:
    """Find the window or chunk that bounds what an attention layer sees; None: full attention."""
    # EXAONE 4 and its like keep the config's window on every layer; is_sliding says who uses it.
    if getattr(module, "is_sliding", None) is False:
        return None
    if hasattr(module, "sliding_window"):
        return _positive(module.sliding_window)
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    window = _positive(getattr(config, "sliding_window", None))
    kinds = getattr(config, "layer_types", None)
    if kinds and isinstance(index, int) and index < len(kinds):
        if "chunked" in kinds[index]:
            return _positive(getattr(config, "attention_chunk_size", None))
        return window if "sliding" in kinds[index] else None
    # Mistral's layers are all alike, and take the window from the config when they are called.
    return window if "sliding_window" in _source(type(module).forward) else None


def _positive(window: Any) -> int | None:
    is_one = isinstance(window, int) and not isinstance(window, bool) and window > 0
    return window if is_one else None


def num_heads(name: str, module: nn.Module) -> int:
    """Find how many query heads a layer has."""
    for owner in (module, getattr(module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            found = getattr(owner, attribute, None)
            if isinstance(found, int) and found > 0:
                return found
    raise UsageError(f"{name} ({type(module).__name__}) does not say how many heads it has")


def check_countable(name: str, module: nn.Module) -> None:
    """Raise where n cannot be known, or the layer's own code may pass by the hook."""
    leave_out = "leave it out: layers=a function that says False for it"
    # Shifted windows: -100 is added to the position bias, so that no number means hidden.
    if type(module).__name__ == "SwinAttention":
        why = f"hides keys by a bias of -100, from which n cannot be counted; {leave_out}"
    # GPT-2's, and Decision Transformer's copy of it.
    elif getattr(module, "reorder_and_upcast_attn", False):
        why = (
            "computes eager attention past Transformers' attention interface, so that s would do "
            "nothing; load the model with reorder_and_upcast_attn=False"
        )
    # Sam's: what flash attention cannot do is done by SDPA, unasked.
    elif 'ALL_ATTENTION_FUNCTIONS["' in _source(type(module).forward):
        why = f"falls back to SDPA where s would do nothing; {leave_out}"
    else:
        return
    raise UsageError(f"{name} ({type(module).__name__}) {why}")


def own_scale(module: Any) -> str:
    """Say how to turn off what a layer multiplies its query by already; "" where it does not."""
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


def learned_positions(model: nn.Module) -> int | None:
    """Count the positions that a model has learned; None for rotations and biases."""
    tables = [
        # Without the rows that no token comes to: the offset of OPT and BART, RoBERTa's padding.
        module.num_embeddings
        - getattr(module, "offset", 0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in name or name.endswith("wpe"))
    ]
    return min(tables, default=None)


def module_device(module: nn.Module) -> torch.device:
    """Find where a module computes."""
    for part in module.modules():
        # Offloaded weights are on no device; s and b are small and stay where they are used.
        where = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if where is not None:
            return torch.device(where)
    devices = [tensor.device for tensor in (*module.parameters(), *module.buffers())]
    # While a checkpoint is loaded a module is nowhere, but for what it computes by itself.
    nowhere = torch.device("meta")
    return nowhere if nowhere in devices else next(iter(devices), torch.device("cpu"))
