"""What OpenAI's clients send, checked, and what they are sent."""

import json
import time
import uuid
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ssmax.errors import UsageError
from ssmax.serve.engine import Piece

# What clients send along though it asks for nothing; anything else of it is refused by its name.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1, None),
    "echo": (False, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "logprobs": (False, None),
    "presence_penalty": (0, None),
    "response_format": ({"type": "text"}, None),
    "suffix": (None,),
    "tools": ([], None),
}


def _asks_nothing(name: str, value: Any) -> bool:
    # 0 is False to Python, but `logprobs: 0` asks for the chosen tokens' own.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL.get(name, ())
    )


def _whole(text: str) -> str:
    """JSON can spell half a character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"text must be Unicode, got {error.reason}") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
Stop = Annotated[str, Field(min_length=1), AfterValidator(_whole)]
Token = Annotated[int, Field(ge=0)]
_T = TypeVar("_T")
# A million items that are wrong would be a million errors, gathered before any limit is looked at.
Listed = Annotated[list[_T], Field(fail_fast=True)]


class ApiError(Exception):
    """An answer other than the one that was asked for, with OpenAI's body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }

    def response(self) -> Response:
        """As it is sent."""
        headers = {"Retry-After": "1"} if self.status == 503 else None
        # In ASCII: what is quoted need not be Unicode.
        return Response(json.dumps(self.body), self.status, headers, "application/json")


class _Strict(BaseModel):
    # A number in quotes is no number, a name that is not known is not left out silently.
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """With `stream`."""

    include_usage: bool = False


class Asked(_Strict):
    """What both kinds of completion have."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**62), le=2**62)
    n: int | None = Field(None, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    user: str | None = None
    """Of no use here."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if not _asks_nothing(name, value)}

    @property
    def stops(self) -> tuple[str, ...]:
        """As a list, whatever it came as."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """In a stream it comes only where it is asked for."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionAsked(Asked):
    """POST /v1/completions."""

    prompt: Text | Listed[Text] | Listed[Token] | Listed[Listed[Token]] = Field(min_length=1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as text or as tokens."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class MessageAsked(_Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Listed[TextPart]

    def as_dict(self) -> dict[str, str]:
        """What templates read; they know no developer."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": self.role.replace("developer", "system"), "content": content}


class ChatAsked(Asked):
    """POST /v1/chat/completions."""

    messages: Listed[MessageAsked] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


def first_fault(errors: Any) -> ApiError:
    """The first thing that is wrong with a body, by its field."""
    error = errors[0]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error.get('ctx', {}).get('error', '')}")
    if error["type"] == "model_attributes_type" and len(error["loc"]) == 1:
        return ApiError(
            400, "the body must be a JSON object, sent with Content-Type: application/json"
        )
    field = str(error["loc"][1]) if len(error["loc"]) > 1 else None
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        return ApiError(400, f"Unrecognized request argument supplied: {name}", param=name)
    of_field = [one for one in errors if len(one["loc"]) > 1 and str(one["loc"][1]) == field]
    wanted = "; or ".join(dict.fromkeys(map(_wanted, of_field))) or _wanted(error)
    return ApiError(400, f"{field or 'the body'}: {wanted}", param=field)


def _wanted(error: Any) -> str:
    # Every least length here is 1.
    is_empty = error["type"] in ("too_short", "string_too_short")
    return "must not be empty" if is_empty else error["msg"]


class CompletionShape:
    """How a completion is written."""

    kind: str = "text_completion"
    chunk_kind: str = kind

    def __init__(self, model: str) -> None:
        self.head: dict[str, Any] = _head("cmpl", model)

    def whole(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """An answer."""
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": None}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Before the first part of a stream."""
        return None

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """A part of an answer."""
        return self.whole(index, piece.text, piece.finish)


class ChatShape:
    """How a chat's answer is written."""

    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def __init__(self, model: str) -> None:
        self.head: dict[str, Any] = _head("chatcmpl", model)

    def whole(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """An answer."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "finish_reason": finish, "logprobs": None}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Before the first part of a stream: who speaks."""
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """A part of an answer."""
        return self._delta(index, {"content": piece.text} if piece.text else {}, piece.finish)

    def _delta(self, index: int, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}


Shape = CompletionShape | ChatShape


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
