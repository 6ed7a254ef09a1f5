"""One interface to all that continues a text: the next tokens in, their logits out."""

# T new tokens, V vocabulary

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmax._extras import require

Session = Callable[[Tensor], Tensor]
"""Tokens (1, T), after those of the calls before, to logits (1, T, V)."""
Run = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]
"""Tokens, mask and past to logits and present: what `ssmax.export.graphs` writes."""


def session(model: Any) -> Session:
    """Open a model of Transformers in memory."""
    from transformers import DynamicCache

    past = DynamicCache(config=model.config)
    return lambda tokens: (
        model(tokens.to(model.device), past_key_values=past, use_cache=True).logits
    )


def program_session(path: Path, empty_past: list[Tensor]) -> Session:
    """Open a file of torch.export."""
    return _carried(torch.export.load(path).module(), empty_past)


def onnx_session(path: Path, empty_past: list[Tensor]) -> Session:
    """Open an ONNX file in onnxruntime."""
    onnxruntime = require("onnxruntime", install="ssmax[export]", purpose="running ONNX")
    engine = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in engine.get_inputs()]

    def run(tokens: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        values = (tokens, mask, *past)
        feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        logits, *present = (torch.from_numpy(value) for value in engine.run(None, feed))
        return logits, present

    return _carried(run, [tensor.cpu() for tensor in empty_past])


def _carried(run: Run, past: list[Tensor]) -> Session:
    """Keep the cache of a graph between the calls."""

    def step(tokens: Tensor) -> Tensor:
        nonlocal past
        tokens = tokens.to(past[0].device)
        mask = tokens.new_ones(1, past[0].shape[2] + tokens.shape[1])
        logits, past = run(tokens, mask, past)
        return logits

    return step
