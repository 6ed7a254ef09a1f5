"""The endpoint as the real client sees it, and as one that errs, hurries or goes away does."""

import asyncio
import contextlib
import http.client
import json
import threading
import urllib.request

import openai
import pytest
from pydantic import ValidationError
from served import BYTES, END, Slow, drawn_prompts, engine_of, is_idle, serving, until
from small_native import native
from tiny_models import build, randomise

import ssmax.hf
from ssmax.serve import endpoint
from ssmax.serve.endpoint import Limits
from ssmax.serve.graphs import graph_of
from ssmax.serve.language import plain_language, transcript
from ssmax.serve.wire import ChatAsked, CompletionAsked

MODEL = native(vocab_size=257)
LIMITS = Limits(max_prompt_tokens=700, max_new_tokens=600)


@contextlib.contextmanager
def served(decoder=None, *, api_key=None, **options):
    """An engine and the client of a server around it."""
    engine = engine_of(decoder or graph_of(MODEL), **options)
    with (
        serving(engine, limits=LIMITS, api_key=api_key) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key=api_key or "none", max_retries=0) as client,
    ):
        yield engine, client


@pytest.fixture(scope="module")
def quick():
    with served() as both:
        yield both


@pytest.fixture
def client(quick):
    return quick[1]


@pytest.fixture
def slow():
    with served(Slow(MODEL), max_batch=1, max_waiting=2) as both:
        yield both


def text_of(prompt, max_tokens=16):
    """What the model itself continues a prompt with."""
    tokens = BYTES.encode(prompt) if isinstance(prompt, str) else prompt
    return BYTES.decode(MODEL.generate([tokens], max_tokens, stop_tokens=[END])[0])


def ask(client, prompt, **options):
    return client.completions.create(model="tiny", prompt=prompt, **{"temperature": 0, **options})


def raw(client, body, *, path="/v1/completions", headers=None, method="POST"):
    """Status, body and headers of a request that no client would send."""
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=60)
    try:
        connection.request(
            method, path, body, {"Content-Type": "application/json"} | (headers or {})
        )
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content), answer.headers
    finally:
        connection.close()


def test_fifty_at_a_time_are_each_told_what_they_are_told_alone(quick):
    engine, client = quick
    prompts, lengths = drawn_prompts(50, longest=600, vocabulary=257)
    before = engine.totals.steps

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as many:
            asked = [
                many.completions.create(
                    model="tiny", prompt=prompt, max_tokens=length, temperature=0
                )
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            return await asyncio.gather(*asked)

    for prompt, length, answer in zip(prompts, lengths, asyncio.run(all_at_once()), strict=True):
        assert answer.choices[0].text == text_of(prompt, length)
        assert answer.usage.prompt_tokens == len(prompt)
    assert engine.totals.steps - before < sum(lengths) / 3
    until(lambda: is_idle(engine))


def test_fifty_streams_at_a_time_of_a_converted_model():
    model = randomise(ssmax.hf.convert(build("llama"), init="paper", train_length=64))
    prompts, lengths = drawn_prompts(50, longest=90, vocabulary=99)
    wanted = [
        ssmax.hf.CausalSubject(model).generate([prompt], length)[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]

    async def streamed(many, prompt, length):
        stream = await many.completions.create(
            model="tiny", prompt=prompt, max_tokens=length, temperature=0, stream=True
        )
        return "".join([part.choices[0].text async for part in stream])

    async def all_at_once(address):
        async with openai.AsyncOpenAI(base_url=address, api_key="none") as many:
            asked = zip(prompts, lengths, strict=True)
            return await asyncio.gather(*(streamed(many, *each) for each in asked))

    with served(graph_of(model), language=plain_language(BYTES, ends=[2])) as (engine, client):
        texts = asyncio.run(all_at_once(client.base_url))
        assert engine.totals.finished.total() == 50
    # Bytes below 99 are characters: text tells tokens apart.
    assert texts == [BYTES.decode(tokens) for tokens in wanted]


def test_a_stream_is_the_answer_in_parts_and_tells_its_usage_when_asked(client):
    whole = ask(client, "def f(", max_tokens=40)
    parts = list(
        ask(client, "def f(", max_tokens=40, stream=True, stream_options={"include_usage": True})
    )
    *texts, usage = parts
    assert "".join(part.choices[0].text for part in texts) == whole.choices[0].text
    assert len(texts) > 3 and {part.id for part in parts} == {parts[0].id}
    ends = [part.choices[0].finish_reason for part in texts]
    assert ends == [None] * (len(texts) - 1) + [whole.choices[0].finish_reason]
    assert usage.choices == [] and usage.usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.object) == (6, "text_completion")
    assert all(part.usage is None for part in texts)


def test_a_chat_without_a_template_is_a_transcript(client):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "},
                                          {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hello"},
    ]  # fmt: skip
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = client.chat.completions
    whole = chat.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
    assert whole.choices[0].message.content == text_of(transcript(same), 20)
    assert whole.choices[0].message.role == "assistant"
    parts = list(
        chat.create(
            model="tiny", messages=messages, temperature=0, max_completion_tokens=20, stream=True
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    # An answer that is said on goes on from there.
    messages.append(whole.choices[0].message)
    assert chat.create(model="tiny", messages=messages, max_tokens=2).choices[0].message


def test_several_prompts_and_several_answers_come_in_order(client):
    answer = ask(client, ["one", "two"], n=2, max_tokens=5)
    assert [choice.text for choice in answer.choices] == [
        text_of(prompt, 5) for prompt in ("one", "one", "two", "two")
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 6
    drawn = ask(client, "one", n=2, temperature=2, seed=1, max_tokens=8)
    assert drawn.choices[0].text != drawn.choices[1].text
    tokens = ask(client, [BYTES.encode("one"), BYTES.encode("two")], max_tokens=5)
    assert [choice.text for choice in tokens.choices] == [text_of("one", 5), text_of("two", 5)]


def test_draws_follow_their_seed(client):
    texts = [
        ask(client, "a", temperature=1.5, top_p=0.9, seed=seed).choices[0].text
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]
    unseeded = {ask(client, "a", temperature=1.5).choices[0].text for _ in range(4)}
    assert len(unseeded) > 1


def test_an_answer_ends_before_its_stop_string(client):
    whole = text_of("stop", 60)
    stop = whole[10:12]
    for stream in (False, True):
        answer = ask(client, "stop", max_tokens=60, stop=["never", stop], stream=stream)
        last = [part.choices[0] for part in answer] if stream else answer.choices
        assert "".join(choice.text for choice in last) == whole[: whole.index(stop)]
        assert last[-1].finish_reason == "stop"


def test_neutral_settings_are_taken_and_models_listed(client):
    answer = ask(client, "a", frequency_penalty=0, presence_penalty=0.0, best_of=1, echo=False,
                 logprobs=None, logit_bias={}, user="me")  # fmt: skip
    assert answer.choices[0].text == text_of("a")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-5")


CHAT = "/v1/chat/completions"
SAY = {"model": "tiny", "prompt": "a"}


@pytest.mark.parametrize(
    ("body", "path", "status", "param", "code", "says"),
    [
        ("{", None, 400, None, None, "not JSON"),
        ('{"model": "tiny", "prompt": "\\ud800"}', None, 400, "prompt", None, "must be Unicode"),
        ('{"model": "tiny", "prompt": "a", "\\ud800": 1}', None, 400, None, None, "string"),
        ('{"model": "\\ud800", "prompt": "a"}', None, 404, "model", "model_not_found", "ud800"),
        ("[]", None, 400, None, None, "must be a JSON object"),
        ("", None, 400, None, None, "Field required"),
        ({"prompt": "a"}, None, 400, "model", None, "Field required"),
        ({**SAY, "model": "gpt-5"}, None, 404, "model", "model_not_found", "has 'tiny'"),
        ({**SAY, "model": 3}, None, 400, "model", None, "valid string"),
        ({**SAY, "prompt": "a" * 701}, None, 400, "prompt", "context_length_exceeded",
         "at most 700 tokens, got 701"),
        ({**SAY, "prompt": "a" * 128 * 700 + "a"}, None, 400, "prompt", "context_length_exceeded",
         "89600 characters, got 89601 characters"),
        ({**SAY, "prompt": ["a"] * 3, "n": 100}, None, 400, "prompt", None,
         "at most 256 answers, prompts times n, got 300"),
        ({**SAY, "prompt": ""}, None, 400, "prompt", None, "must not be empty"),
        ({**SAY, "prompt": []}, None, 400, "prompt", None, "must not be empty"),
        ({**SAY, "prompt": [[]]}, None, 400, "prompt", None, "at least one token"),
        ({**SAY, "prompt": [1, 257]}, None, 400, "prompt", None, "0..256, got 257"),
        ({**SAY, "prompt": [1, -1]}, None, 400, "prompt", None, "greater than or equal to 0"),
        ({**SAY, "prompt": {"a": 1}}, None, 400, "prompt", None, "valid"),
        ({**SAY, "prompt": ["a", 1]}, None, 400, "prompt", None, "valid"),
        ({**SAY, "max_tokens": 601}, None, 400, "max_tokens", None, "at most 600, got 601"),
        ({**SAY, "max_tokens": 0}, None, 400, "max_tokens", None, "greater than or equal to 1"),
        ({**SAY, "max_tokens": "9"}, None, 400, "max_tokens", None, "valid integer"),
        ({**SAY, "temperature": -1}, None, 400, "temperature", None, "greater than or equal to 0"),
        ({**SAY, "temperature": "hot"}, None, 400, "temperature", None, "valid number"),
        ({**SAY, "top_p": 0}, None, 400, "top_p", None, "greater than 0"),
        ({**SAY, "n": 0}, None, 400, "n", None, "greater than or equal to 1"),
        ({**SAY, "seed": 2**70}, None, 400, "seed", None, "less than or equal to"),
        ({**SAY, "stop": ["a"] * 5}, None, 400, "stop", None, "at most 4 items"),
        ({**SAY, "stop": ""}, None, 400, "stop", None, "must not be empty"),
        ({**SAY, "stream": "yes"}, None, 400, "stream", None, "valid boolean"),
        ({**SAY, "logprobs": 0}, None, 400, "logprobs", None, "Unrecognized request argument"),
        ({**SAY, "logprobs": 5}, None, 400, "logprobs", None, "Unrecognized request argument"),
        ({**SAY, "tempreature": 0}, None, 400, "tempreature", None, "Unrecognized"),
        ({"model": "tiny", "messages": []}, CHAT, 400, "messages", None, "must not be empty"),
        ({"model": "tiny", "messages": "hi"}, CHAT, 400, "messages", None, "valid list"),
        ({"model": "tiny", "messages": [{"role": "king", "content": "a"}]}, CHAT, 400, "messages",
         None, "'system', 'developer', 'user' or 'assistant'"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "a" * 800}]}, CHAT, 400,
         "messages", "context_length_exceeded", "at most 700"),
        ({}, "/v1/embeddings", 404, None, None, "/v1/embeddings: Not Found"),
    ],
)  # fmt: skip
def test_a_bad_request_gets_openais_error_and_leaves_nothing_behind(
    quick, body, path, status, param, code, says
):
    engine, client = quick
    body = body if isinstance(body, str) else json.dumps(body)
    came, answer, _ = raw(client, body, path=path or "/v1/completions")
    error = answer["error"]
    assert (came, error["param"], error["code"]) == (status, param, code)
    assert says in error["message"] and error["type"] == "invalid_request_error"
    until(lambda: is_idle(engine))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionAsked, {"prompt": [0] * 1000 + [""]}),
        (CompletionAsked, {"prompt": [["a"] * 1000]}),
        (ChatAsked, {"messages": [{}] * 1000}),
        (ChatAsked, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
    ],
)
def test_a_list_is_left_at_its_first_wrong_item(kind, body):
    """One error for each of millions took the server's memory."""
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate({"model": "tiny", **body})
    assert wrong.value.error_count() <= 4


def test_a_body_without_its_type_is_told_what_to_send(client):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer, _ = raw(client, json.dumps(SAY), headers=headers)
    assert status == 400 and "Content-Type: application/json" in answer["error"]["message"]


def test_a_temperature_near_zero_is_greedy_and_fails_nobody(client):
    for temperature in (1e-40, 3.41e-38, 1e-19):
        answer = ask(client, "a", temperature=temperature)
        assert answer.choices[0].text == text_of("a")


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="at most 700 tokens") as caught:
        ask(client, "a" * 900)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_a_wrong_method_and_a_body_without_end_are_refused(client, monkeypatch):
    assert raw(client, None, method="GET")[0] == 405
    monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", 1000)
    status, answer, _ = raw(client, json.dumps({**SAY, "prompt": "a" * 2000}))
    assert status == 413 and "longer than 1,000 bytes" in answer["error"]["message"]


def test_a_key_is_asked_for_where_there_is_one():
    with served(api_key="secret") as (_, client):
        assert ask(client, "a").choices[0].text == text_of("a")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, answer, _ = raw(client, "{", headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        # A scheme's name may be written in either case.
        right = {"Authorization": "bearer secret"}
        assert raw(client, None, path="/v1/models", method="GET", headers=right)[0] == 200
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        assert raw(client, None, path="/health", method="GET")[1] == {"status": "ok"}


def test_no_page_loads_from_elsewhere():
    with served() as (_, client):
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert raw(client, None, path=path, method="GET")[0] == 404


def test_a_client_that_goes_away_mid_stream_frees_its_place(slow):
    engine, client = slow
    stream = ask(client, "a", max_tokens=600, stream=True)
    next(iter(stream))
    assert engine.num_running == 1
    stream.close()
    until(lambda: engine.totals.finished["cancelled"] == 1)
    until(lambda: is_idle(engine))
    assert engine.totals.new_tokens < 300


def test_a_client_that_goes_away_before_its_answer_frees_its_place(slow):
    engine, client = slow
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.3), "a", max_tokens=600)
    until(lambda: engine.totals.finished["cancelled"] == 1)
    until(lambda: is_idle(engine))


def test_a_client_that_goes_away_while_it_waits_is_forgotten(slow):
    engine, client = slow
    running = ask(client, "a", max_tokens=600, stream=True)
    waiting = ask(client, "b", max_tokens=600, stream=True)
    until(lambda: engine.num_waiting == 1)
    waiting.close()
    until(lambda: engine.num_waiting == 0)
    assert engine.num_running == 1
    running.close()
    until(lambda: is_idle(engine))


def test_where_too_many_wait_one_more_is_told_to_come_again(slow):
    engine, client = slow
    streams = [ask(client, "a", max_tokens=600, stream=True)]
    until(lambda: engine.num_running == 1)
    streams += [ask(client, "a", max_tokens=600, stream=True) for _ in range(2)]
    status, answer, headers = raw(client, json.dumps(SAY))
    assert (status, answer["error"]["type"]) == (503, "server_error")
    assert "2 may wait" in answer["error"]["message"] and headers["Retry-After"] == "1"
    for stream in streams:
        stream.close()
    until(lambda: is_idle(engine))


def test_a_model_that_fails_is_a_servers_error_whole_or_streamed():
    decoder = Slow(MODEL)
    with served(decoder) as (engine, client):
        stream = iter(ask(client, "a", max_tokens=600, stream=True))
        next(stream)
        decoder.fails = True
        with pytest.raises(openai.APIError, match="the model failed"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the model failed"):
            ask(client, "a")
        decoder.fails = False
        assert ask(client, "a").choices[0].text == text_of("a")
        assert engine.totals.finished["error"] == 2


def test_what_runs_when_the_server_stops_is_finished():
    engine, told = engine_of(Slow(MODEL)), []
    with serving(engine) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        asking = threading.Thread(
            target=lambda: told.append(ask(client, "a", max_tokens=60).choices[0].text)
        )
        asking.start()
        until(lambda: engine.num_running == 1)
    asking.join(60)
    client.close()
    assert told == [text_of("a", 60)]
    assert not engine.is_running and not engine._thread.is_alive()


def test_metrics_count_what_was_done():
    with served() as (engine, client):
        ask(client, "abc", max_tokens=7)
        until(lambda: is_idle(engine))
        path = f"{client.base_url}".removesuffix("/v1/") + "/metrics"
        with urllib.request.urlopen(path) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = answer.read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in (line.split(" ") for line in lines)}
    assert values["ssmax_prompt_tokens_total"] == 3
    assert values["ssmax_completion_tokens_total"] == engine.totals.new_tokens <= 7
    assert sum(values[name] for name in values if name.startswith("ssmax_requests_total")) == 1
    assert values["ssmax_requests_running"] == values["ssmax_requests_waiting"] == 0
    assert 0 < values["ssmax_first_token_seconds_sum"] < 60
    for name in {name.partition("{")[0] for name in values}:
        family = name.removesuffix("_sum").removesuffix("_count")
        assert f"# TYPE {family} " in text and f"# HELP {family} " in text
