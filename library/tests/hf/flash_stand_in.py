"""flash_attn's functions in plain torch, so that Transformers' way to them runs on any machine."""

import importlib.machinery
import sys
import types

import pytest
import torch
from transformers import modeling_flash_attention_utils as integration


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), **_
):
    """(B, T, H, D); causal and windows are aligned at the end of the keys."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] + q.shape[1] - k.shape[1]
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), block_table=None, **_,
):  # fmt: skip
    """(tokens, H, D): document after document."""
    assert block_table is None
    out = torch.zeros_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        of_q = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        of_k = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        out[of_q] = flash_attn_func(
            q[None, of_q], k[None, of_k], v[None, of_k],
            softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        )[0]  # fmt: skip
    return out


@pytest.fixture
def flash_attn(monkeypatch):
    """`flash_attention_2` is there, and computes here."""
    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_func = flash_attn_func
    package.flash_attn_varlen_func = flash_attn_varlen_func
    package.flash_attn_with_kvcache = None
    padding.pad_input, padding.unpad_input = integration._pad_input, integration._unpad_input
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(integration, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(integration, "_loaded_implementation", None)
