"""Scalable-Softmax: attention that keeps its focus at any context length.

Every public name is loaded on first use, so `import ssmax` costs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssmax import data as data
    from ssmax import eval as eval
    from ssmax import hf as hf
    from ssmax import lm as lm
    from ssmax import nn as nn
    from ssmax import ops as ops
    from ssmax import records as records
    from ssmax import serve as serve
    from ssmax import testing as testing
    from ssmax import tiny as tiny
    from ssmax import train as train
    from ssmax.nn import SSMaxScale as SSMaxScale
    from ssmax.ops.attention import attention_rows as attention_rows
    from ssmax.ops.attention import ssmax_attention as ssmax_attention
    from ssmax.ops.rope import apply_rope as apply_rope
    from ssmax.ops.rope import rope_tables as rope_tables
    from ssmax.ops.rope_scale.api import rope_scale as rope_scale
    from ssmax.ops.rope_scale.api import rope_ssmax as rope_ssmax
    from ssmax.ops.scale import initial_s as initial_s
    from ssmax.ops.scale import ssmax_factor as ssmax_factor
    from ssmax.ops.softmax import ssmax as ssmax
    from ssmax.ops.softmax import ssmax_power as ssmax_power
    from ssmax.ops.visible import num_visible_keys as num_visible_keys
    from ssmax.ops.visible import visible_keys as visible_keys

__version__ = "0.1.0"

_HOME_OF = {
    "SSMaxScale": "ssmax.nn",
    "apply_rope": "ssmax.ops.rope",
    "attention_rows": "ssmax.ops.attention",
    "initial_s": "ssmax.ops.scale",
    "num_visible_keys": "ssmax.ops.visible",
    "rope_scale": "ssmax.ops.rope_scale.api",
    "rope_ssmax": "ssmax.ops.rope_scale.api",
    "rope_tables": "ssmax.ops.rope",
    "ssmax": "ssmax.ops.softmax",
    "ssmax_attention": "ssmax.ops.attention",
    "ssmax_factor": "ssmax.ops.scale",
    "ssmax_power": "ssmax.ops.softmax",
    "visible_keys": "ssmax.ops.visible",
}
_ROOMS = ("data", "eval", "hf", "lm", "nn", "ops", "records", "serve", "testing", "tiny", "train")

__all__ = [
    "SSMaxScale",
    "apply_rope",
    "attention_rows",
    "data",
    "eval",
    "hf",
    "initial_s",
    "lm",
    "nn",
    "num_visible_keys",
    "ops",
    "records",
    "rope_scale",
    "rope_ssmax",
    "rope_tables",
    "serve",
    "ssmax",
    "ssmax_attention",
    "ssmax_factor",
    "ssmax_power",
    "testing",
    "tiny",
    "train",
    "visible_keys",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"ssmax.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ssmax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
