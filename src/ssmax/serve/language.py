"""Text to tokens and back as an endpoint needs it: whole characters, stop strings, chats."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ssmax.data.tokenizer import UNKNOWN, Tokenizer
from ssmax.errors import UsageError

Message = dict[str, str]
"""`role` and `content`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """What a model's tokens mean."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    encode_chat: Callable[[list[Message]], list[int]]
    """The tokens of a conversation up to where the assistant speaks."""
    size: int
    """Tokens are below it."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    chat_stops: tuple[str, ...] = ()
    """Text that ends an answer in a chat."""


def plain_language(tokenizer: Tokenizer, ends: Iterable[int] = ()) -> Language:
    """Of a tokenizer without a chat's template: a conversation is written as a transcript.

    Every message is `Role: content` and an empty line, then comes `Assistant:`. The answer ends
    where the model lets the user speak.
    """
    return Language(
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        encode_chat=lambda messages: tokenizer.encode(transcript(messages)),
        size=tokenizer.vocabulary.size,
        ends=frozenset({tokenizer.vocabulary.end_of_document, *ends}),
        chat_stops=("\n\nUser:",),
    )


def transformers_language(tokenizer: Any, ends: Iterable[int] = ()) -> Language:
    """Of a tokenizer of Transformers: its first and last tokens and its chat's template."""
    has_template = tokenizer.chat_template is not None
    own_end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode_chat(messages: list[Message]) -> list[int]:
        if not has_template:
            return tokenizer.encode(transcript(messages))
        from jinja2 import TemplateError

        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise UsageError(f"the model's chat template refuses it: {error}") from None
        # The template has written the first token itself.
        return tokenizer.encode(text, add_special_tokens=False)

    return Language(
        encode=tokenizer.encode,
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        encode_chat=encode_chat,
        size=len(tokenizer),
        ends=frozenset([*own_end, *ends]),
        chat_stops=() if has_template else ("\n\nUser:",),
    )


def transcript(messages: list[Message]) -> str:
    """A conversation for a model that was never taught how one is written."""
    said = [f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages]
    return "".join(said) + "Assistant:"


class Speech:
    """The text of tokens as they come: never half a character, never the start of a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._tokens: list[int] = []
        # What came before the last whole character is decoded again: a tokenizer may write the
        # same token otherwise at the start of a text.
        self._context = self._written = 0
        self._held = ""
        self.is_stopped: bool = False

    def add(self, token: int) -> str:
        """What can be said after this token."""
        self._tokens.append(token)
        text = self._undecoded()
        if text.endswith(UNKNOWN):
            return ""
        self._context, self._written = self._written, len(self._tokens)
        return self._say(text)

    def rest(self) -> str:
        """What was held back, once no more tokens come."""
        said = self._say(self._undecoded()) + self._held
        self._held = ""
        return said

    def _undecoded(self) -> str:
        before = self._decode(self._tokens[self._context : self._written])
        return self._decode(self._tokens[self._context :])[len(before) :]

    def _say(self, text: str) -> str:
        text, self._held = self._held + text, ""
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)]
        begun = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text begin the stop string."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
