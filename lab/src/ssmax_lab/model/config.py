"""Configure a language model. `LMConfig()` is the paper's table 1."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from ssmax.errors import UsageError
from ssmax.nn.rules import RULES

CONFIG, FORMAT = "config.json", "ssmax-lm-1"
"""The file beside a model's weights, and what it says of its format."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LMConfig:
    """A decoder of RMSNorm, SwiGLU and RoPE; untied embeddings, no biases."""

    num_layers: int = 12
    """Blocks of attention and feed-forward."""
    num_heads: int = 12
    """Query heads of a layer."""
    num_kv_heads: int | None = None
    """Key heads of a layer; None: as many as query heads."""
    hidden_size: int = 768
    """Channels of the residual stream."""
    head_dim: int | None = None
    """Channels of a head; None: hidden_size / num_heads."""
    intermediate_size: int = 2048
    """Channels inside the feed-forward."""
    vocab_size: int = 50_257
    """Tokens of the vocabulary: GPT-2's."""
    rule: str = "softmax"
    """How attention scales its query: a name of `ssmax.nn.RULES`."""
    train_length: int = 1024
    """Tokens of a training sequence; rules start from it or are defined by it."""
    theta: float = 10_000.0
    """Base of the rotary frequencies; changeable at test time on the model."""
    rotary_dim: int | None = None
    """Channels of a head that are rotated; None: all, 0: none."""
    qk_norm: bool = False
    """RMSNorm on query and key heads, before rotation and scaling."""
    window: int | None = None
    """Sliding window; None: full attention."""
    full_every: int | None = None
    """Every so many-th layer has full attention all the same; None: all have the window."""
    query_gain: float = 1.0
    """Times the first weights of every query projection."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    dropout_p: float = 0.0
    """Dropout on attention weights while training."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "hidden_size", "intermediate_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_kv_heads", "head_dim", "window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1 or none, got {value}")
        if self.full_every is not None and (self.full_every < 2 or self.window is None):
            raise UsageError(
                f"full_every must be at least 2 and needs a window, got {self.full_every} with "
                f"window={self.window}"
            )
        if self.rule not in RULES:
            raise UsageError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.train_length < 2:
            raise UsageError(f"train_length must be at least 2, got {self.train_length}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise UsageError(
                f"hidden_size must be a multiple of num_heads, got {self.hidden_size} and "
                f"{self.num_heads}; or set head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise UsageError(
                "num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.rotary % 2 or not 0 <= self.rotary <= self.head:
            raise UsageError(
                f"rotary_dim must be even and at most head_dim, {self.head}, got {self.rotary}"
            )
        for name in ("theta", "query_gain", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0.0 <= self.dropout_p < 1.0:
            raise UsageError(f"dropout_p must be at least 0 and below 1, got {self.dropout_p}")

    @property
    def kv_heads(self) -> int:
        """Count the key heads of a layer."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head(self) -> int:
        """Count the channels of a head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary(self) -> int:
        """Count the channels of a head that are rotated."""
        return self.head if self.rotary_dim is None else self.rotary_dim

    def window_of(self, layer: int) -> int | None:
        """Give the sliding window of a layer; None where it has full attention."""
        is_full = self.full_every is not None and (layer + 1) % self.full_every == 0
        return None if is_full else self.window

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, for a file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LMConfig":
        """Read the configuration of a file; an error about an unknown key names the nearest one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise UsageError(
                    f"unknown key {key!r} in the model's configuration{nearest(key, known)}"
                )
        return cls(**values)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse what no token can be chosen by."""
    if not temperature >= 0.0:
        raise UsageError(f"temperature must be at least 0 (0 is greedy), got {temperature}")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise UsageError(f"top_p must be above 0 and at most 1, got {top_p}")


def nearest(key: str, known: list[str]) -> str:
    """End an error about an unknown key: with the known one that was meant, or all of them."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
