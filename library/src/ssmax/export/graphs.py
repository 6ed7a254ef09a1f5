"""A model and its cache as one graph, for ONNX engines and for torch.export.

    logits, present = graph(input_ids (B, T), attention_mask (B, S + T), past)

`past` are keys and values of every layer in turn, (B, G, S, D), with S = 0 to begin with; `present`
are the same with the new tokens. The mask is 1 where there is a token, so rows may be left-padded.
"""

# B batch, T new tokens, S cached tokens, G key heads, D head_dim

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._sympy.value_ranges import ValueRanges

from ssmax._extras import require
from ssmax.errors import UsageError


class Graph(nn.Module):
    """A causal language model of Transformers whose cache comes in and goes out as tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        check_causal(model)
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions: bool = "position_ids" in parameters
        token = torch.ones(1, 1, dtype=torch.long, device=model.device)
        with torch.no_grad():
            cache = model(token, attention_mask=token, use_cache=True).get("past_key_values")
        _check_cache(model, cache)
        self.cache_shapes: list[tuple[int, int]] = [
            (tensor.shape[1], tensor.shape[3])
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        ]

    def empty_past(self, batch: int = 1) -> list[Tensor]:
        """Make the cache before the first token."""
        weight = next(self.parameters())
        return [
            torch.zeros(batch, heads, 0, width, dtype=weight.dtype, device=weight.device)
            for heads, width in self.cache_shapes
        ]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the logits, and the cache with the new tokens."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        options: dict[str, Tensor] = {}
        if self.takes_positions:
            position_BS = (attention_mask.cumsum(-1) - 1).clamp_min(0)
            # Not a slice: torch would ask whether that is contiguous, and hold the graph to it.
            cached = past[0].shape[2]
            new_T = torch.arange(cached, cached + input_ids.shape[1], device=position_BS.device)
            options["position_ids"] = position_BS[:, new_T]
        logits = self.model(
            input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True,
            **options,
        ).logits  # fmt: skip
        return logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def check_causal(model: Any) -> None:
    """Raise on a model that does not continue a text: every form is loaded and checked as one."""
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UsageError(
            f"{type(model).__name__} is no causal language model, and no form takes another, such "
            "as an encoder or an encoder-decoder; for Transformers without ssmax, "
            "ssmax.hf.save_remote_code(model, folder) writes it, or ssmax convert --remote-code "
            "where it is converted"
        )


def _check_cache(model: Any, cache: Any) -> None:
    """Raise on a cache of other states: of convolutions, of recurrences, of indexers."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    kinds = {type(layer) for layer in getattr(cache, "layers", ())}
    others = kinds - {DynamicLayer, DynamicSlidingWindowLayer}
    if others or not kinds:
        names = ", ".join(sorted(kind.__name__ for kind in others)) or "none"
        raise UsageError(
            f"only keys and values go in and out of a graph, and the cache of "
            f"{type(model).__name__} is another ({names}); the form hf keeps it"
        )


def graph_of(model: nn.Module) -> Graph:
    """Make the graph of a converted model."""
    return Graph(model).eval()


def write_program(graph: Graph, path: Path) -> None:
    """Write a file for `torch.export.load`, which needs torch alone."""
    with _quiet():
        torch.export.save(_program(graph), path)


def write_onnx(graph: Graph, path: Path) -> None:
    """Write a file for ONNX engines, its weights beside it."""
    for package in ("onnx", "onnxscript"):
        require(package, install="ssmax[export]", purpose="the form onnx")
    layers = range(len(graph.cache_shapes) // 2)
    states = [f"{layer}.{kind}" for layer in layers for kind in ("key", "value")]
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            _program(graph),
            dynamo=True,
            verbose=False,
            input_names=["input_ids", "attention_mask", *(f"past_key_values.{x}" for x in states)],
            output_names=["logits", *(f"present.{x}" for x in states)],
        )
        assert program is not None
        program.save(path, external_data=True)


@torch.no_grad()
def _program(graph: Graph) -> Any:
    batch, new, cached = 2, 3, 5
    past = [tensor.new_zeros(batch, tensor.shape[1], cached, tensor.shape[3])
            for tensor in graph.empty_past()]  # fmt: skip
    device = past[0].device
    tokens = torch.zeros(batch, new, dtype=torch.long, device=device)
    mask = torch.ones(batch, cached + new, dtype=torch.long, device=device)
    free = torch.export.Dim.AUTO
    shapes = ({0: free, 1: free}, {0: free, 1: free}, [{0: free, 2: free} for _ in past])
    program = torch.export.export(graph, (tokens, mask, past), dynamic_shapes=shapes, strict=False)
    # Torch takes every size of an example to be 2 or more and holds no call to that, but it does to
    # what follows for their sum, 4: a first prompt of 3 tokens would be refused.
    for size, known in program.range_constraints.items():
        if known.lower > 2:
            program.range_constraints[size] = ValueRanges(1, known.upper)
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the exporters say of their own deprecated calls and of packages not needed."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
