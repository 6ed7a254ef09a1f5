"""The tokenizer called small: 768 tokens for small models, every digit one of them.

It was made once, from an eighth of the embedded text and the sentences of the needle test, and is
kept as small_tokenizer.json: `python -m ssmax_lab.data.small` shows how. A needle takes 13 tokens
with four digits and its question 15, where bytes take 45 and 58.
"""

import json
import sys
from collections.abc import Iterator

from ssmax._extras import require
from ssmax_lab.data.embedded import embedded_documents
from ssmax_lab.data.haystack import CITIES, Needle
from ssmax_lab.data.qa import Question, format_question

VOCABULARY = 768
EVERY = 8
"""One document of so many."""
TIMES = 500
"""How often the sentences of the needle test are read: enough to become whole words."""


def _texts() -> Iterator[str]:
    for number, document in enumerate(embedded_documents()):
        if number % EVERY == 0:
            yield document.text
    for _ in range(TIMES):
        for city in CITIES:
            needle = Needle(city=city, number="")
            asked = Question(id="", context="", question=needle.question, answer="")
            yield f"{needle.statement}.{format_question(asked)[0]}"


def make() -> str:
    """Made anew, from the text of the Python that runs; another version gives another one."""
    require("tokenizers", install="ssmax-lab", purpose="making a tokenizer")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return json.dumps(json.loads(tokenizer.to_str()), separators=(",", ":")) + "\n"


if __name__ == "__main__":
    sys.stdout.write(make())
