"""From text to tokens: tokenizers, shards, an order that anyone can resume.

Names are loaded on first use: the processes that encode text need no torch.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax_lab.data.preparation import prepare as prepare
    from ssmax_lab.data.qa import QuestionStream as QuestionStream
    from ssmax_lab.data.qa import read_squad as read_squad
    from ssmax_lab.data.shards import ShardSet as ShardSet
    from ssmax_lab.data.stream import TokenStream as TokenStream
    from ssmax_lab.data.tokenizer import load_tokenizer as load_tokenizer

_HOME_OF = {
    "QuestionStream": "qa",
    "ShardSet": "shards",
    "TokenStream": "stream",
    "load_tokenizer": "tokenizer",
    "prepare": "preparation",
    "read_squad": "qa",
}

__all__ = [
    "QuestionStream",
    "ShardSet",
    "TokenStream",
    "load_tokenizer",
    "prepare",
    "read_squad",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = door(__name__, _HOME_OF)
