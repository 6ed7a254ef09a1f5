"""A model of Transformers in float32 whose queries are scaled as we say: on, off, or as n."""

# Q new queries, T tokens, K tokens whose log-probabilities are compared, H heads

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmax._extras import require
from ssmax.audit.qwen import as_qwen2
from ssmax.audit.scales import Scale
from ssmax.hf.full_checkpoint import load_source
from ssmax.hf.sources import read_config

NAME = "ssmax_audit"
"""Of the attention function that is put into Transformers."""
_REFERENCE = "_ssmax_reference"
"""Where a layer says whose it is."""
CHUNK = 512
Progress = Callable[[int, int], None]


class Reference:
    """What a checkpoint computes, by Transformers' code and our own scale."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        transformers = require("transformers", install="ssmax[hf]", purpose="ssmax.audit")
        self.scale: Scale = scale
        self._n: Tensor | None = None
        self._model: Any = load(transformers, folder)
        scale.switch_off(self._model)
        for module in self._model.modules():
            # Weak, or neither would ever be freed.
            setattr(module, _REFERENCE, weakref.ref(self))
        transformers.AttentionInterface.register(NAME, _attend)
        masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        transformers.AttentionMaskInterface.register(NAME, masks["sdpa"])
        self._model.set_attn_implementation(NAME)

    @torch.no_grad()
    def logprobs(
        self, tokens_T: Tensor, ids_TK: Tensor, *, scaled: bool, progress: Progress | None = None
    ) -> Tensor:
        """Compute log-probabilities of `ids` after each token; one row fewer than tokens."""
        past, rows = self._empty_cache(), []
        total = ids_TK.shape[0]
        for start in range(0, total, CHUNK):
            stop = min(start + CHUNK, total)
            rows.append(self._run(tokens_T, start, stop, past, ids_TK[start:stop], scaled))
            if progress is not None:
                progress(stop, total)
        return torch.cat(rows)

    @torch.no_grad()
    def after(
        self, tokens_T: Tensor, position: int, ids_K: Tensor
    ) -> Callable[[int | None], Tensor]:
        """Make a function of n, or of None for no scale, of the query at one position.

        All before it are scaled as declared. It returns log-probabilities of `ids`, (K,).
        """
        past = self._empty_cache()
        for start in range(0, position, CHUNK):
            stop = min(start + CHUNK, position)
            self._run(tokens_T, start, stop, past, ids_K[None].expand(stop - start, -1), True)

        @torch.no_grad()
        def compute(n: int | None) -> Tensor:
            self._n = None if n is None else torch.tensor([n])
            logits = self._forward(tokens_T, position, position + 1, past)
            past.crop(-1)
            return logits.log_softmax(-1)[0, ids_K]

        return compute

    def _run(
        self, tokens_T: Tensor, start: int, stop: int, past: Any, ids_QK: Tensor, scaled: bool
    ) -> Tensor:
        self._n = torch.arange(start + 1, stop + 1) if scaled else None
        logits_QV = self._forward(tokens_T, start, stop, past)
        return logits_QV.log_softmax(-1).gather(1, ids_QK)

    def _forward(self, tokens_T: Tensor, start: int, stop: int, past: Any) -> Tensor:
        new = tokens_T[None, start:stop]
        positions = torch.arange(start, stop)[None]
        out = self._model(
            input_ids=new, position_ids=positions, past_key_values=past, use_cache=True
        )
        return out.logits[0].float()

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache

        # Without the config: one of windows could not be cut back.
        return DynamicCache()

    def scaled(self, module: Any, query: Tensor) -> Tensor:
        """Scale the queries (1, H, Q, D) of a layer as the call that runs asks for."""
        if self._n is None or not self.scale.applies(module):
            return query
        return query * self.scale.factor(module, self._n).reshape(1, -1, query.shape[2], 1)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query = getattr(module, _REFERENCE)().scaled(module, query)
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def load(transformers: Any, folder: Path) -> Any:
    """Load a model in float32, one of ours with its s."""
    values = read_config(folder)
    if values["model_type"] == "qwen":
        return as_qwen2(transformers, folder, values).eval()
    return load_source(folder, may_be_converted=True, dtype=torch.float32).eval()
