"""Scalable-Softmax: attention that keeps its focus at any context length.

Every public name is loaded on first use, so `import ssmax` costs no torch.
"""

import logging
from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax import audit as audit
    from ssmax import distributed as distributed
    from ssmax import export as export
    from ssmax import hf as hf
    from ssmax import nn as nn
    from ssmax import ops as ops
    from ssmax import testing as testing
    from ssmax.nn import SSMaxScale as SSMaxScale
    from ssmax.ops.attention import attention_rows as attention_rows
    from ssmax.ops.attention import ssmax_attention as ssmax_attention
    from ssmax.ops.length import initial_s as initial_s
    from ssmax.ops.length import rope_limit as rope_limit
    from ssmax.ops.rope import apply_rope as apply_rope
    from ssmax.ops.rope import rope_tables as rope_tables
    from ssmax.ops.rope_scale.api import rope_scale as rope_scale
    from ssmax.ops.rope_scale.api import rope_ssmax as rope_ssmax
    from ssmax.ops.scale import ssmax_factor as ssmax_factor
    from ssmax.ops.softmax import ssmax as ssmax
    from ssmax.ops.softmax import ssmax_power as ssmax_power
    from ssmax.ops.visible import num_visible_keys as num_visible_keys
    from ssmax.ops.visible import visible_keys as visible_keys
else:
    __all__, __getattr__, __dir__ = door(__name__)

__version__ = "0.1.0"
# Silent until somebody configures the logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())
