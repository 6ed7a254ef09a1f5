"""What the tasks beside this file ask: a number that is hidden in a text.

Lengths are in bytes, so that models with different tokenizers answer the same questions. With
`--metadata '{"lengths": [4000, 16000], "digits": 7}'` they are others.
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from ssmax_lab.data.haystack import hide, random_needle
from ssmax_lab.data.preparation import prepare
from ssmax_lab.data.shards import ShardSet

CHOICES = 4


def unseen_text() -> bytes:
    """The ASCII of Python's own sources that the package's models were not trained on."""
    with tempfile.TemporaryDirectory() as folder:
        prepare("embedded", folder, tokenizer="bytes", workers=1)
        shards = ShardSet.open(Path(folder, "validation"))
        return bytes(byte for byte in shards.slice(0, shards.num_tokens).tolist() if byte < 128)


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
    text = unseen_text()
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
