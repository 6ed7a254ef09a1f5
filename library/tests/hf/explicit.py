"""A converted model's twin in float64: logits written out, and who sees whom told by the test.

No cache, no mask of Transformers, no kernel, no count of ours: n is the sum of a row of `visible`.
"""

import copy
import re

import torch
from transformers import AttentionInterface

import ssmax.hf
from ssmax.hf.layers import converted_modules, window_of

CROSS = re.compile(r"encoder_attn|EncDecAttention|crossattention")


def attend(module, query, key, value, attention_mask, scaling=None, position_bias=None, **_):
    """softmax((s log n + b) q k + what is added to it) v, over what `module.visible` shows."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    seen_BHQK = module.visible if module.visible.dim() == 4 else module.visible.unsqueeze(1)
    s_H, b_H = (x.view(1, -1, 1, 1) for x in module.s_and_b)
    factor = s_H * seen_BHQK.sum(-1, keepdim=True).clamp_min(1).double().log() + b_H
    logits = (query @ key.mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling) * factor
    if position_bias is not None:
        logits = logits + position_bias
    weights = logits.masked_fill(~seen_BHQK, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register("explicit", attend)


def causal(real_BT, documents_BT=None, window=None):
    """(B, T, T): what stands before, is no padding, of the same document, within the window."""
    place = torch.arange(real_BT.shape[1])
    behind = place[:, None] - place
    seen = (behind >= 0) & real_BT.bool()[:, None, :]
    if documents_BT is not None:
        seen = seen & (documents_BT[:, :, None] == documents_BT[:, None, :])
    return seen if window is None else seen & (behind < window)


def both_ways(real_BK, queries, reach=None):
    """(B, Q, K): whatever is no padding, at most `reach` away."""
    seen = real_BK.bool()[:, None, :].expand(-1, queries, -1)
    if reach is None:
        return seen
    place = torch.arange(queries)
    return seen & ((place[:, None] - place).abs() <= reach)


class Explicit:
    """The twin of a converted model."""

    def __init__(self, model):
        self.twin = copy.deepcopy(model)
        found = {name: module.ssmax for name, module in converted_modules(self.twin)}
        ssmax.hf.revert(self.twin)
        self.twin.double().eval().set_attn_implementation("explicit")
        self.modules = {}
        for name, scale in found.items():
            module = self.modules[name] = self.twin.get_submodule(name)
            module.s_and_b = scale.s.detach().double(), scale.bias.detach().double()

    @torch.no_grad()
    def logits(self, visible, **inputs):
        """Of one whole forward; `visible` tells (B, Q, K), or one for every head, by a layer's name
        and window."""
        for name, module in self.modules.items():
            module.visible = visible(name, window_of(module))
        return self.twin(**inputs).logits
