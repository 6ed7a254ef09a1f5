"""Needle retrieval by length, of a model that was taught it in short documents alone."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from ssmax_lab.data.haystack import is_exact_match, sentence_ends
from ssmax_lab.data.tokenizer import Tokenizer
from ssmax_lab.eval.needle_score import attention_on_needles
from ssmax_lab.eval.protocols import EvalModel, OnProgress, silent
from ssmax_lab.eval.retrieval import answers, make_haystack


def measure_retrieval_by_length(
    model: EvalModel,
    tokenizer: Tokenizer,
    text: Sequence[int] | np.ndarray,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    weighed: int,
    digits: int,
    seed: int,
    batch: int,
    device: torch.device,
    on_progress: OnProgress = silent,
) -> tuple[list[float], list[list[list[float]]]]:
    """Measure needle retrieval accuracy, and the weights on the number by layer and head.

    Weights are means over the first `weighed` trials of every depth. The prompts of a length are
    the same for every model.
    """
    ends = sentence_ends(tokenizer.decode, tokenizer.vocabulary.size)
    accuracies, weights = [], []
    for done, length in enumerate(lengths, 1):
        stacks = [
            make_haystack(
                tokenizer, text, ends, length=length, depth=depth, trial=trial, seed=seed,
                digits=digits,
            )
            for trial in range(trials)
            for depth in depths
        ]  # fmt: skip
        said = answers(model, tokenizer, stacks, batch=batch)
        found = [
            is_exact_match(one, stack.needle.number)
            for one, stack in zip(said, stacks, strict=True)
        ]
        accuracies.append(sum(found) / len(found))
        # Some tokenizers spell the space before a number; what looks at it is the token before the
        # first digit.
        few = [
            dataclasses.replace(stack, tokens=[*stack.tokens, *stack.answer[:-digits]])
            for stack in stacks[: weighed * len(depths)]
        ]
        on_numbers = [
            weights_LH
            for start in range(0, len(few), batch)
            for weights_LH in attention_on_needles(model, few[start : start + batch], device=device)
        ]
        weights.append(torch.stack(on_numbers).mean(0).tolist())
        on_progress("length", done, len(lengths))
    return accuracies, weights
