"""Configure a run. Born valid, never changed, written beside the run as it was resolved."""

import contextlib
import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ssmax.errors import UsageError
from ssmax.nn.rules import RULES
from ssmax_lab.model.config import LMConfig, nearest

Parallel = Literal["ddp", "fsdp2"]
Schedule = Literal["constant", "cosine", "warmup-stable-decay"]
Precision = Literal["float32", "bfloat16"]
OnNonfinite = Literal["stop", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the samples come from."""

    folder: str = ""
    """Tokens as `ssmax-lab data prepare` left them; "" for a run that has its own samples."""
    tokenizer: str = ""
    """Whose tokens they are; filled in from the data."""
    questions: str = ""
    """Of fine-tuning: a file, "invented" or "hidden"."""
    base: str = ""
    """Of fine-tuning: the run whose model is taught."""
    seed: int = 0
    """Decides the order of the samples."""
    validation_windows: int = 64
    """Windows of the validation shards that are looked at; 0: never."""
    needle_length: int = 0
    """Tokens of a document with a hidden number and its question, mixed into pretraining; 0: none.
    No two are alike; the loss is that of the number, which weighs as much as the text."""
    needles_per_row: int = 4
    """Of these documents with every row of text."""
    needle_digits: int = 4
    """Of their numbers."""

    def __post_init__(self) -> None:
        _check(
            self, needles_per_row=1, needle_digits=1, needle_length=0,
            validation_windows=0, seed=0,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW; weight decay is for parameters of rank 2 and more, so never for s, b or p_n."""

    lr: float = 6e-4
    """Peak of the learning rate."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.95
    """Decay of the gradient's mean square."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0: never."""
    scale_lr: float = 1.0
    """The learning rate of what the scaling rules learn, times lr."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "scale_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UsageError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )
        _check(self, weight_decay=0.0, max_grad_norm=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate over the steps, times its peak."""

    kind: Schedule = "constant"
    """What follows the warm-up."""
    warmup_steps: int = 1000
    """Steps of a linear rise from 0."""
    decay_steps: int = 0
    """Last steps, of warmup-stable-decay alone, that fall linearly."""
    final: float = 0.0
    """Where cosine and warmup-stable-decay end, times the peak."""

    def __post_init__(self) -> None:
        _check(self, warmup_steps=0, decay_steps=0)
        if not 0.0 <= self.final <= 1.0:
            raise UsageError(f"final must be from 0 to 1, got {self.final}")
        if not self.decay_steps and self.kind == "warmup-stable-decay":
            raise UsageError("decay_steps must be at least 1 for 'warmup-stable-decay'")
        if self.decay_steps and self.kind != "warmup-stable-decay":
            raise UsageError(
                f"decay_steps belongs to kind 'warmup-stable-decay', not {self.kind!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SwitchConfig:
    """Another rule for the last steps: configuration (f)."""

    rule: str = ""
    """The rule to switch to; "": none."""
    last_fraction: float = 0.125
    """The share of the steps that it gets."""

    def __post_init__(self) -> None:
        if self.rule and self.rule not in RULES:
            raise UsageError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if not 0.0 < self.last_fraction < 1.0:
            raise UsageError(f"last_fraction must be between 0 and 1, got {self.last_fraction}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long, how much at once, on what, and what is kept."""

    recipe: str = "paper"
    """The name of what it started from."""
    steps: int = 200_000
    """Steps of the optimizer."""
    batch_size: int = 2048
    """Sequences of a step, over all ranks and micro-batches."""
    micro_batch: int = 64
    """Sequences that one rank passes through the model at once, at most."""
    seed: int = 0
    """Decides the first weights, and dropout."""
    precision: Precision = "bfloat16"
    """Of the matrix products; weights and sums are float32."""
    residual: Precision = "bfloat16"
    """Of the residual stream where products are bfloat16; where they are float32 it is too."""
    compile: bool = True
    """torch.compile the model."""
    activation_memory_budget: float = 1.0
    """Share of the activations that torch.compile keeps for the backward pass, where it is used;
    it computes the others again, the cheapest first."""
    parallel: Parallel = "ddp"
    """Over several ranks the model is copied, or sharded."""
    context_parallel: int = 1
    """Ranks that hold one sequence together, each a part of its tokens; for pretraining."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """How many of the newest stay."""
    validate_every: int = 1000
    """Steps between looks at the validation windows."""
    scale_every: int = 100
    """Steps between records of every head's s and b."""
    metrics_every: int = 10
    """Steps between writes to metrics.jsonl, which has every step; the device is not waited for
    in between."""
    on_nonfinite: OnNonfinite = "stop"
    """A loss or gradient that is not finite stops the run, or is skipped and counted."""

    def __post_init__(self) -> None:
        _check(
            self, steps=1, batch_size=1, micro_batch=1, context_parallel=1, seed=0,
            checkpoint_every=1, keep_checkpoints=1, validate_every=1, scale_every=1,
            metrics_every=1,
        )  # fmt: skip
        if not 0.0 <= self.activation_memory_budget <= 1.0:
            raise UsageError(
                f"activation_memory_budget must be between 0 and 1, got "
                f"{self.activation_memory_budget}"
            )


# What may differ when a run resumes: it overrides where and how the run is computed, or how much of
# it there is, not what was computed so far.
MAY_CHANGE = (
    "run.steps",
    "run.micro_batch",
    "run.compile",
    "run.activation_memory_budget",
    "run.parallel",
    "run.context_parallel",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.on_nonfinite",
    "data.folder",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A run, whole. The defaults are the paper's tables 1 and 2."""

    model: LMConfig = dataclasses.field(default_factory=LMConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    switch: SwitchConfig = dataclasses.field(default_factory=SwitchConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.schedule.decay_steps > self.run.steps:
            raise UsageError(
                f"schedule.decay_steps must be at most run.steps, {self.run.steps}, "
                f"got {self.schedule.decay_steps}"
            )
        if self.switch.rule == self.model.rule:
            raise UsageError(
                f"switch.rule must differ from model.rule, both are {self.switch.rule!r}"
            )

    @property
    def switch_step(self) -> int:
        """Count the steps under the model's own rule; all of them where nothing is switched."""
        if not self.switch.rule:
            return self.run.steps
        return self.run.steps - max(1, round(self.run.steps * self.switch.last_fraction))

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of a step."""
        return self.run.batch_size * self.model.train_length

    @property
    def is_bound_to_steps(self) -> bool:
        """Tell whether what a step does depends on how many there will be."""
        return self.schedule.kind != "constant" or bool(self.switch.rule)

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, for a file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read the configuration of a file; an error about an unknown key names the nearest one."""
        return cls().with_overrides(flat(values))

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """Copy with values by their dotted names, "optim.lr"; texts are read as the field's type.

        All are set at once: what is valid only together may be given together.
        """
        known = {
            f"{room.name}.{field.name}": field
            for room in dataclasses.fields(self)
            for field in dataclasses.fields(getattr(self, room.name))
        }
        rooms: dict[str, dict[str, Any]] = {}
        for key, value in overrides.items():
            if key not in known:
                raise UsageError(f"unknown key {key!r}{nearest(key, list(known))}")
            room, name = key.split(".", 1)
            rooms.setdefault(room, {})[name] = _as_field(key, value, known[key])
        changed = {}
        for room, fields in rooms.items():
            try:
                changed[room] = dataclasses.replace(getattr(self, room), **fields)
            except UsageError as error:
                raise UsageError(f"{room}.{error}") from None
        return dataclasses.replace(self, **changed)


def read_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Read `["optim.lr=3e-4"]` as a mapping."""
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"an override is written key=value, as in optim.lr=3e-4, got {text!r}")
        overrides[key.strip()] = value.strip()
    return overrides


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a .toml or .json file by dotted names; a run's config.json is such a file."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        if path.suffix == ".toml":
            values = tomllib.loads(path.read_text())
        elif path.suffix == ".json":
            values = json.loads(path.read_text())
        else:
            raise UsageError(f"a configuration is a .toml or .json file, got {path}")
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold sections of settings, as [optim], got {values!r:.40}")
    values.pop("provenance", None)
    return flat(values)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give settings by their dotted names, "optim.lr"."""
    rooms = [field.name for field in dataclasses.fields(TrainConfig)]
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            if key not in rooms:
                raise UsageError(f"unknown section {key!r}{nearest(key, rooms)}")
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def _as_field(key: str, value: Any, field: dataclasses.Field) -> Any:
    """Convert a value to its field's type: texts are read, wrong types refused."""
    kinds: Sequence[Any] = (
        [str] if typing.get_origin(field.type) is Literal else get_args(field.type)
    )
    is_optional = types.NoneType in kinds
    if is_optional and value in (None, "none", "None", ""):
        return None
    kinds = [kind for kind in kinds or [field.type] if kind is not types.NoneType]
    for kind in kinds:
        with contextlib.suppress(TypeError, ValueError, KeyError):
            return _READ[kind](value)
    wanted = " or ".join(kind.__name__ for kind in kinds) + (" or none" if is_optional else "")
    raise UsageError(f"{key} must be {wanted}, got {value!r}")


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _as_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _as_int(value: Any) -> int:
    number = _as_float(value)
    try:
        return int(str(value))
    except ValueError:
        # Written as 1e6, a whole number is one.
        if not number.is_integer():
            raise
        return int(number)


_READ = {
    bool: lambda value: {"true": True, "false": False}[str(value).lower()],
    float: _as_float,
    int: _as_int,
    str: _as_text,
}


def _check(config: Any, **least: float) -> None:
    """Refuse a word that is none of its field's, and numbers below their least or not finite."""
    for field in dataclasses.fields(config):
        value, words = getattr(config, field.name), get_args(field.type)
        if typing.get_origin(field.type) is Literal and value not in words:
            raise UsageError(f"{field.name} must be one of {', '.join(words)}, got {value!r}")
    for name, low in least.items():
        value = getattr(config, name)
        if name == "seed" and not 0 <= value < 2**63:
            raise UsageError(f"seed must be from 0 to 2**63 - 1, got {value}")
        if not low <= value < math.inf:
            raise UsageError(f"{name} must be at least {low}, got {value}")
