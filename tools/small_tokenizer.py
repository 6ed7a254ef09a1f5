"""Make the tokenizer called small anew: 768 tokens for small models, every digit one of them.

python tools/small_tokenizer.py > lab/src/ssmax_lab/data/small_tokenizer.json

The text is an eighth of the embedded one and the sentences of the needle test, so another Python
makes another tokenizer: the one that is kept was made once. A needle takes 13 tokens with four
digits and its question 15, where bytes take 45 and 58.
"""

import json
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ssmax_lab.data.haystack import CITIES, Needle
from ssmax_lab.data.qa import Question, format_question
from ssmax_lab.data.sources import embedded_documents

VOCABULARY = 768
EVERY = 8
"""One document of so many."""
TIMES = 500
"""How often the sentences of the needle test are read: enough to become whole words."""


def texts() -> Iterator[str]:
    """Give what the merges are counted in."""
    for number, document in enumerate(embedded_documents()):
        if number % EVERY == 0:
            yield document.text
    for _ in range(TIMES):
        for city in CITIES:
            needle = Needle(city=city, number="")
            asked = Question(context="", question=needle.question, answer="")
            yield f"{needle.statement}.{format_question(asked)[0]}"


def main() -> None:
    """Print the tokenizer as JSON."""
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts(), trainer)
    print(json.dumps(json.loads(made.to_str()), separators=(",", ":")))


if __name__ == "__main__":
    main()
