"""Extend the context of a model: another rotation, a scale of its queries, nothing trained."""

import copy
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ssmax.errors import UsageError
from ssmax.hf.choices import Positions, check_extension
from ssmax.hf.conversion import (
    Conversion,
    attention_modules,
    check_model,
    check_unconverted,
    convert,
    converted_modules,
    module_device,
    unwrapped,
)
from ssmax.hf.hook import ATTRIBUTE
from ssmax.ops.length import frequency_limit

KEY = "ssmax_extension"
"""Where a config says how its model was extended."""
# Of Transformers' kinds of rotation, those whose frequencies follow from a base that can be raised.
_KNOWN = ("default", "linear", "llama3", "yarn")
_LARGEST_FACTOR = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """How a model was extended; it goes with the model's config, as plain values."""

    to: int
    train_length: int
    positions: str
    """base, yarn or none."""
    factor: float
    """What multiplies the RoPE base, or YaRN's factor; 1 for none."""
    sharpen: str
    """clamp, yarn, none, or a number: what multiplies the query."""
    rope_limit_before: float | None
    """None where nothing limits it: every pair of channels makes a full turn in training."""
    rope_limit: float | None
    before: dict[str, Any]
    """The config's values that were changed, as they were."""
    after: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> "Extension | None":
        """Return a model's own, or None."""
        values = getattr(getattr(unwrapped(model), "config", None), KEY, None)
        return cls.from_dict(values, where=f"the {KEY!r} of this config")

    @classmethod
    def from_dict(cls, values: Any, *, where: str) -> "Extension | None":
        """Read it back; None stays None."""
        if values is None:
            return None
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, Mapping) or set(values) != known:
            raise UsageError(
                f"{where} must be an object with {', '.join(sorted(known))}; it was changed: "
                "extend the model as it was again"
            )
        return cls(**values)

    def put(self, model: Any) -> None:
        """Change the config and the tables of a model, and note it there."""
        _set(model, self.after)
        setattr(model.config, KEY, dataclasses.asdict(self))

    def take_away(self, model: Any) -> None:
        """Give the config and the tables back as they were."""
        _set(model, self.before)
        delattr(model.config, KEY)


def extend(
    model: nn.Module,
    to: int,
    *,
    positions: Positions = "auto",
    sharpen: str | float = "auto",
    train_length: int | None = None,
) -> Extension:
    """Extend a model to contexts of `to` tokens, in place, with nothing trained.

    `positions`: "base" raises the RoPE base until its limit is `to`, "yarn" takes YaRN's
    frequencies, "none" leaves the rotation alone; "auto" is "base" where the rotation does not
    carry to `to` already. `sharpen` is what multiplies the queries of full attention layers:
    "yarn", YaRN's temperature (0.1 log(to / train_length) + 1)^2, a number, "clamp",
    max(1, log n / log train_length), or "none"; "auto" is "yarn", for a model with an s of its own
    "none". Layers with windows stay as they are. `train_length` is by default the config's
    max_position_embeddings. `ssmax.hf.revert` undoes it.
    """
    check_extension(to, positions, sharpen, train_length)
    check_model(model)
    inner: Any = unwrapped(model)
    if Extension.of(inner) is not None:
        raise UsageError("this model was extended already; ssmax.hf.revert undoes it")
    has_s = Conversion.of(inner) is not None
    if sharpen == "auto":
        sharpen = "none" if has_s else "yarn"
    if sharpen != "none":
        check_unconverted(inner)
    layers = _full_layers(inner)
    text = inner.config.get_text_config()
    try:
        kinds = _kinds(text, layers)
    except UsageError:
        if positions != "none":
            raise
        kinds = []
    length = _train_length(text, kinds, train_length)
    if to <= length:
        raise UsageError(
            f"to={to} is not longer than the {length} tokens that the model was trained at; give "
            "a longer context, or the true length as train_length"
        )
    check_memory(inner, to)
    choice = _Choice(inner, text, kinds, length, to)
    factor, after = choice.made(positions, sharpen)
    extension = Extension(
        to=to,
        train_length=length,
        positions=choice.positions,
        factor=factor,
        sharpen=str(sharpen),
        rope_limit_before=_finite(choice.limit({})),
        rope_limit=_finite(choice.limit(after)),
        before={name: copy.deepcopy(getattr(text, name)) for name in after},
        after=after,
    )
    scale: Any = sharpen
    if sharpen == "yarn":
        scale = "none" if choice.positions == "yarn" else (0.1 * math.log(to / length) + 1) ** 2
    if scale == "clamp":
        convert(inner, rule="clamp", train_length=length)
    elif scale != "none":
        convert(inner, rule="temperature")
        with torch.no_grad():
            for _, module in converted_modules(inner):
                module.get_parameter(f"{ATTRIBUTE}.s").fill_(float(scale))
    extension.put(inner)
    return extension


def revert(model: nn.Module) -> nn.Module:
    """Undo a conversion and an extension, in place: softmax again, and nothing else changed."""
    extension = Extension.of(model)
    is_converted = Conversion.of(model) is not None
    if not is_converted and extension is None:
        raise UsageError(f"this {type(model).__name__} was not converted; there is nothing to undo")
    if is_converted:
        Conversion.take_away(unwrapped(model))
    if extension is not None:
        extension.take_away(unwrapped(model))
    return model


class _Choice:
    """The rotations that a model could have, and how far each carries."""

    def __init__(self, model: Any, text: Any, kinds: list[str | None], length: int, to: int):
        self.text, self.kinds, self.length, self.to = text, kinds, length, to
        self.rotary = [type(module) for module in _rotary_modules(model, text)]
        self.positions = "none"
        if kinds and not self.rotary:
            raise UsageError(
                f"{type(model).__name__} makes its rotations by code of its own, which cannot be "
                "changed here; positions='none' leaves them"
            )
        self.trained = {kind: self._frequencies(text, kind) for kind in kinds}

    def made(self, positions: str, sharpen: str | float) -> tuple[float, dict[str, Any]]:
        """Find the factor, and the values of the config that it changes."""
        after: dict[str, Any] = {"max_position_embeddings": self.to}
        if self.kinds and positions == "auto":
            positions = "none" if self.limit({}) >= self.to else "base"
        if positions == "none":
            return 1.0, after
        self.positions = positions
        if positions == "yarn":
            factor = self.to / self.length
            return factor, after | {"rope_parameters": self._yarn(factor, sharpen)}
        factor = self._base_factor()
        return factor, after | {"rope_parameters": self._base(factor)}

    def limit(self, changes: Mapping[str, Any]) -> float:
        """Compute the RoPE limit under changed values of the config."""
        if not self.kinds:
            return math.inf
        config = copy.deepcopy(self.text)
        for name, value in changes.items():
            setattr(config, name, copy.deepcopy(value))
        return min(
            frequency_limit(self.length, self.trained[kind], self._frequencies(config, kind))
            for kind in self.kinds
        )

    def _frequencies(self, config: Any, kind: str | None) -> list[float]:
        made = self.rotary[0](config)
        return getattr(made, "inv_freq" if kind is None else f"{kind}_inv_freq").tolist()

    def _changed(self, change: Any) -> dict[str, Any]:
        """Copy the parameters of the rotation, changed for the layers that are extended."""
        found = copy.deepcopy(dict(self.text.rope_parameters))
        for kind in self.kinds:
            if kind is None:
                found = change(found)
            else:
                found[kind] = change(found[kind])
        return found

    def _base(self, factor: float) -> dict[str, Any]:
        return self._changed(lambda rope: {**rope, "rope_theta": rope["rope_theta"] * factor})

    def _yarn(self, factor: float, sharpen: str | float) -> dict[str, Any]:
        def change(rope: dict[str, Any]) -> dict[str, Any]:
            kind = rope.get("rope_type", "default")
            if kind not in ("default", "yarn") or rope.get("mscale_all_dim"):
                what = "of type yarn with mscale_all_dim" if kind == "yarn" else f"of type {kind}"
                raise UsageError(
                    f"the rotation of this model is {what}, which YaRN cannot stand in for; give "
                    "positions='base'"
                )
            if kind == "yarn":
                before = rope.get("attention_factor") or _yarn_factor(rope["factor"])
                new = {"factor": rope["factor"] * factor}
            else:
                before = 1.0
                new = {"factor": factor, "original_max_position_embeddings": self.length}
            changed = {**rope, "rope_type": "yarn", **new, "attention_factor": before}
            if sharpen == "yarn":
                # Transformers' own: 0.1 log(factor) + 1 on query and key.
                del changed["attention_factor"]
            return changed

        return self._changed(change)

    def _base_factor(self) -> float:
        """Find the least factor, to three digits, whose RoPE limit is the context asked for."""
        low, high = 0.0, math.log(_LARGEST_FACTOR)
        if self._limit_of_base(high) < self.to:
            raise UsageError(
                f"no RoPE base carries this model from {self.length} to {self.to} tokens; give a "
                "shorter context"
            )
        while high - low > 1e-4:
            middle = (low + high) / 2
            if self._limit_of_base(middle) < self.to:
                low = middle
            else:
                high = middle
        rounding = 10.0 ** (math.floor(math.log10(math.exp(high))) - 2)
        return round(math.ceil(math.exp(high) / rounding) * rounding, 6)

    def _limit_of_base(self, log_factor: float) -> float:
        return self.limit({"rope_parameters": self._base(math.exp(log_factor))})


def _yarn_factor(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _full_layers(model: Any) -> dict[str, nn.Module]:
    """Find the layers without a window; raise where there are none."""
    every = dict(attention_modules(model, layers="all", attention="self"))
    found = dict(attention_modules(model, layers="full", attention="self"))
    if not every:
        raise UsageError(
            f"{type(model).__name__} has its own attention code, or none: none of its layers goes "
            "through Transformers' attention interface, so it cannot be extended"
        )
    if not found:
        raise UsageError(
            f"all attention layers of this {type(model).__name__} have a window, which bounds what "
            "they see at any length: there is nothing to extend"
        )
    return found


def _kinds(text: Any, layers: Mapping[str, nn.Module]) -> list[str | None]:
    """Find which of a config's rotations belong to these layers: [None] where it has one for all.

    Raises where there is none, or none that can be changed for them alone.
    """
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        raise UsageError(
            f"this {text.model_type} has no rotary positions: learned ones and biases cannot be "
            "extended without training; positions='none' with a sharpen scales its queries"
        )
    of_layers = getattr(text, "layer_types", None) or []
    by_kind = bool(of_layers) and set(rope) <= set(of_layers)
    if by_kind:
        used = {of_layers[i] for m in layers.values() if (i := _index(m)) is not None}
        kinds: list[str | None] = [kind for kind in rope if kind in used and rope[kind]]
        if not kinds:
            raise UsageError(
                "the full attention layers of this model have no rotary positions; "
                "positions='none' with a sharpen scales their queries"
            )
    else:
        kinds = [None]
        if any("sliding" in kind or "chunked" in kind for kind in of_layers):
            raise UsageError(
                "the layers with windows of this model share one rotation with the others, so that "
                "it cannot be changed for those alone; positions='none' leaves it"
            )
    for kind in kinds:
        name = _rope(text, kind).get("rope_type", "default")
        if name not in _KNOWN:
            raise UsageError(
                f"the rotation of this model is of type {name!r}, whose frequencies change with "
                f"the length or were searched for this model; {', '.join(_KNOWN)} can be extended, "
                "and positions='none' leaves it"
            )
    return kinds


def _rope(text: Any, kind: str | None) -> dict[str, Any]:
    return text.rope_parameters if kind is None else text.rope_parameters[kind]


def _index(module: Any) -> int | None:
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


def _train_length(text: Any, kinds: list[str | None], given: int | None) -> int:
    """Find the length that a model was trained at; raise where its config does not say."""
    if given is not None:
        return given
    scaled = [
        name
        for kind in kinds
        if (name := _rope(text, kind).get("rope_type", "default")) not in ("default", "llama3")
    ]
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 2 or scaled:
        says = f"max_position_embeddings is {length}"
        if scaled:
            says += f" under a rotation of type {scaled[0]!r}, which may not have been trained"
        raise UsageError(
            f"the config does not say how long the model was trained: {says}; give train_length, "
            "the longest texts of its training, such as train_length=8192"
        )
    return length


def check_memory(model: Any, to: int) -> None:
    """Raise on a context whose keys and values this machine could not hold for one text."""
    text = model.config.get_text_config()
    device = module_device(model)
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf"):
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = torch.finfo(model.dtype).bits // 8
    need = 2 * to * text.num_hidden_layers * heads * width * size
    if need > room:
        raise UsageError(
            f"a context of {to} tokens needs {need / 2**30:,.0f} GiB for its keys and values, and "
            f"{device} has {room / 2**30:,.0f}; give a shorter one"
        )


def _rotary_modules(model: nn.Module, text: Any) -> list[Any]:
    """Find the modules that make the tables of a config's rotation."""
    return [
        module
        for module in model.modules()
        if getattr(module, "config", None) is text
        and any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    ]


def _set(model: Any, values: Mapping[str, Any]) -> None:
    """Give a model's config these values, and make its tables by them."""
    text = model.config.get_text_config()
    for name, value in values.items():
        setattr(text, name, copy.deepcopy(value))
    for module in _rotary_modules(model, text):
        fresh = type(module)(text)
        fresh.to(module_device(module))
        # Its own attributes alone, so that hooks of others stay.
        own = set(vars(nn.Module()))
        vars(module).update({name: v for name, v in vars(fresh).items() if name not in own})
        module._buffers.update(fresh._buffers)


def _finite(limit: float) -> float | None:
    return None if math.isinf(limit) else round(limit, 1)
