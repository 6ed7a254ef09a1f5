"""A byte-level BPE of a tokenizer.json as llama.cpp stores it."""

import json
from typing import Any

from ssmax.data.tokenizer import END_OF_DOCUMENT

# llama.cpp's kinds of token
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def gguf_vocabulary(tokenizer: str, size: int) -> dict[str, Any] | None:
    """Tokens, their kinds and merges; None for a tokenizer that llama.cpp would not read alike."""
    values = json.loads(tokenizer)
    model, pre = values["model"], values.get("pre_tokenizer") or {}
    is_gpt2_like = (
        model.get("type") == "BPE"
        and pre.get("type") == "ByteLevel"
        and pre.get("use_regex", True)
        and not pre.get("add_prefix_space")
        and values.get("normalizer") is None
    )
    ends = [t["id"] for t in values["added_tokens"] if t["content"] in END_OF_DOCUMENT]
    if not is_gpt2_like or not ends:
        return None
    tokens = [f"<unused{place}>" for place in range(size)]
    types = [_UNUSED] * size
    for text, place in model["vocab"].items():
        tokens[place], types[place] = text, _NORMAL
    for added in values["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], _CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens, "types": types, "merges": merges, "end": ends[0]}
