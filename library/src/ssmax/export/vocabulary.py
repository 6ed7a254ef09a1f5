"""A byte-level BPE of a tokenizer.json as llama.cpp stores it."""

import json
from collections.abc import Mapping
from typing import Any

# llama.cpp's kinds of token
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def gguf_vocabulary(tokenizer: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read tokens, their kinds, merges and cuts; None where llama.cpp would cut text otherwise."""
    values, size, end = json.loads(tokenizer), config["vocab_size"], config.get("eos_token_id")
    # Llama 3 has several that end a text; llama.cpp stops at the first.
    end = end[0] if isinstance(end, list) else end
    model, pre = values["model"], _pre_tokenizer(values.get("pre_tokenizer") or {})
    if model.get("type") != "BPE" or values.get("normalizer") or pre is None or end is None:
        return None
    tokens = [f"<unused{index}>" for index in range(size)]
    types = [_UNUSED] * size
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, _NORMAL
    for added in values["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], _CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found = {"tokens": tokens, "types": types, "merges": merges}
    return {**found, "pre": pre, "end": end}


def _pre_tokenizer(values: dict[str, Any]) -> str | None:
    """Find llama.cpp's name for GPT-2's way to cut a text into words, digits one by one or not."""
    steps = values.get("pretokenizers", [values])
    kinds = [step.get("type") for step in steps]
    cuts = steps[-1]
    if not cuts.get("use_regex", True) or cuts.get("add_prefix_space"):
        return None
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    return "gpt-2" if kinds == ["ByteLevel"] else None
