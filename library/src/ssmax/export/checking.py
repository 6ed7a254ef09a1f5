"""Compare what was written with its source, in prefill and decoding."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.export.sessions import Session

CHUNK, DECODED = 512, 32
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How well two models agree on the same text."""

    tokens: int
    decoded: int
    """The last so many were fed one by one; those before in chunks, through the cache."""
    largest_difference: float
    """Of all logits."""
    largest_logit: float
    same_choice: float
    """Share of positions where both find the same token likeliest."""
    source_loss: float
    exported_loss: float

    def check(self, dtype: torch.dtype) -> None:
        """Raise where the logits differ by more than rounding explains.

        Half of the dtype's digits, and the angles of rotary positions: engines take them in
        float32, which at position p is off by p roundings.
        """
        angle = torch.finfo(torch.float32).eps * self.tokens
        limit = (math.sqrt(torch.finfo(dtype).eps) + angle) * self.largest_logit
        # Written so that NaN fails.
        if not self.largest_difference <= limit:
            raise UsageError(
                f"what was written differs from the source by {self.largest_difference:.2g} in a "
                f"logit over {self.tokens:,} tokens; rounding of {dtype} stays below {limit:.2g}. "
                "The forms ministral and gguf fold s within three parts in 10,000, which bfloat16 "
                "hides; hf keeps it as it is"
            )


@torch.no_grad()
def compare(
    source: Session, exported: Session, tokens: Tensor, progress: Progress | None = None
) -> Agreement:
    """Run both on the tokens (1, T): all but the last few in chunks, those one by one."""
    largest, logit = torch.zeros(()), 0.0
    same = done = 0
    losses = [0.0, 0.0]
    total = tokens.shape[1]
    for piece, following in _pieces(tokens):
        pair = [run(piece).float().cpu()[0] for run in (source, exported)]
        # torch's maximum keeps NaN, Python's may pass it by.
        largest = torch.maximum(largest, (pair[0] - pair[1]).abs().max())
        logit = max(logit, pair[0].abs().max().item())
        same += int((pair[0].argmax(-1) == pair[1].argmax(-1)).sum())
        for i, logits_TV in enumerate(pair):
            scored_TV = logits_TV[: following.shape[0]]
            losses[i] += F.cross_entropy(scored_TV, following.cpu(), reduction="sum").item()
        done += piece.shape[1]
        if progress is not None:
            progress(done, total)
    return Agreement(
        tokens=total,
        decoded=min(DECODED, total - 1),
        largest_difference=largest.item(),
        largest_logit=logit,
        same_choice=same / total,
        source_loss=losses[0] / (total - 1),
        exported_loss=losses[1] / (total - 1),
    )


def _pieces(tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split the tokens into what is fed at a time; yield each with the tokens that follow."""
    total = tokens.shape[1]
    first = total - min(DECODED, total - 1)
    # One token first: a graph may be held to the sizes that it was made with.
    bounds = [0, *range(1, first, CHUNK), *range(first, total + 1)]
    for start, stop in itertools.pairwise(bounds):
        yield tokens[:, start:stop], tokens[0, start + 1 : stop + 1]
