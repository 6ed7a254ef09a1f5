"""Put an SSMax beside every chosen attention of a model, and take it away again."""

import dataclasses
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.hf.choices import Init, check_choice, check_layers
from ssmax.hf.hook import (
    ATTRIBUTE,
    NEWEST,
    OLDEST,
    HookedScale,
    install,
    scale_of,
)
from ssmax.hf.own_scales import own_scale
from ssmax.hf.written_config import KEY
from ssmax.nn import RULES, SSMaxScale

RECORD = "_ssmax_conversion"
"""Where a model says how it was converted."""
# What torch.compile and activation checkpointing put into the names of single layers.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
# Towers that look at pictures or listen: not the text whose length grows.
_TOWERS = ("vision", "visual", "image", "audio", "speech", "video")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """How a model was converted; it goes with the model, as plain values."""

    rule: str
    init: str
    train_length: int | None
    """None where it was not given, and no first value came from it."""
    layers: tuple[str, ...]
    """Names of the attention modules that carry an ssmax."""

    @classmethod
    def of(cls, model: nn.Module) -> "Conversion | None":
        """Return a model's own, or None."""
        found = getattr(unwrapped(model), RECORD, None)
        if found is not None and not isinstance(found, cls):
            raise UsageError(
                f"this {type(unwrapped(model)).__name__} runs by the code in its folder "
                "(trust_remote_code), which this package does not reach; load the folder with "
                "ssmax.hf.from_pretrained"
            )
        return found

    def put(self, model: Any) -> None:
        """Note it on the model, and in its config for its checkpoint."""
        setattr(model, RECORD, self)
        setattr(model.config, KEY, {**dataclasses.asdict(self), "layers": list(self.layers)})

    @staticmethod
    def take_away(model: Any) -> None:
        """Remove every ssmax and every note of the conversion."""
        for _, module in list(converted_modules(model)):
            delattr(module, ATTRIBUTE)
        delattr(model, RECORD)
        if hasattr(model.config, KEY):
            delattr(model.config, KEY)
        plan = _tensor_parallel_plan(model)
        for name in [name for name in plan if f".{ATTRIBUTE}." in name]:
            del plan[name]

    @classmethod
    def from_dict(
        cls, values: Any, *, where: str = "the conversion of this checkpoint"
    ) -> "Conversion":
        """Read it back; an unknown field is an error, so that nothing is lost silently."""
        record = read_fields(cls, values, where)
        is_list = isinstance(record.layers, list | tuple)
        if not is_list or not all(isinstance(name, str) for name in record.layers):
            raise UsageError(
                f"the layers of {where} must be a list of names, got {record.layers!r}; it was "
                "changed: save the converted model again"
            )
        if record.rule not in RULES:
            raise UsageError(
                f"the model was converted with the rule {record.rule!r}, which is not known "
                "here: register it in ssmax.nn.RULES before loading"
            )
        return dataclasses.replace(record, layers=tuple(record.layers))


def read_fields(kind: Any, values: Any, where: str) -> Any:
    """Make a dataclass of exactly its fields, read from a file."""
    known = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(values, Mapping) or set(values) != known:
        came = sorted(values) if isinstance(values, Mapping) else values
        raise UsageError(
            f"{where} must be an object with {', '.join(sorted(known))}, got {came!r}; it was "
            "changed: save the model again"
        )
    return kind(**values)


def convert(
    model: nn.Module,
    *,
    rule: str = "ssmax",
    init: Init = "identity",
    train_length: int | None = None,
    bias: bool | None = None,
    layers: str | Callable[[str, nn.Module], bool] = "full",
    attention: Literal["self", "all"] = "self",
) -> nn.Module:
    """Scale the queries of a Hugging Face model by a factor of n, in place.

    `identity` starts at s = 0, b = 1: the same logits, bit for bit, until it is trained. `paper`
    starts at s = L / log(L!) and no bias, for `train_length` L. `anneal` starts as identity and is
    led to the paper's values by `ssmax.hf.anneal`. Of the other rules `identity` takes those that
    start as softmax, such as `clamp`, which learns nothing; `paper` every one at its own first
    values.

    `layers` are the full attention ones, `all` with windowed ones, or those of which a function of
    their name and module says True. `attention="all"` takes cross attention, encoders beside a
    decoder and towers of pictures or sound as well.
    """
    check_unconverted(model)
    rule = check_choice(rule, init, train_length, bias)
    check_layers("full" if callable(layers) else layers, attention)
    chosen = dict(attention_modules(model, layers=layers, attention=attention))
    if not chosen:
        raise UsageError(_nothing_found(model, layers, attention))
    if attention == "all":
        _warn_of_others(model, chosen)
    _warn_of_own_scales(chosen)
    record = Conversion(rule=rule, init=init, train_length=train_length, layers=tuple(chosen))
    attach(model, record)
    return model


def attach(model: nn.Module, record: Conversion, *, from_where: str = "the adapter") -> None:
    """Give exactly the layers of a record an ssmax, with the first values that it names."""
    check_model(model)
    known = dict(attention_modules(model, layers="all", attention="all"))
    missing = [name for name in record.layers if name not in known]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"this {type(model).__name__} has no attention layer {missing[0]!r}{more}; "
            f"{from_where} is for another model"
        )
    for name in record.layers:
        _check_readable(name, known[name])
    # All of them before the first is attached: an error leaves the model as it was.
    scales = {name: scale_for(record, _num_heads(name, known[name])) for name in record.layers}
    install()
    for name, scale in scales.items():
        module = known[name]
        _start(scale, record.init)
        # Its own float32 where the model is narrower.
        wide = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        module.add_module(ATTRIBUTE, scale.to(module_device(module), wide))
    record.put(model)
    _split_with_the_heads(model, scales)


def scale_for(record: Conversion, num_heads: int) -> HookedScale:
    """Make the ssmax of one layer under a record, with its rule's own first values."""
    # An s that starts at 0, or at what a checkpoint holds, starts at no length: any will do.
    length = 2 if record.train_length is None else record.train_length
    # The rules that grow in steps are 1 up to the first; without a length they know one.
    floor = None if RULES[record.rule].floor_length is None else record.train_length
    scale = HookedScale(num_heads, record.rule, length, floor_length=floor)
    scale.train_length = record.train_length
    return scale


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
    routed = [(name, module) for name, module in modules if _routes(type(module).forward)]
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


def count_alike(model: nn.Module, names: Iterable[str]) -> int:
    """Count the attention layers in the same stacks as these, converted or not."""
    stacks = {_stack_of(name) for name in names}
    every = attention_modules(model, layers="all", attention="all")
    return sum(_stack_of(name) in stacks for name, _ in every)


def _start(scale: SSMaxScale, init: str) -> None:
    """Set s and b to softmax where the rule itself starts elsewhere."""
    with torch.no_grad():
        if init in ("identity", "anneal") and RULES[scale.rule].with_bias == scale.rule:
            scale.s.zero_()
            scale.bias.fill_(1.0)


def check_model(model: nn.Module) -> None:
    """Raise on what is no model of Transformers, or was wrapped too early."""
    _check_transformers()
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        is_wrapped = isinstance(getattr(model, "module", None), nn.Module)
        hint = "; convert the model inside it, before it is wrapped" if is_wrapped else ""
        raise UsageError(
            f"ssmax.hf takes a model of Transformers, got {type(model).__name__}{hint}"
        )
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        raise UsageError(
            "this model, or a part of it, is compiled already; convert it before torch.compile"
        )
    # Parameters of FSDP2 and of tensor parallelism are parts of what they were; FSDP1 renames its
    # modules.
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
    ):
        raise UsageError(
            "this model is sharded already; convert it before fully_shard, FSDP or a tensor "
            "parallel plan"
        )
    if hasattr(model, "peft_config"):
        raise UsageError(
            "PEFT has changed this model already and would not save its s and b; convert or load "
            "the model before PEFT wraps it"
        )


def check_unconverted(model: Any) -> None:
    """Raise on what is no model, and on one that has an s already: it would be lost."""
    check_model(model)
    if Conversion.of(model) is not None or any(converted_modules(model)):
        raise UsageError(
            "this model, or a part of it, was converted already; ssmax.hf.revert undoes it, and an "
            "extension with it. To extend first and convert then: extend(..., sharpen='none')"
        )
    if hasattr(model.config, KEY):
        raise UsageError(
            f"the config of this {type(model).__name__} says that it was converted already; "
            "ssmax.hf.from_pretrained loads a checkpoint with its s. A config that is another "
            f"model's too has to be copied first; to begin anew, delete config.{KEY}"
        )


def must_be_converted(model: nn.Module) -> Conversion:
    """Return how a model was converted; raise where it was not."""
    record = Conversion.of(model)
    if record is None:
        raise UsageError(
            f"this {type(unwrapped(model)).__name__} is not converted; call ssmax.hf.convert "
            "before anything wraps it"
        )
    return record


def check_tensors_fit(
    what: object,
    missing: Iterable[str],
    extra: Iterable[str],
    shapes: Iterable[tuple[str, Sequence[int], Sequence[int]]],
) -> None:
    """Raise on what a checkpoint lacks, has too many of, or has in another shape."""
    other = [
        f"{name} {tuple(stored)} instead of {tuple(wanted)}"
        for name, stored, wanted in sorted(shapes)
    ]
    for words, names in (("lacks", sorted(missing)), ("has too many:", sorted(extra)),
                         ("has", other)):  # fmt: skip
        if names:
            raise UsageError(f"{what} {words} {first_three(names)}")


def first_three(names: Sequence[str]) -> str:
    """Shorten a list of names that may be as long as the model is deep."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def unwrapped(model: Any) -> Any:
    """Find the model inside the wrapper of torch.compile, DDP, DataParallel or PEFT."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_transformers() -> None:
    transformers = require("transformers", install="ssmax[hf]", purpose="ssmax.hf")
    version = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    interface = getattr(transformers, "AttentionInterface", None)
    if version < OLDEST or not hasattr(interface, "get_interface"):
        raise UsageError(
            f"Transformers {transformers.__version__} has no attention interface for "
            f"all models; ssmax.hf needs {'.'.join(map(str, OLDEST))} or later, tested to "
            f"{'.'.join(map(str, NEWEST))}"
        )


def _nothing_found(
    model: nn.Module, layers: str | Callable[[str, nn.Module], bool], attention: str
) -> str:
    name = type(model).__name__
    every = dict(attention_modules(model, layers="all", attention="all"))
    if not every:
        kinds = {type(module).__name__ for module in model.modules()}
        own = ", ".join(sorted(kind for kind in kinds if "Attention" in kind))
        is_quantised = getattr(model.config, "quantization_config", None) is not None
        return (
            f"{name} has its own attention code{own and f' ({own})'}, or none: none of its layers "
            "goes through Transformers' attention interface, so it cannot be converted"
            + ("; it is quantised: load it without fused modules" if is_quantised else "")
        )
    way = "give a function that says True for some of them"
    if not callable(layers):
        has_windows = any(attention_modules(model, layers="all", attention=attention))
        way = "try layers='all'" if has_windows else "try layers='all', attention='all'"
    return (
        f"{name} has no attention layer for layers={layers!r}, attention={attention!r}; it has "
        f"{len(every)} in all, such as {next(iter(every))!r}: {way}"
    )


def _check_readable(name: str, module: nn.Module) -> None:
    """Raise where n cannot be known, or the layer's own code bypasses the hook."""
    leave_out = "leave it out: layers=a function that says False for it"
    why = ""
    # Shifted windows: -100 is added to the position bias, so that no number means hidden.
    if type(module).__name__ == "SwinAttention":
        why = f"hides keys by a bias of -100, from which n cannot be counted; {leave_out}"
    # GPT-2's, and Decision Transformer's copy of it.
    elif getattr(module, "reorder_and_upcast_attn", False):
        why = (
            "was built with reorder_and_upcast_attn=True, which in eager mode computes softmax "
            "past Transformers' attention interface, so that s would do nothing; load the model "
            "with reorder_and_upcast_attn=False"
        )
    # Sam's: what flash attention cannot do is done by SDPA, unasked.
    elif 'ALL_ATTENTION_FUNCTIONS["' in _source(type(module).forward):
        why = (
            "falls back from flash attention to SDPA past Transformers' attention interface, so "
            f"that s would do nothing there; {leave_out}"
        )
    if why:
        raise UsageError(f"{name} ({type(module).__name__}) {why}")


def _warn_of_others(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Warn of the kinds of layers that have a softmax of their own and stay as they are."""
    inside = {part for module in chosen.values() for part in module.modules()}
    others = {
        type(module).__name__: name
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__
        and module not in inside
        and _has_softmax(type(module).forward)
    }
    if others:
        kinds = ", ".join(f"{kind} ({name})" for kind, name in sorted(others.items()))
        warnings.warn(
            f"these have attention code of their own, which cannot be reached; they keep softmax: "
            f"{kinds}",
            stacklevel=3,
        )


def _warn_of_own_scales(chosen: Mapping[str, nn.Module]) -> None:
    """Warn of layers that scale their query by its position already."""
    found: dict[str, list[str]] = {}
    for name, module in chosen.items():
        if own := own_scale(module):
            found.setdefault(own, []).append(name)
    for what, names in found.items():
        warnings.warn(
            f"{first_three(names)}: the query is scaled by its position already, and SSMax's "
            f"factor comes on top of it; {what}",
            stacklevel=3,
        )


def _has_softmax(forward: Callable[..., Any]) -> bool:
    return "softmax(" in _source(forward) and not _routes(forward)


def _routes(forward: Callable[..., Any]) -> bool:
    """True where a module's own code asks for its attention function."""
    return "get_interface(" in _source(forward)


@functools.cache
def _source(forward: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):
        return ""


def _is_self(name: str, module: nn.Module) -> bool:
    if in_tower(name):
        return False
    is_cross = bool(getattr(module, "is_cross_attention", False))
    last = name.rsplit(".", 1)[-1].lower()
    return not (is_cross or "cross" in last or "encdec" in last or "encoder_attn" in last)


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


def _num_heads(name: str, module: nn.Module) -> int:
    for owner in (module, getattr(module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            found = getattr(owner, attribute, None)
            if isinstance(found, int) and found > 0:
                return found
    raise UsageError(f"{name} ({type(module).__name__}) does not say how many heads it has")


def _split_with_the_heads(model: nn.Module, scales: Mapping[str, SSMaxScale]) -> None:
    """Split s and b over ranks as a model's tensor parallel plan splits the heads."""
    plan = _tensor_parallel_plan(model)
    for name, scale in scales.items():
        stack = _stack_of(name)
        if any(plan[key] == "colwise" for key in plan if key.startswith(f"{stack}.")):
            for parameter, _ in scale.named_parameters(recurse=False):
                plan[f"{stack}.{ATTRIBUTE}.{parameter}"] = "colwise"


def _stack_of(name: str) -> str:
    """Mask the layer numbers in a name: the layers of a stack have it in common."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _tensor_parallel_plan(model: nn.Module) -> dict[str, str]:
    return getattr(model, "_tp_plan", None) or {}


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
