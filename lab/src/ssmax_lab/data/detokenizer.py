"""The text of tokens as they come, in whole characters."""

from collections.abc import Callable, Sequence

from ssmax_lab.data.tokenizer import UNKNOWN


class IncrementalDetokenizer:
    """Decodes one token after the other; holds back what may be half a character."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # What came before the last whole character is decoded again: a tokenizer may write the
        # same token otherwise at the start of a text.
        self._context = self._written = 0

    def add(self, token: int) -> str:
        """Give the new text after this token."""
        self._tokens.append(token)
        text = self._undecoded()
        if text.endswith(UNKNOWN):
            return ""
        self._context, self._written = self._written, len(self._tokens)
        return text

    def finish(self) -> str:
        """Give what was held back, once no more tokens come."""
        return self._undecoded()

    def _undecoded(self) -> str:
        before = self._decode(self._tokens[self._context : self._written])
        return self._decode(self._tokens[self._context :])[len(before) :]
