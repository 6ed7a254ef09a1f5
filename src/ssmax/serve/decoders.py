"""Whoever can be asked for the next token: models in memory, and files that hold a graph."""

# B batch, T new tokens, S cached and new tokens, V vocabulary

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ssmax.serve.forms import ONNX, PROGRAM
from ssmax.serve.past import Past
from ssmax.serve.sessions import Run, load_program, onnx_engine, onnx_run


class Decoder(Protocol):
    """The cache is handed over, so that rows can come and go.

    `ssmax.serve.graphs.graph_of` makes one of a model in memory.
    """

    def empty_past(self) -> list[Tensor]:
        """Keys and values of one row before its first token, (1, heads, 0, width)."""
        ...

    def last(self, input_ids: Tensor, attention_mask: Tensor, past: Past) -> Tensor:
        """Logits of the last token, (B, V); past has the new tokens then.

        Tokens are (B, T); the mask (B, S) is 1 where there is one, so rows may be left-padded.
        """
        ...


class FileDecoder:
    """Of a folder that `ssmax export --to onnx` or `--to torch-export` wrote."""

    def __init__(self, folder: Path) -> None:
        self._run: Run
        if (folder / ONNX).is_file():
            engine = onnx_engine(folder / ONNX)
            shapes = [entry.shape for entry in engine.get_inputs()[2:]]
            self._run, dtype = onnx_run(engine), torch.float32
        else:
            program = load_program(folder / PROGRAM)
            assert program.example_inputs is not None
            past = program.example_inputs[0][2]
            shapes, dtype = [tensor.shape for tensor in past], past[0].dtype
            self._run = program.module()
        self._empty = [torch.zeros(1, shape[1], 0, shape[3], dtype=dtype) for shape in shapes]

    def empty_past(self) -> list[Tensor]:
        """Keys and values of one row before its first token."""
        return self._empty

    def last(self, input_ids: Tensor, attention_mask: Tensor, past: Past) -> Tensor:
        """Logits of the last token; a graph makes its cache anew."""
        logits, past.tensors = self._run(input_ids, attention_mask, past.views())
        past.length = past.room
        return logits[:, -1]
