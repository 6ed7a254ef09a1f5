"""Continuous batching: every answer is the one that is given alone, and every place is freed."""

import pytest
import torch
from served import END, Slow, alone, answers, drawn_prompts, engine_of, greedy, is_idle, until
from small_native import native
from tiny_models import build, randomise

import ssmax.hf
from ssmax.serve import export
from ssmax.serve.decoders import FileDecoder
from ssmax.serve.engine import CHUNK, Busy, Job, Request
from ssmax.serve.graphs import graph_of
from ssmax.serve.language import Language
from ssmax.serve.past import Past

# As wide as the small models', so that any token is one.
NUMBERS = Language(
    encode=lambda text: [int(word) for word in text.split()],
    decode=lambda tokens: "".join(f" {token}" for token in tokens),
    encode_chat=lambda messages: [1],
    size=99,
    ends=frozenset({2}),
)


@pytest.mark.parametrize(
    "changes",
    [{}, {"rule": "ssmax_bias", "qk_norm": True}, {"rule": "ssmax", "window": 7}],
    ids=["ssmax", "bias and qk_norm", "window"],
)
def test_fifty_that_join_at_any_time_get_what_generate_gives_each_alone(changes):
    model = native(vocab_size=257, **changes)
    prompts, lengths = drawn_prompts(50, longest=2 * CHUNK, vocabulary=257)
    wanted = [
        model.generate([prompt], length, stop_tokens=[END])[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    with engine_of(graph_of(model), max_batch=8) as engine:
        assert answers(engine, greedy(prompts, lengths), pause=0.002) == wanted
        # Several rows at a time, or nothing was tested.
        assert engine.totals.new_tokens > 3 * engine.totals.steps
    assert is_idle(engine) and engine._keep_BS.shape == (0, 0)
    assert all(tensor.numel() == 0 for tensor in engine._past.tensors)


def converted(family):
    return randomise(ssmax.hf.convert(build(family), layers="all"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2", "gemma3_mixed"])
def test_a_converted_model_answers_many_as_it_answers_one(family):
    model = converted(family)
    prompts, lengths = drawn_prompts(20, longest=60, vocabulary=99)
    subject = ssmax.hf.CausalSubject(model)
    wanted = [
        subject.generate([prompt], length)[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    with engine_of(graph_of(model), NUMBERS) as engine:
        assert answers(engine, greedy(prompts, lengths)) == wanted


@pytest.mark.parametrize("to", ["onnx", "torch-export"])
def test_a_written_graph_answers_as_the_model_does(to, tmp_path):
    model = native(rule="ssmax_bias")
    export(model, tmp_path / "out", to=to)
    prompts, lengths = drawn_prompts(12, longest=60, vocabulary=99)
    wanted = alone(graph_of(model), greedy(prompts, lengths), NUMBERS)
    with engine_of(FileDecoder(tmp_path / "out"), NUMBERS) as engine:
        assert answers(engine, greedy(prompts, lengths)) == wanted


def test_rows_that_leave_take_their_padding_along():
    with engine_of(Slow(native(vocab_size=257), 0.002)) as engine:
        long = Request(prompt=[1] * 200, max_new_tokens=5)
        short = Request(prompt=[1], max_new_tokens=400)
        jobs = engine.submit([long, short], lambda *_: None)
        until(lambda: jobs[0].finish is not None and engine.num_running == 1)
        until(lambda: engine._keep_BS.shape[0] == 1)
        assert engine._keep_BS.shape[1] < 200
        jobs[1].cancel()
        until(lambda: is_idle(engine))


def test_a_seed_draws_the_same_whoever_else_is_there():
    decoder = graph_of(native(vocab_size=257))
    drawn = [
        Request(prompt=[3, 4], max_new_tokens=20, temperature=1.0, top_p=0.9, seed=seed)
        for seed in (1, 2, 1)
    ]
    first, other, again = alone(decoder, drawn)
    assert first == again != other
    with engine_of(decoder) as engine:
        prompts, lengths = drawn_prompts(6, longest=50, vocabulary=257)
        assert answers(engine, [*greedy(prompts, lengths), drawn[0]])[-1] == first


def test_a_step_that_fails_ends_its_rows_and_nothing_else():
    told = []
    decoder = Slow(native(vocab_size=257))
    with engine_of(decoder, report=told.append) as engine:
        long = Request(prompt=[1], max_new_tokens=500)
        running = engine.submit([long, long], lambda *_: None)
        until(lambda: all(job.tokens for job in running))
        decoder.fails = True
        until(lambda: all(job.finish == "error" for job in running))
        decoder.fails = False
        (tokens,) = answers(engine, [Request(prompt=[1], max_new_tokens=3)])
        assert len(tokens) == 3 and "out of memory" in str(told[0])
        assert engine.totals.finished == {"error": 2, "length": 1}


def test_rows_that_cannot_be_kept_end_and_the_engine_goes_on(monkeypatch):
    def fails(past, rows, first):
        raise torch.OutOfMemoryError("no room for the rows that stay")

    told = []
    with engine_of(Slow(native(vocab_size=257)), report=told.append) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Past, "kept", fails)
            requests = [Request(prompt=[1], max_new_tokens=length) for length in (3, 500)]
            short, long = engine.submit(requests, lambda *_: None)
            until(lambda: long.finish is not None)
            assert (short.finish, long.finish) == ("length", "error")
            assert "no room" in str(told[0])
        (tokens,) = answers(engine, [Request(prompt=[1], max_new_tokens=3)])
        assert len(tokens) == 3 and engine.is_running


def test_a_row_that_cannot_go_on_ends_alone(monkeypatch):
    go_on = Job.go_on

    def fails_for_some(job, logits_V):
        if job.request.seed == 13 and len(job.tokens) == 2:
            raise ValueError("no such draw")
        go_on(job, logits_V)

    monkeypatch.setattr(Job, "go_on", fails_for_some)
    told = []
    with engine_of(graph_of(native(vocab_size=257)), report=told.append) as engine:
        requests = [Request(prompt=[1], max_new_tokens=9, seed=seed) for seed in (None, 13, None)]
        first, failed, last = answers(engine, requests)
    assert len(failed) == 2 and "no such draw" in str(told[0])
    assert first == last and len(first) == 9


def test_closing_ends_what_runs_and_takes_no_more():
    engine = engine_of(Slow(native(vocab_size=257)), max_batch=1)
    with engine:
        ends = []
        request = Request(prompt=[1], max_new_tokens=500)
        jobs = engine.submit([request] * 3, lambda _, piece: ends.append(piece.finish))
        until(lambda: jobs[0].tokens)
    assert [job.finish for job in jobs] == ["cancelled"] * 3
    assert ends.count("cancelled") == 3 and is_idle(engine) and not engine.is_running
    with pytest.raises(Busy, match="shutting down"):
        engine.submit([request], lambda *_: None)


def test_who_waits_is_bounded_and_all_of_a_request_or_none_is_taken():
    with engine_of(Slow(native(vocab_size=257)), max_batch=1, max_waiting=2) as engine:
        request = Request(prompt=[1], max_new_tokens=500)
        (running,) = engine.submit([request], lambda *_: None)
        until(lambda: running.tokens)
        waiting = engine.submit([request], lambda *_: None)
        with pytest.raises(Busy, match="1 requests are waiting, 2 more came, and 2 may wait"):
            engine.submit([request] * 2, lambda *_: None)
        assert engine.num_waiting == 1 and engine.totals.refused == 2
        for job in (running, *waiting):
            job.cancel()


def test_a_long_prompt_does_not_keep_the_others_waiting():
    with engine_of(Slow(native(vocab_size=257), 0.002)) as engine:
        short = Request(prompt=[1], max_new_tokens=30)
        first, long = engine.submit(
            [short, Request(prompt=[1] * 40 * CHUNK, max_new_tokens=1)], lambda *_: None
        )
        until(lambda: first.finish == "length")
        assert long.finish is None
        long.cancel()
        until(lambda: long.finish == "cancelled")


@torch.no_grad()
def test_batching_costs_no_more_than_rounding():
    """Next to others a row's logits are as near to float64 as those of the row alone."""
    model = native(vocab_size=257)
    exact, prompts = native(vocab_size=257).double(), [[7] * 5, list(range(90))]
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    graph = graph_of(model)
    together = graph.last(tokens, mask, Past(graph.empty_past(batch=2)))
    for row, prompt in zip(together, prompts, strict=True):
        wanted = exact(torch.tensor([prompt]))[0, -1]
        own = (model(torch.tensor([prompt]))[0, -1] - wanted).abs().max()
        assert (row - wanted).abs().max() <= 4 * own + 1e-6 * wanted.abs().max()
