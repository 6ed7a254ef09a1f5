"""Figures 7 and 8: how much attention goes from the end of the prompt to the hidden number."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ssmax.data.haystack import (
    DIGITS,
    Haystack,
    Needle,
    says_first_digit,
    says_number,
    sentence_ends,
)
from ssmax.data.tokenizer import Tokenizer
from ssmax.eval.protocols import Subject
from ssmax.eval.retrieval import answers, make_haystack
from ssmax.records import NeedleScore, Provenance


def measure_needle_scores(
    subject: Subject,
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
    device: torch.device | str = "cpu",
    on_trial: Callable[[int, int], None] | None = None,
) -> list[NeedleScore]:
    """The score of every head in every trial, and what the model then said.

    `depth` None draws one for each trial, `needle` None a city and a number.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    ends = sentence_ends(tokenizer.decode, tokenizer.vocabulary.size)
    chance = np.random.default_rng(seed)
    scores = []
    for trial in range(trials):
        drawn = float(chance.random())
        place = drawn if depth is None else depth
        stack = make_haystack(
            tokenizer, text, ends, length=length, depth=place, trial=trial, seed=seed,
            digits=digits, needle=needle,
        )  # fmt: skip
        number, sentence = attention_on_needle(subject, stack, device=device)
        (said,) = answers(subject, tokenizer, [stack], batch=1)
        scores.append(
            NeedleScore(
                run=run,
                length=length,
                depth=place,
                trial=trial,
                number=stack.needle.number,
                said=said,
                is_whole=says_number(said, stack.needle.number),
                first_digit=says_first_digit(said, stack.needle.number),
                number_scores=number.tolist(),
                sentence_scores=sentence.tolist(),
                provenance=provenance,
            )
        )
        if on_trial is not None:
            on_trial(trial + 1, trials)
    return scores


@torch.no_grad()
def attention_on_needle(
    subject: Subject, stack: Haystack, *, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Weight from the last token on the number, and on its whole sentence: (layers, heads) each."""
    tokens = torch.tensor([stack.tokens], device=device)
    number, sentence = [], []
    for weights in subject.attention_rows(tokens, [len(stack.tokens) - 1]):
        row_HS = weights[0, :, 0].double().cpu()
        number.append(row_HS[:, slice(*stack.number)].sum(-1))
        sentence.append(row_HS[:, slice(*stack.sentence)].sum(-1))
    return torch.stack(number), torch.stack(sentence)


def top_heads(
    scores_LH: Sequence[Sequence[float]], count: int = 25
) -> list[tuple[int, int, float]]:
    """The heads with the largest scores: layer, head, score."""
    flat = [
        (layer, head, score)
        for layer, row in enumerate(scores_LH)
        for head, score in enumerate(row)
    ]
    return sorted(flat, key=lambda entry: -entry[2])[:count]
