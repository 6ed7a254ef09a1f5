"""Figures 7 and 8: how much attention goes from the end of the prompt to the hidden number."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax_lab.data.haystack import (
    DIGITS,
    Haystack,
    Needle,
    has_first_digit,
    is_exact_match,
    sentence_ends,
)
from ssmax_lab.data.tokenizer import Tokenizer
from ssmax_lab.eval.protocols import EvalModel, OnProgress, silent
from ssmax_lab.eval.retrieval import answers, make_haystack
from ssmax_lab.records import NeedleScore, Provenance


def measure_needle_scores(
    model: EvalModel,
    tokenizer: Tokenizer,
    text: Sequence[int] | np.ndarray,
    *,
    run: str,
    length: int,
    trials: int,
    seed: int,
    provenance: Provenance,
    depth: float | None = None,
    digits: int = DIGITS,
    needle: Needle | None = None,
    batch: int = 1,
    device: torch.device | str = "cpu",
    on_progress: OnProgress = silent,
) -> list[NeedleScore]:
    """Measure the score of every head in every trial, and what the model then said.

    `depth` None draws one for each trial, `needle` None a city and a number.
    """
    if trials < 1:
        raise UsageError(f"trials must be at least 1, got {trials}")
    if batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")
    ends = sentence_ends(tokenizer.decode, tokenizer.vocabulary.size)
    drawn = np.random.default_rng(seed).random(trials).tolist()
    depths = drawn if depth is None else [depth] * trials
    scores: list[NeedleScore] = []
    for start in range(0, trials, batch):
        numbers = range(start, min(start + batch, trials))
        stacks = [
            make_haystack(
                tokenizer, text, ends, length=length, depth=depths[trial], trial=trial, seed=seed,
                digits=digits, needle=needle,
            )
            for trial in numbers
        ]  # fmt: skip
        on_needles = attention_on_needles(model, stacks, device=device)
        said_each = answers(model, tokenizer, stacks, batch=batch)
        for trial, stack, weights_LH, said in zip(
            numbers, stacks, on_needles, said_each, strict=True
        ):
            scores.append(
                NeedleScore(
                    run=run,
                    length=length,
                    depth=depths[trial],
                    trial=trial,
                    number=stack.needle.number,
                    said=said,
                    is_whole=is_exact_match(said, stack.needle.number),
                    first_digit=has_first_digit(said, stack.needle.number),
                    number_scores=weights_LH.tolist(),
                    provenance=provenance,
                )
            )
        on_progress("trial", len(scores), trials)
    return scores


@torch.no_grad()
def attention_on_needles(
    model: EvalModel, stacks: Sequence[Haystack], *, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Sum the weight from the last token on the number, for prompts of one length.

    (layers, heads) each.
    """
    tokens_BT = torch.tensor([stack.tokens for stack in stacks], device=device)
    numbers: list[list[Tensor]] = [[] for _ in stacks]
    for weights in model.attention_rows(tokens_BT, [tokens_BT.shape[1] - 1]):
        for index, row_HT in enumerate(weights[:, :, 0].double().cpu()):
            numbers[index].append(row_HT[:, slice(*stacks[index].number)].sum(-1))
    return [torch.stack(layers) for layers in numbers]


def top_heads(
    scores_LH: Sequence[Sequence[float]], count: int = 25
) -> list[tuple[int, int, float]]:
    """Find the heads with the largest scores: layer, head, score."""
    flat = [
        (layer, head, score)
        for layer, row in enumerate(scores_LH)
        for head, score in enumerate(row)
    ]
    return sorted(flat, key=lambda entry: -entry[2])[:count]
