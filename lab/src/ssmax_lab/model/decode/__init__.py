"""Attention of one query over a cache, its bounds read on the device."""

from ssmax_lab.model.decode.api import decode_attention

__all__ = ["decode_attention"]
