"""Whoever continues a text, asked alike: a session takes the next tokens and gives their logits."""

# T new tokens, V vocabulary

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmax._extras import require
from ssmax.lm import LM
from ssmax.nn import KVCache

Session = Callable[[Tensor], Tensor]
"""Tokens (1, T), after those of the calls before, to logits (1, T, V)."""
Run = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]
"""Tokens, mask and past to logits and present: what `ssmax.serve.graphs` writes."""


def session(model: Any) -> Session:
    """Of a model in memory: a native one or one of Transformers."""
    if isinstance(model, LM):
        cache = KVCache(model.config.num_layers)
        return lambda tokens: model(tokens.to(model.embedding.weight.device), cache=cache)
    from transformers import DynamicCache

    past = DynamicCache(config=model.config)
    return lambda tokens: (
        model(tokens.to(model.device), past_key_values=past, use_cache=True).logits
    )


def load_program(path: Path) -> torch.export.ExportedProgram:
    """A file of torch.export; its loader unpickles, so that a file can run code of its own."""
    return torch.export.load(path)


def program_session(path: Path, empty_past: list[Tensor]) -> Session:
    """Of a file of torch.export."""
    return _carried(load_program(path).module(), empty_past)


def onnx_session(path: Path, empty_past: list[Tensor]) -> Session:
    """Of an ONNX file, by onnxruntime."""
    return _carried(onnx_run(onnx_engine(path)), [tensor.cpu() for tensor in empty_past])


def onnx_engine(path: Path) -> Any:
    """onnxruntime with an ONNX file in it."""
    onnxruntime = require("onnxruntime", extra="export", purpose="running ONNX")
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def onnx_run(engine: Any) -> Run:
    """What an ONNX file computes, on tensors."""
    names = [entry.name for entry in engine.get_inputs()]

    def run(tokens: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        values = (tokens, mask, *past)
        feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        logits, *present = (torch.from_numpy(value) for value in engine.run(None, feed))
        return logits, present

    return run


def _carried(run: Run, past: list[Tensor]) -> Session:
    """A graph whose cache goes in and out, with the cache kept between the calls."""

    def step(tokens: Tensor) -> Tensor:
        nonlocal past
        tokens = tokens.to(past[0].device)
        mask = tokens.new_ones(1, past[0].shape[2] + tokens.shape[1])
        logits, past = run(tokens, mask, past)
        return logits

    return step
