"""Parameters and state: the modules that people put into their own models."""

from ssmax.nn.attention import SelfAttention
from ssmax.nn.cache import KVCache
from ssmax.nn.norm import RMSNorm
from ssmax.nn.rotary import RotaryEmbedding
from ssmax.nn.scale import RULES, ProbeTable, Rule, SSMaxScale

__all__ = [
    "RULES",
    "KVCache",
    "ProbeTable",
    "RMSNorm",
    "RotaryEmbedding",
    "Rule",
    "SSMaxScale",
    "SelfAttention",
]
