"""OpenAI's endpoint around an engine: completions and chats, whole or streamed."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from ssmax.errors import UsageError
from ssmax.serve.engine import Busy, Engine, Job, Piece, Request
from ssmax.serve.metrics import metrics_text
from ssmax.serve.wire import (
    ApiError,
    Asked,
    ChatAsked,
    ChatShape,
    CompletionAsked,
    CompletionShape,
    Shape,
    first_fault,
)

MAX_BODY_BYTES = 16 * 2**20
CHARACTERS_A_TOKEN = 128
"""No text has more to a token, but for long runs of spaces; to count tokens first takes seconds."""
DEFAULT_MAX_TOKENS = 16
"""Of a completion that does not say; OpenAI's. A chat goes on to the server's limit."""
_FAULTS: dict[str | None, ApiError] = {
    "error": ApiError(500, "the model failed on this request; the server's log says why"),
    # Heard only by those who still listen: the server stops.
    "cancelled": ApiError(503, "the server is shutting down", code="overloaded"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a single request may ask for."""

    max_prompt_tokens: int = 8192
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")


def application(
    engine: Engine, *, name: str, limits: Limits | None = None, api_key: str | None = None
) -> FastAPI:
    """The endpoint of one model; the engine runs as long as the application does.

    With an `api_key`, /v1 is open to those who send it; /health and /metrics are to all.
    """
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with engine:
            yield

    handlers: dict[Any, Any] = {
        ApiError: lambda _, error: error.response(),
        RequestValidationError: lambda _, error: first_fault(error.errors()).response(),
        HTTPException: _http_error,
        Exception: lambda *_: ApiError(500, "the server failed; its log says why").response(),
    }
    # No pages of documentation: FastAPI's load their scripts from other servers.
    app = FastAPI(
        title="ssmax",
        lifespan=lifespan,
        exception_handlers=handlers,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(_Door, api_key=api_key)
    about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "ssmax"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not engine.is_running:
            raise ApiError(503, "the engine is not running")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics_text(engine), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        _check_model(model, name)
        return about

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, http: HttpRequest) -> Any:
        _check_model(asked.model, name)
        texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
        _check_size(texts, len(asked.prompts) * (asked.n or 1), engine, limits, "prompt")
        encode = engine.language.encode
        prompts = [
            await asyncio.to_thread(encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in asked.prompts
        ]
        most = asked.max_tokens or min(DEFAULT_MAX_TOKENS, limits.max_new_tokens)
        _check_length(prompts, most, limits, engine.language.size, "prompt")
        requests = _requests(asked, prompts, most, asked.stops)
        return await _answered(http, engine, asked, requests, CompletionShape(name))

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, http: HttpRequest) -> Any:
        _check_model(asked.model, name)
        messages = [message.as_dict() for message in asked.messages]
        text = "".join(message["content"] for message in messages)
        _check_size([text], asked.n or 1, engine, limits, "messages")
        try:
            prompt = await asyncio.to_thread(engine.language.encode_chat, messages)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        most = asked.max_completion_tokens or asked.max_tokens or limits.max_new_tokens
        _check_length([prompt], most, limits, engine.language.size, "messages")
        stops = (*asked.stops, *engine.language.chat_stops)
        requests = _requests(asked, [prompt], most, stops)
        return await _answered(http, engine, asked, requests, ChatShape(name))

    return app


class _Door:
    """Before a body is read: the key, and how long the body may be."""

    def __init__(self, app: Any, *, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if scope["path"].startswith("/v1/") and self._expected is not None:
            given = headers.get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            is_right = secrets.compare_digest(key, self._expected)
            if not (is_right and scheme.lower() == b"bearer"):
                what = "Incorrect API key provided" if given else "No API key provided"
                error = ApiError(
                    401, f"{what}: send Authorization: Bearer KEY", code="invalid_api_key"
                )
                return await error.response()(scope, receive, send)
        came = 0

        async def bounded() -> Any:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes")
            return message

        await self._app(scope, bounded, send)


async def _answered(
    http: HttpRequest, engine: Engine, asked: Asked, requests: list[Request], shape: Shape
) -> Any:
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

    def deliver(index: int, piece: Piece) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

    try:
        jobs = engine.submit(requests, deliver)
    except Busy as busy:
        raise ApiError(503, str(busy), code="overloaded") from None
    if asked.stream:
        return _Stream(_events(jobs, pieces, shape, asked.wants_usage), jobs)
    watching = asyncio.create_task(_cancel_when_gone(http, jobs))
    try:
        texts, ends = [""] * len(jobs), [""] * len(jobs)
        async for index, piece in _until_all_end(jobs, pieces):
            texts[index] += piece.text
            ends[index] = piece.finish or ""
    finally:
        watching.cancel()
        _cancel(jobs)
    for finish in ends:
        if (error := _FAULTS.get(finish)) is not None:
            raise error
    choices = [shape.whole(*each) for each in zip(range(len(jobs)), texts, ends, strict=True)]
    return {**shape.head, "object": shape.kind, "choices": choices, "usage": _usage(jobs)}


class _Stream(StreamingResponse):
    """Events as they come; however it ends, the engine forgets who is no longer listened to."""

    def __init__(self, events: AsyncIterator[str], jobs: list[Job]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._jobs = jobs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._jobs)


async def _events(
    jobs: list[Job], pieces: asyncio.Queue[tuple[int, Piece]], shape: Shape, wants_usage: bool
) -> AsyncIterator[str]:
    head = {**shape.head, "object": shape.chunk_kind}
    for index in range(len(jobs)):
        if (opening := shape.opening(index)) is not None:
            yield _event({**head, "choices": [opening]})
    async for index, piece in _until_all_end(jobs, pieces):
        if (error := _FAULTS.get(piece.finish)) is not None:
            yield _event(error.body)
            return
        yield _event({**head, "choices": [shape.part(index, piece)]})
    if wants_usage:
        yield _event({**head, "choices": [], "usage": _usage(jobs)})
    yield "data: [DONE]\n\n"


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"


async def _until_all_end(
    jobs: list[Job], pieces: asyncio.Queue[tuple[int, Piece]]
) -> AsyncIterator[tuple[int, Piece]]:
    left = len(jobs)
    while left:
        index, piece = await pieces.get()
        left -= piece.finish is not None
        yield index, piece


async def _cancel_when_gone(http: HttpRequest, jobs: list[Job]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    _cancel(jobs)


def _cancel(jobs: list[Job]) -> None:
    for job in jobs:
        job.cancel()


def _requests(
    asked: Asked, prompts: list[list[int]], most: int, stops: tuple[str, ...]
) -> list[Request]:
    """`n` of every prompt, each with draws of its own."""
    return [
        Request(
            prompt=prompt,
            max_new_tokens=most,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=None if asked.seed is None else asked.seed + copy,
            stops=stops,
        )
        for prompt in prompts
        for copy in range(asked.n or 1)
    ]


def _check_model(asked: str, name: str) -> None:
    if asked != name:
        raise ApiError(
            404,
            f"The model {asked!r} does not exist; this server has {name!r}",
            param="model",
            code="model_not_found",
        )


def _check_size(texts: list[str], count: int, engine: Engine, limits: Limits, param: str) -> None:
    """What can be refused before anything is made of it."""
    if count > engine.max_waiting:
        raise ApiError(
            400,
            f"a request may ask for at most {engine.max_waiting} answers, prompts times n, "
            f"got {count}",
            param=param,
        )
    most = CHARACTERS_A_TOKEN * limits.max_prompt_tokens
    longest = max(map(len, texts), default=0)
    if longest > most:
        raise ApiError(
            400,
            f"a prompt may have at most {limits.max_prompt_tokens} tokens, and {most} characters, "
            f"got {longest} characters",
            param=param,
            code="context_length_exceeded",
        )


def _check_length(
    prompts: list[list[int]], most: int, limits: Limits, size: int, param: str
) -> None:
    if most > limits.max_new_tokens:
        raise ApiError(
            400,
            f"max_tokens may be at most {limits.max_new_tokens}, got {most}",
            param="max_tokens",
        )
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, f"{param} must hold at least one token, got none", param=param)
        if len(prompt) > limits.max_prompt_tokens:
            raise ApiError(
                400,
                f"a prompt may have at most {limits.max_prompt_tokens} tokens, got {len(prompt)}",
                param=param,
                code="context_length_exceeded",
            )
        if max(prompt) >= size:
            raise ApiError(400, f"tokens must lie in 0..{size - 1}, got {max(prompt)}", param=param)


def _usage(jobs: list[Job]) -> dict[str, int]:
    # Copies of one prompt count once, as they do at OpenAI's.
    prompts = {id(job.request.prompt): len(job.request.prompt) for job in jobs}
    read, new = sum(prompts.values()), sum(len(job.tokens) for job in jobs)
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def _http_error(http: HttpRequest, error: HTTPException) -> Any:
    what = f"{http.method} {http.url.path}: {error.detail}"
    return ApiError(error.status_code, what).response()
