"""Extend the context of a model: another rotation, a scale of its queries, nothing trained."""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ssmax.errors import UsageError
from ssmax.hf.choices import Positions, check_extension
from ssmax.hf.conversion import (
    Conversion,
    check_model,
    check_unconverted,
    convert,
    read_fields,
    unwrapped,
)
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.layers import attention_modules, converted_modules, module_device
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
        return None if values is None else read_fields(cls, values, where)

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
    if sharpen == "auto":
        sharpen = "yarn" if Conversion.of(inner) is None else "none"
    if sharpen != "none":
        check_unconverted(inner)
    text = inner.config.get_text_config()
    rotation = _Rotation(inner, text, train_length, is_kept=positions == "none")
    length = rotation.length
    if to <= length:
        raise UsageError(
            f"to={to} is not longer than the {length} tokens that the model was trained at; give "
            "a longer context, or the true length as train_length"
        )
    if positions == "auto":
        positions = "none" if rotation.limit(None) >= to else "base"
    factor, rope = 1.0, None
    if positions == "yarn":
        factor = to / length
        rope = rotation.yarn(factor, keeps_temperature=sharpen == "yarn")
    elif positions == "base":
        factor = rotation.base_factor(to)
        rope = rotation.base(factor)
    after: dict[str, Any] = {"max_position_embeddings": to}
    if rope is not None:
        after["rope_parameters"] = rope
    before_limit, limit = (
        None if math.isinf(found) else round(found, 1)
        for found in (rotation.limit(None), rotation.limit(rope))
    )
    extension = Extension(
        to=to,
        train_length=length,
        positions=positions,
        factor=factor,
        sharpen=str(sharpen),
        rope_limit_before=before_limit,
        rope_limit=limit,
        before={name: copy.deepcopy(getattr(text, name)) for name in after},
        after=after,
    )
    scale: Any = sharpen
    if sharpen == "yarn":
        scale = "none" if positions == "yarn" else (0.1 * math.log(to / length) + 1) ** 2
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


class _Rotation:
    """The rotation of a model's full attention layers, and those that it could have instead."""

    def __init__(self, model: Any, text: Any, train_length: int | None, *, is_kept: bool) -> None:
        self.text = text
        layers = dict(attention_modules(model, layers="full", attention="self"))
        if not layers:
            has_windows = any(attention_modules(model, layers="all", attention="self"))
            raise UsageError(
                f"all attention layers of this {type(model).__name__} have a window, which bounds "
                "what they see at any length: there is nothing to extend"
                if has_windows
                else f"{type(model).__name__} has its own attention code, or none: none of its "
                "layers goes through Transformers' attention interface, so it cannot be extended"
            )
        self.kinds: list[str | None] = []
        """Which of the config's rotations these layers have; [None] where it has one for all."""
        self.makers = [type(module) for module in _rotary_modules(model, text)]
        try:
            self.kinds = _kinds(text, layers, self.makers)
        except UsageError:
            if not is_kept:
                raise
        self.length: int = train_length or self._train_length()
        self.trained = {kind: self._frequencies(text, kind) for kind in self.kinds}

    def limit(self, rope: dict[str, Any] | None) -> float:
        """Compute the RoPE limit with other parameters of the rotation; None: its own."""
        config = copy.deepcopy(self.text)
        if rope is not None:
            config.rope_parameters = copy.deepcopy(rope)
        return min(
            (
                frequency_limit(self.length, self.trained[kind], self._frequencies(config, kind))
                for kind in self.kinds
            ),
            default=math.inf,
        )

    def base(self, factor: float) -> dict[str, Any]:
        """Raise the RoPE base."""
        return self._changed(lambda rope: {**rope, "rope_theta": rope["rope_theta"] * factor})

    def base_factor(self, to: int) -> float:
        """Find the least factor, to three digits, whose RoPE limit is the context asked for."""
        low, high = 0.0, math.log(_LARGEST_FACTOR)
        if self.limit(self.base(_LARGEST_FACTOR)) < to:
            raise UsageError(
                f"no RoPE base carries this model from {self.length} to {to} tokens; give a "
                "shorter context"
            )
        while high - low > 1e-4:
            middle = (low + high) / 2
            if self.limit(self.base(math.exp(middle))) < to:
                low = middle
            else:
                high = middle
        rounding = 10.0 ** (math.floor(math.log10(math.exp(high))) - 2)
        return round(math.ceil(math.exp(high) / rounding) * rounding, 6)

    def yarn(self, factor: float, *, keeps_temperature: bool) -> dict[str, Any]:
        """Take YaRN's frequencies, with its temperature, 0.1 log(factor) + 1, or without."""

        def change(rope: dict[str, Any]) -> dict[str, Any]:
            kind, attention = rope.get("rope_type", "default"), 1.0
            if kind not in ("default", "yarn") or rope.get("mscale_all_dim"):
                raise UsageError(
                    f"the rotation of this model is of type {kind}"
                    f"{' with mscale_all_dim' if kind == 'yarn' else ''}, which YaRN cannot stand "
                    "in for; give positions='base'"
                )
            new = {"factor": factor, "original_max_position_embeddings": self.length}
            if kind == "yarn":
                new = {"factor": rope["factor"] * factor}
                attention = 0.1 * math.log(max(rope["factor"], 1.0)) + 1.0
                attention = rope.get("attention_factor") or attention
            changed = {**rope, "rope_type": "yarn", **new, "attention_factor": attention}
            if keeps_temperature:
                # Transformers' own, on query and key.
                del changed["attention_factor"]
            return changed

        return self._changed(change)

    def _changed(self, change: Any) -> dict[str, Any]:
        """Copy the parameters of the rotation, changed for the layers that are extended."""
        found: dict[Any, Any] = copy.deepcopy(dict(self.text.rope_parameters))
        if self.kinds == [None]:
            return change(found)
        found.update({kind: change(found[kind]) for kind in self.kinds})
        return found

    def _frequencies(self, config: Any, kind: str | None) -> list[float]:
        made = self.makers[0](config)
        return getattr(made, "inv_freq" if kind is None else f"{kind}_inv_freq").tolist()

    def _train_length(self) -> int:
        """Find the length that a model was trained at; raise where its config does not say."""
        types = [_rope_type(self.text, kind) for kind in self.kinds]
        scaled = [name for name in types if name not in ("default", "llama3")]
        length = getattr(self.text, "max_position_embeddings", None)
        if not isinstance(length, int) or length < 2 or scaled:
            says = f"max_position_embeddings is {length}"
            if scaled:
                says += f" under a rotation of type {scaled[0]!r}, which may not have been trained"
            raise UsageError(
                f"the config does not say how long the model was trained: {says}; give "
                "train_length, the longest texts of its training, such as train_length=8192"
            )
        return length


def _kinds(text: Any, layers: Mapping[str, nn.Module], makers: Sequence[type]) -> list[str | None]:
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
    kinds: list[str | None] = [None]
    if of_layers and set(rope) <= set(of_layers):
        indices = (getattr(module, "layer_idx", None) for module in layers.values())
        used = {of_layers[index] for index in indices if isinstance(index, int)}
        kinds = [kind for kind in rope if kind in used and rope[kind]]
        if not kinds:
            raise UsageError(
                "the full attention layers of this model have no rotary positions; "
                "positions='none' with a sharpen scales their queries"
            )
    elif any("sliding" in kind or "chunked" in kind for kind in of_layers):
        raise UsageError(
            "the layers with windows of this model share one rotation with the others, so that "
            "it cannot be changed for those alone; positions='none' leaves it"
        )
    for name in (_rope_type(text, kind) for kind in kinds):
        if name not in _KNOWN:
            raise UsageError(
                f"the rotation of this model is of type {name!r}, whose frequencies change with "
                f"the length or were searched for this model; {', '.join(_KNOWN)} can be extended, "
                "and positions='none' leaves it"
            )
    if not makers:
        raise UsageError(
            f"this {text.model_type} makes its rotations by code of its own, which cannot be "
            "changed here; positions='none' leaves them"
        )
    return kinds


def _rope_type(text: Any, kind: str | None) -> str:
    rope = text.rope_parameters if kind is None else text.rope_parameters[kind]
    return rope.get("rope_type", "default")


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
