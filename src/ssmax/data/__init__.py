"""From text to tokens: tokenizers, shards, an order that anyone can resume.

Names are loaded on first use: the processes that encode text need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssmax.data.preparation import prepare as prepare
    from ssmax.data.qa import QuestionStream as QuestionStream
    from ssmax.data.qa import read_squad as read_squad
    from ssmax.data.shards import ShardSet as ShardSet
    from ssmax.data.stream import TokenStream as TokenStream
    from ssmax.data.tokenizer import load_tokenizer as load_tokenizer

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


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ssmax.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ssmax.data.{_HOME_OF[name]}"), name)
