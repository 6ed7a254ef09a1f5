"""Put an SSMax beside every chosen attention of a model, and take it away again."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.hf.choices import Init, check_choice, check_layers
from ssmax.hf.hook import ATTRIBUTE, NEWEST, OLDEST, HookedScale, install
from ssmax.hf.layers import (
    attention_modules,
    check_countable,
    converted_modules,
    module_device,
    num_heads,
    own_scale,
    stack_of,
    unreached_attention,
)
from ssmax.hf.written_config import KEY
from ssmax.nn import RULES

RECORD = "_ssmax_conversion"
"""Where a model says how it was converted."""


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
    _warn_of_others(model, chosen, attention)
    attach(
        model,
        Conversion(rule=rule, init=init, train_length=train_length, layers=tuple(chosen)),
    )
    return model


def attach(model: nn.Module, record: Conversion, *, from_where: str = "the adapter") -> None:
    """Give exactly the layers of a record an ssmax, with the first values that it names."""
    check_model(model)
    known = dict(attention_modules(model, layers="all", attention="all"))
    if missing := [name for name in record.layers if name not in known]:
        raise UsageError(
            f"this {type(model).__name__} has no attention layer {first_three(missing)}; "
            f"{from_where} is for another model"
        )
    # All of them before the first is attached: an error leaves the model as it was.
    scales = {}
    for name in record.layers:
        check_countable(name, known[name])
        scales[name] = scale_for(record, num_heads(name, known[name]))
    install()
    plan = _tensor_parallel_plan(model)
    for name, scale in scales.items():
        module, stack = known[name], stack_of(name)
        # Its own float32 where the model is narrower.
        wide = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        module.add_module(ATTRIBUTE, scale.to(module_device(module), wide))
        # Ranks split s and b as they split the heads.
        if any(plan[key] == "colwise" for key in plan if key.startswith(f"{stack}.")):
            for parameter, _ in scale.named_parameters(recurse=False):
                plan[f"{stack}.{ATTRIBUTE}.{parameter}"] = "colwise"
    record.put(model)


def scale_for(record: Conversion, num_heads: int) -> HookedScale:
    """Make the ssmax of one layer under a record, with its first values."""
    # An s that starts at 0, or at what a checkpoint holds, starts at no length: any will do.
    length = 2 if record.train_length is None else record.train_length
    # The rules that grow in steps are 1 up to the first; without a length they know one.
    floor = None if RULES[record.rule].floor_length is None else record.train_length
    scale = HookedScale(num_heads, record.rule, length, floor_length=floor)
    scale.train_length = record.train_length
    if record.init in ("identity", "anneal") and RULES[record.rule].with_bias == record.rule:
        # Softmax, where the rule itself starts elsewhere.
        with torch.no_grad():
            scale.s.zero_()
            scale.bias.fill_(1.0)
    return scale


def check_model(model: nn.Module) -> None:
    """Raise on what is no model of Transformers, or was wrapped too early."""
    transformers = require("transformers", install="ssmax[hf]", purpose="ssmax.hf")
    version = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    interface = getattr(transformers, "AttentionInterface", None)
    if version < OLDEST or not hasattr(interface, "get_interface"):
        raise UsageError(
            f"Transformers {transformers.__version__} has no attention interface for "
            f"ssmax.hf; install {OLDEST[0]}.{OLDEST[1]} or later (tested to "
            f"{NEWEST[0]}.{NEWEST[1]})"
        )
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


def _nothing_found(
    model: nn.Module, layers: str | Callable[[str, nn.Module], bool], attention: str
) -> str:
    name = type(model).__name__
    every = dict(attention_modules(model, layers="all", attention="all"))
    if not every:
        kinds = {type(module).__name__ for module in model.modules()}
        own = ", ".join(sorted(kind for kind in kinds if "Attention" in kind))
        return (
            f"{name} has its own attention code{own and f' ({own})'}, or none: none of its layers "
            "goes through Transformers' attention interface, so it cannot be converted"
        )
    way = "give a function that says True for some of them"
    if not callable(layers):
        has_windows = any(attention_modules(model, layers="all", attention=attention))
        way = "try layers='all'" if has_windows else "try layers='all', attention='all'"
    return (
        f"{name} has no attention layer for layers={layers!r}, attention={attention!r}; it has "
        f"{len(every)} in all, such as {next(iter(every))!r}: {way}"
    )


def _warn_of_others(model: nn.Module, chosen: Mapping[str, nn.Module], attention: str) -> None:
    """Warn of layers that keep a softmax of their own, and of queries that are scaled already."""
    if attention == "all" and (others := unreached_attention(model, chosen.values())):
        kinds = ", ".join(f"{kind} ({name})" for kind, name in sorted(others.items()))
        warnings.warn(
            f"these have attention code of their own, which cannot be reached; they keep softmax: "
            f"{kinds}",
            stacklevel=3,
        )
    scaled: dict[str, list[str]] = {}
    for name, module in chosen.items():
        if own := own_scale(module):
            scaled.setdefault(own, []).append(name)
    for what, names in scaled.items():
        warnings.warn(
            f"{first_three(names)}: the query is scaled by its position already, and SSMax's "
            f"factor comes on top of it; {what}",
            stacklevel=3,
        )


def _tensor_parallel_plan(model: nn.Module) -> dict[str, str]:
    return getattr(model, "_tp_plan", None) or {}
