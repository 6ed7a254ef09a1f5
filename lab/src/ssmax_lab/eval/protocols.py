"""The three questions. Whoever answers them can be measured: `ssmax_lab.model.LM` does as it is."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ssmax.errors import UsageError

OnProgress = Callable[[str, int, int], None]
"""What is counted, how many are done, of how many."""


def silent(what: str, done: int, total: int) -> None:
    """Say nothing."""


class EvalModel(Protocol):
    """A language model as it is seen from here."""

    def losses(self, tokens_BT: Tensor) -> Tensor:
        """Compute -log p of every token given those before it: (B, T - 1), float32."""
        ...

    def attention_rows(self, tokens_BT: Tensor, rows: Sequence[int]) -> Iterator[Tensor]:
        """Yield the weights of chosen queries, (B, H, rows, T), one layer after the other."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue every prompt greedily."""
        ...


def rows_of_tokens(documents_BT: Tensor | np.ndarray, *, least: int) -> Tensor:
    """Take documents of one length, of so many tokens at least, as int64."""
    documents = torch.as_tensor(np.asarray(documents_BT).astype(np.int64))
    if documents.dim() != 2 or documents.shape[1] < least or not len(documents):
        raise UsageError(
            f"documents must be rows of at least {least} tokens, all of one length, got shape "
            f"{tuple(documents.shape)}"
        )
    return documents
