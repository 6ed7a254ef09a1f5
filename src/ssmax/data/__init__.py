"""From text to tokens: tokenizers, shards, an order that anyone can resume."""

from ssmax.data.prepare import prepare
from ssmax.data.qa import QuestionStream, read_squad
from ssmax.data.shards import ShardSet
from ssmax.data.stream import TokenStream
from ssmax.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "QuestionStream",
    "ShardSet",
    "TokenStream",
    "Tokenizer",
    "load_tokenizer",
    "prepare",
    "read_squad",
]
