"""Numbers hidden in a text: how often they are found, and how much attention goes to them.

Figure 6 is needle retrieval accuracy by the length of the context and the depth of the needle,
figures 7 and 8 the attention from the end of the prompt to the number.
"""

import dataclasses
import functools
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssmax._files import in_turn, make_folder, write_whole
from ssmax.errors import UsageError
from ssmax_lab.data.haystack import (
    DIGITS,
    Haystack,
    Needle,
    count_matching_digits,
    has_first_digit,
    hide,
    is_exact_match,
    random_needle,
)
from ssmax_lab.data.tokenizer import Tokenizer
from ssmax_lab.eval.protocols import EvalModel, OnProgress, silent
from ssmax_lab.records import NeedleScore, NeedleTrial, Provenance, read_jsonl, to_jsonl


def measure_retrieval(
    model: EvalModel,
    tokenizer: Tokenizer,
    text: Sequence[int] | np.ndarray,
    *,
    run: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
    out: Path,
    provenance: Provenance,
    batch: int = 8,
    digits: int = DIGITS,
    begun: bool = False,
    on_progress: OnProgress = silent,
) -> list[NeedleTrial]:
    """Measure a grid of context lengths and depths; each cell is saved when it is done.

    A grid that was stopped resumes with the cells that `out` lacks under its run and settings.
    Trial i of a cell has the same needle and the same stretch of text for every model.
    """
    if not len(lengths) or not len(depths) or trials < 1:
        raise UsageError(
            f"a grid needs lengths, depths and trials, got {len(lengths)}, {len(depths)}, {trials}"
        )
    if batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")
    done = _finished(out, run, provenance.config_hash, trials)
    prompt = functools.partial(
        make_haystack, tokenizer, text, seed=seed, digits=digits, begun=begun
    )
    cells = [(length, depth) for length in lengths for depth in depths]
    for number, (length, depth) in enumerate(cells, 1):
        if (length, depth) not in done:
            stacks = [prompt(length=length, depth=depth, trial=trial) for trial in range(trials)]
            found = [
                NeedleTrial(
                    run=run,
                    length=length,
                    depth=depth,
                    trial=trial,
                    city=stack.needle.city,
                    number=stack.needle.number,
                    said=said,
                    is_whole=is_exact_match(said, stack.needle.number),
                    first_digit=has_first_digit(said, stack.needle.number),
                    digits_right=count_matching_digits(said, stack.needle.number),
                    provenance=provenance,
                )
                for trial, (stack, said) in enumerate(
                    zip(stacks, answers(model, tokenizer, stacks, batch=batch), strict=True)
                )
            ]
            _append(out, found)
            done[length, depth] = found
        on_progress("cell", number, len(cells))
    return [trial for cell in cells for trial in done[cell]]


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
    prompt = functools.partial(make_haystack, tokenizer, text, seed=seed, digits=digits)
    accuracies, weights = [], []
    for done, length in enumerate(lengths, 1):
        stacks = [
            prompt(length=length, depth=depth, trial=trial)
            for trial in range(trials)
            for depth in depths
        ]
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
    drawn = np.random.default_rng(seed).random(trials).tolist()
    depths = drawn if depth is None else [depth] * trials
    prompt = functools.partial(
        make_haystack, tokenizer, text, seed=seed, digits=digits, needle=needle
    )
    scores: list[NeedleScore] = []
    for start in range(0, trials, batch):
        numbers = range(start, min(start + batch, trials))
        stacks = [prompt(length=length, depth=depths[trial], trial=trial) for trial in numbers]
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


def make_haystack(
    tokenizer: Tokenizer,
    text: Sequence[int] | np.ndarray,
    *,
    length: int,
    depth: float,
    trial: int,
    seed: int,
    digits: int = DIGITS,
    needle: Needle | None = None,
    begun: bool = False,
) -> Haystack:
    """Make a trial's prompt; its text, and its needle if none is given, follow from its numbers."""
    chance = random.Random(f"needle {seed} {length} {depth} {trial}")
    drawn = random_needle(chance, digits=digits)
    start = chance.randrange(max(1, len(text) - length + 1))
    return hide(
        drawn if needle is None else needle,
        text[start:],
        length=length,
        depth=depth,
        encode=tokenizer.encode,
        breaks=tokenizer.sentence_ends,
        begun=begun,
    )


def answers(
    model: EvalModel, tokenizer: Tokenizer, stacks: Sequence[Haystack], *, batch: int
) -> Iterator[str]:
    """Yield what a model says, greedily, a few tokens past the length of the number."""
    for start in range(0, len(stacks), batch):
        part = stacks[start : start + batch]
        budget = max(len(stack.answer) for stack in part) + 2
        for new in model.generate([stack.tokens for stack in part], budget):
            yield tokenizer.decode(new)


def _finished(
    out: Path, run: str, config_hash: str, trials: int
) -> dict[tuple[int, float], list[NeedleTrial]]:
    """Read this measurement's cells that are whole; what is left of others is dropped."""
    if not out.exists():
        return {}
    others: list[NeedleTrial] = []
    cells: dict[tuple[int, float], list[NeedleTrial]] = {}
    # Another process may measure another model into this file.
    with in_turn(out.parent):
        for trial in read_jsonl(out, NeedleTrial):
            is_mine = (trial.run, trial.provenance.config_hash) == (run, config_hash)
            home = cells.setdefault((trial.length, trial.depth), []) if is_mine else others
            home.append(trial)
        whole = {cell: found for cell, found in cells.items() if len(found) == trials}
        kept = others + [trial for found in whole.values() for trial in found]
        write_whole(out, to_jsonl(kept))
    return whole


def _append(out: Path, trials: Sequence[NeedleTrial]) -> None:
    make_folder(out.parent)
    with in_turn(out.parent), out.open("a") as file:
        file.write(to_jsonl(trials))
        file.flush()
        os.fsync(file.fileno())


def accuracy(trials: Sequence[NeedleTrial]) -> float:
    """Compute the needle retrieval accuracy: the share of whole numbers."""
    return sum(trial.is_whole for trial in trials) / len(trials)
