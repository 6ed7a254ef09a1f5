"""What the tasks beside this file ask: a number that is hidden in a text.

Lengths are in bytes, so that models with different tokenizers answer the same questions. With
`--metadata '{"lengths": [4000, 16000], "digits": 7}'` they are others.
"""

import random
from collections.abc import Sequence
from typing import Any

import datasets

from ssmax.data.embedded import embedded_documents
from ssmax.data.haystack import hide, random_needle

CHOICES = 4


def documents(
    *,
    lengths: Sequence[int] = (150, 300, 600),
    depths: Sequence[float] = (0.0, 0.5, 1.0),
    trials: int = 10,
    digits: int = 4,
    seed: int = 0,
    **of_the_harness: Any,
) -> dict[str, datasets.Dataset]:
    """One split, `test`; the harness adds arguments of its own, which mean nothing here."""
    chance = random.Random(f"harness {seed}")
    text = "".join(document.text for document in embedded_documents()).encode("ascii", "ignore")
    rows = []
    for length in lengths:
        for depth in depths:
            for _ in range(trials):
                needles = [random_needle(chance, digits=digits) for _ in range(CHOICES)]
                start = chance.randrange(len(text) - length)
                stack = hide(
                    needles[0],
                    text[start : start + length],
                    length=length,
                    depth=depth,
                    encode=lambda words: list(words.encode()),
                    breaks=frozenset(b".\n"),
                )
                numbers = [needle.number for needle in needles]
                chance.shuffle(numbers)
                rows.append(
                    {
                        "prompt": bytes(stack.tokens).decode(),
                        "answer": needles[0].number,
                        "choices": numbers,
                        "label": numbers.index(needles[0].number),
                        "length": length,
                        "depth": depth,
                    }
                )
    return {"test": datasets.Dataset.from_list(rows)}
