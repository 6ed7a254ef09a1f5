"""Evaluate a causal model of Transformers, converted or not."""

# B batch, T tokens, H heads, V vocabulary

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.hf.adapter import load
from ssmax.hf.full_checkpoint import from_pretrained, load_plain
from ssmax.hf.layers import learned_positions, module_device
from ssmax.hf.sources import check_source, read_by_transformers
from ssmax.hf.written_config import CLASS_PREFIX, KEY

CHUNK = 1024
"""Tokens that are read at a time for losses and rows: logits and masks are never wider."""


def load_causal(source: str | Path, adapter: str | Path | None = None, **options: Any) -> Any:
    """Load a causal model from a folder or the Hub, with its s, if any, or an adapter's."""
    transformers = require("transformers", install="ssmax-lab[hf]", purpose="loading a model")
    if KEY in causal_config(source):
        model = from_pretrained(source, **options)
    else:
        model = load_plain(transformers.AutoModelForCausalLM, source, **options)
    return model if adapter is None else load(model, adapter)


def causal_config(source: str | Path) -> dict[str, Any]:
    """Read a causal model's config.json, weights unread; anything else is a ValueError."""
    transformers = require("transformers", install="ssmax-lab[hf]", purpose="loading a model")
    check_source(
        source, of_an_adapter=f"name that model, and {source} as its adapter (--adapter {source})"
    )
    with read_by_transformers(source):
        values, _ = transformers.PretrainedConfig.get_config_dict(source)
    if not _is_causal(transformers, values):
        name = (values.get("architectures") or [values.get("model_type")])[0]
        raise UsageError(
            f"{source} holds a {name}, which is no causal language model; give one that predicts "
            "the next token"
        )
    return values


def check_memory(model: Any, to: int) -> None:
    """Raise on a context whose keys and values this machine could not hold for one text."""
    text = model.config.get_text_config()
    device = module_device(model)
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu" and hasattr(os, "sysconf"):
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = torch.finfo(model.dtype).bits // 8
    need = 2 * to * text.num_hidden_layers * heads * width * size
    if need > room:
        raise UsageError(
            f"a context of {to} tokens needs {need / 2**30:,.0f} GiB for its keys and values, and "
            f"{device} has {room / 2**30:,.0f}; give a shorter one"
        )


def _is_causal(transformers: Any, values: dict[str, Any]) -> bool:
    """Tell as far as a config does; where the class is remote code it does not."""
    if values.get("is_encoder_decoder"):
        return False
    names = values.get("architectures") or [""]
    if KEY in values:
        kind = getattr(transformers, names[0].removeprefix(CLASS_PREFIX), None)
        return kind is None or kind.can_generate()
    families = transformers.models.auto.modeling_auto
    family = values.get("model_type", "")
    if family not in transformers.CONFIG_MAPPING:
        return True
    # AutoModelForCausalLM makes a decoder of BERT, whose weights are an encoder's.
    is_masked = family in families.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_encoder = is_masked and not values.get("is_decoder")
    return family in families.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not is_encoder


class HFCausalLM:
    """Answers the three questions of `ssmax_lab.eval` through the model's own cache, head and code.

    `first` is the token that every text begins with where the model was trained so, as Llama's
    beginning of sequence; prompts that lack it are read with it, and so are all rows of a batch
    of which one does.
    """

    def __init__(self, model: nn.Module, *, first: int | None = None) -> None:
        self.model: Any = model.eval()
        self.first = first
        if self.model.config.is_encoder_decoder or not self.model.can_generate():
            raise UsageError(
                f"{type(model).__name__} is no causal language model; load it with "
                "AutoModelForCausalLM"
            )
        self._limit = learned_positions(model)

    @torch.no_grad()
    def losses(self, tokens_BT: Tensor) -> Tensor:
        """Compute -log p of every token given those before it: (B, T - 1), float32."""
        begun_BT, added = self._begun(tokens_BT)
        parts, cache = [], None
        for start in range(0, begun_BT.shape[1] - 1, CHUNK):
            part_BT = begun_BT[:, start : start + CHUNK + 1]
            out = self._step(part_BT[:, :-1], cache)
            cache = out.past_key_values
            logits_BVT = out.logits.float().transpose(1, 2)
            parts.append(F.cross_entropy(logits_BVT, part_BT[:, 1:], reduction="none"))
        return torch.cat(parts, dim=1)[:, added:]

    @torch.no_grad()
    def attention_rows(self, tokens_BT: Tensor, rows: Sequence[int]) -> Iterator[Tensor]:
        """Yield the weights of chosen queries, (B, H, rows, T), one layer after the other.

        The chosen tokens are read one at a time, by eager code, which tells its weights; all
        others in between, by what the model runs with.
        """
        begun_BT, added = self._begun(tokens_BT)
        # As a list takes them: counted from the end where negative, an IndexError past it.
        rows = [range(tokens_BT.shape[1])[row] for row in rows]
        wanted = sorted({row + added for row in rows})
        found: dict[int, list[Tensor]] = {}
        cache = None
        # From one chosen query to the next: what stands between, then the query alone.
        for before, row in itertools.pairwise([-1, *wanted]):
            for start in range(before + 1, row, CHUNK):
                part = begun_BT[:, start : min(start + CHUNK, row)]
                cache = self._step(part, cache, logits_to_keep=1).past_key_values
            with self._eager():
                out = self._step(begun_BT[:, row : row + 1], cache, output_attentions=True)
            cache = out.past_key_values
            found[row] = [
                # A window's cache holds the last keys alone; what lies behind has no weight.
                F.pad(weights.float(), (row + 1 - weights.shape[-1], begun_BT.shape[1] - row - 1))
                for weights in out.attentions
                if weights is not None
            ]
        for layer in zip(*(found[row + added] for row in rows), strict=True):
            yield torch.cat(layer, dim=2)[..., added:]

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue every prompt by the likeliest tokens, up to and without the one that ends it."""
        transformers = require("transformers", install="ssmax-lab[hf]", purpose="generation")
        rows = [[*self._missing_first(prompt), *prompt] for prompt in prompts]
        longest = max(map(len, rows))
        self._check_length(longest + max_new_tokens)
        device = self.model.get_input_embeddings().weight.device
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
        seen = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device
        )
        ends = self.model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or ())
        plain = transformers.GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=0,
        )
        new = self.model.generate(tokens, attention_mask=seen, generation_config=plain)
        return [
            list(itertools.takewhile(lambda token: token not in ends, row[longest:]))
            for row in new.tolist()
        ]

    def _step(self, tokens_BT: Tensor, cache: Any, **options: Any) -> Any:
        out = self.model(tokens_BT, past_key_values=cache, use_cache=True, **options)
        if out.get("past_key_values") is None:
            raise UsageError(
                f"{type(self.model).__name__} keeps no cache, so that long texts cannot be read "
                "in parts"
            )
        return out

    @contextmanager
    def _eager(self) -> Iterator[None]:
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def _begun(self, tokens_BT: Tensor) -> tuple[Tensor, int]:
        """Put the first token before rows; say how many tokens were added to each."""
        if self.first is None or bool((tokens_BT[:, 0] == self.first).all()):
            begun_BT = tokens_BT
        else:
            begun_BT = F.pad(tokens_BT, (1, 0), value=self.first)
        self._check_length(begun_BT.shape[1])
        return begun_BT, begun_BT.shape[1] - tokens_BT.shape[1]

    def _missing_first(self, prompt: Sequence[int]) -> list[int]:
        if self.first is None or list(prompt[:1]) == [self.first]:
            return []
        return [self.first]

    def _check_length(self, length: int) -> None:
        if self._limit is not None and length > self._limit:
            raise UsageError(
                f"{type(self.model).__name__} has learned {self._limit} positions and cannot read "
                f"{length} tokens; measure shorter contexts"
            )
