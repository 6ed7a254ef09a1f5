"""Figure 5: the loss at every position of long documents, nothing retrained."""

# B documents at a time, T tokens

import itertools

import numpy as np
import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax_lab.eval.protocols import EvalModel, OnProgress, rows_of_tokens, silent
from ssmax_lab.records import PositionLoss, Provenance


@torch.no_grad()
def measure_position_loss(
    model: EvalModel,
    documents_BT: Tensor | np.ndarray,
    *,
    run: str,
    provenance: Provenance,
    batch: int = 1,
    device: torch.device | str = "cpu",
    on_progress: OnProgress = silent,
) -> PositionLoss:
    """Measure the mean over documents of one length, at every position.

    Position i is the loss of the token that follows i + 1 others. Means are taken in float64 and
    kept to the millionth of a nat: more digits are noise, and most of a study's records.
    """
    documents = rows_of_tokens(documents_BT, least=2)
    if batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")
    count, parts = len(documents), []
    for start in range(0, count, batch):
        parts.append(model.losses(documents[start : start + batch].to(device)).double().cpu())
        on_progress("document", min(start + batch, count), count)
    losses = torch.cat(parts)
    return PositionLoss(
        run=run,
        mean=_digits(losses.mean(0)),
        count=count,
        edges=bin_edges(losses.shape[1]),
        binned=_digits(_binned(losses)),
        provenance=provenance,
    )


def _digits(nats: Tensor) -> list:
    return nats.round(decimals=6).tolist()


def _binned(losses_BT: Tensor) -> Tensor:
    """Every document's mean loss in a few ranges of positions, for comparisons in pairs."""
    edges = bin_edges(losses_BT.shape[1])
    return torch.stack(
        [losses_BT[:, start:stop].mean(1) for start, stop in itertools.pairwise(edges)],
        dim=1,
    )


def bin_edges(length: int) -> list[int]:
    """Ranges of positions that double: 0, 64, 128, ... to the end."""
    edges = [0]
    edge = 64
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]
