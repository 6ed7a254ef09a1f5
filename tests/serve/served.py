"""Engines and endpoints for the tests: asked alone, asked by many, asked over a socket."""

import contextlib
import random
import socket
import threading
import time

import uvicorn

from ssmax.data.tokenizer import load_tokenizer
from ssmax.serve.endpoint import application
from ssmax.serve.engine import Engine, Request
from ssmax.serve.graphs import graph_of
from ssmax.serve.language import plain_language

BYTES = load_tokenizer("bytes")
END = BYTES.vocabulary.end_of_document
WAIT = 60


def engine_of(decoder, language=None, **options) -> Engine:
    return Engine(decoder, language or plain_language(BYTES), **options)


def drawn_prompts(count, *, longest, vocabulary, seed=0):
    """Prompts of unequal length, and how many tokens each is to get."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]
    return prompts, [rng.randint(1, 30) for _ in prompts]


def answers(engine, requests, *, pause=0.0):
    """The new tokens of all requests, sent one after the other."""
    jobs, ended = [], threading.Semaphore(0)
    for request in requests:
        jobs += engine.submit([request], lambda _, piece: piece.finish and ended.release())
        time.sleep(pause)
    for _ in jobs:
        assert ended.acquire(timeout=WAIT)
    return [job.tokens for job in jobs]


def alone(decoder, requests, language=None):
    """Every request by an engine that has no other."""
    with engine_of(decoder, language, max_batch=1) as engine:
        return [answers(engine, [request])[0] for request in requests]


def greedy(prompts, lengths):
    return [
        Request(prompt=prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


@contextlib.contextmanager
def serving(engine, **options):
    """The address of a server around the engine."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application(engine, name="tiny", **options), log_level="critical", ws="none",
        timeout_graceful_shutdown=WAIT,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT)
        listening.close()
        assert not thread.is_alive()


def until(is_true):
    """Wait for it, not for ever."""
    deadline = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def is_idle(engine):
    return engine.num_running == engine.num_waiting == 0


class Slow:
    """A decoder that takes its time, so that a test is quicker, and that fails when told."""

    def __init__(self, model, seconds=0.01):
        self.graph, self.seconds, self.fails = graph_of(model), seconds, False

    def empty_past(self):
        return self.graph.empty_past()

    def last(self, tokens, mask, past):
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("out of memory")
        return self.graph.last(tokens, mask, past)
