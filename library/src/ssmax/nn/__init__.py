"""Parameters and state: the modules that people put into their own models.

Names are loaded on first use.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax.nn.attention import SelfAttention as SelfAttention
    from ssmax.nn.cache import KVCache as KVCache
    from ssmax.nn.norm import RMSNorm as RMSNorm
    from ssmax.nn.rotary import RotaryEmbedding as RotaryEmbedding
    from ssmax.nn.rules import RULES as RULES
    from ssmax.nn.rules import Rule as Rule
    from ssmax.nn.scale import ProbeTable as ProbeTable
    from ssmax.nn.scale import SSMaxScale as SSMaxScale
else:
    __all__, __getattr__, __dir__ = door(__name__)
