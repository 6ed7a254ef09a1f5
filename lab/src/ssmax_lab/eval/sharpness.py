"""Attention sharpness, head by head, as the context grows: figure 1 in a model."""

# B documents, T tokens, H heads, S keys

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax_lab.eval.protocols import EvalModel, OnProgress, rows_of_tokens, silent
from ssmax_lab.records import Provenance, Sharpness


@torch.no_grad()
def measure_sharpness(
    model: EvalModel,
    documents_BT: Tensor | np.ndarray,
    *,
    run: str,
    provenance: Provenance,
    num_keys: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    on_progress: OnProgress = silent,
) -> Sharpness:
    """Measure entropy and largest weight of queries that see n keys, the mean over documents."""
    documents = rows_of_tokens(documents_BT, least=1)
    longest = documents.shape[1]
    n = list(num_keys) if num_keys is not None else doubling(longest)
    if not n or min(n) < 1 or max(n) > longest:
        raise UsageError(f"num_keys must be from 1 to the documents' {longest} tokens, got {n}")
    entropy: list[list[Tensor]] = []
    largest: list[list[Tensor]] = []
    for done, document in enumerate(documents, 1):
        layers = model.attention_rows(document[None].to(device), [keys - 1 for keys in n])
        weights = [layer[0].double().cpu() for layer in layers]
        entropy.append([-torch.special.xlogy(w, w).sum(-1) for w in weights])
        largest.append([w.amax(-1) for w in weights])
        on_progress("document", done, len(documents))
    return Sharpness(
        run=run,
        num_keys=n,
        entropy=_mean(entropy),
        largest=_mean(largest),
        count=len(documents),
        provenance=provenance,
    )


def doubling(longest: int) -> list[int]:
    """List 1, 2, 4, ... and the length itself."""
    counts = [2**power for power in range(longest.bit_length()) if 2**power < longest]
    return [*counts, longest]


def _mean(documents: list[list[Tensor]]) -> list[list[list[float]]]:
    """Over documents: (layers, heads, n)."""
    layers = [torch.stack(layer).mean(0) for layer in zip(*documents, strict=True)]
    return [layer.tolist() for layer in layers]
