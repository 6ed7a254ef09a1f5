"""What a runner is asked and answers, as files of JSON.

A runner is started by an engine's own python, where this project is not installed. It reads the
log-probabilities of every prompt alone, continues all prompts greedily as one batch, and continues
them again from a cached prefix.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

CHUNK = 512
"""Tokens of a prompt that are read at a time, where the engine leaves that to its caller."""


def job() -> dict[str, Any]:
    """What is asked: folder, options, prompts (token ids), new (tokens to continue by)."""
    return json.loads(Path(sys.argv[1]).read_text())


def answer(**found: Any) -> None:
    """`read`, `new`, `new_logprobs`, `again`: a list for every prompt; None: not offered."""
    found["has_ssmax"] = importlib.util.find_spec("ssmax") is not None
    Path(sys.argv[2]).write_text(json.dumps(found))


def chunks(tokens: list[Any]) -> list[list[Any]]:
    return [tokens[start : start + CHUNK] for start in range(0, len(tokens), CHUNK)]


def log_softmax(logits: Any) -> Any:
    """Of NumPy's arrays."""
    import numpy as np

    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
