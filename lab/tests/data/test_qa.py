"""Question answering: what SQuAD says, cut to fit, packed so that only answers are learned."""

import gzip
import itertools
import json
import lzma

import numpy as np
import pytest

from ssmax.errors import UsageError
from ssmax_lab.data.qa import (
    IGNORE,
    Example,
    Question,
    QuestionStream,
    encode_questions,
    format_question,
    read_squad,
)

END = 256
HARBOUR = "The harbour of Lindholm freezes in January. Its ferry then stays on the southern shore."
BAKER = "Marta bakes rye bread on Tuesdays."
JANUARY = [{"text": "January", "answer_start": 35}, {"text": "in January", "answer_start": 32}]
FIRST = {"id": "a", "question": "When does the harbour freeze?", "answers": JANUARY}
SECOND = {"id": "b", "question": "Who owns the ferry?", "answers": [], "is_impossible": True}
THIRD = {"id": "c", "question": "What does Marta bake?", "answers": [{"text": "rye bread"}]}
SQUAD = {
    "data": [
        {"paragraphs": [{"context": HARBOUR, "qas": [FIRST, SECOND]}]},
        {"paragraphs": [{"context": BAKER, "qas": [THIRD]}]},
    ]
}


def encode(text):
    return list(text.encode())


def decode(tokens):
    return bytes(token for token in tokens if token != END).decode()


def encoded(questions, length):
    return encode_questions(questions, encode, end_of_document=END, length=length)


def invented(count, length, seed=0):
    """Examples whose tokens are all different, so that each can be told from every other."""
    generator, tokens = np.random.default_rng(seed), itertools.count(1000)
    examples = []
    for _ in range(count):
        size = int(generator.integers(3, length // 2))
        row = np.array([*itertools.islice(tokens, size - 1), END], np.int32)
        examples.append(Example(tokens=row, answer_start=int(generator.integers(1, size - 1))))
    return examples


def contents(packed):
    """The segments of packed rows, padding left out."""
    bounds = itertools.pairwise(packed.cu_seqlens.tolist())
    segments = [packed.tokens[start:stop].tolist() for start, stop in bounds]
    return [segment for segment in segments if set(segment) != {END}]


def first_epoch(examples, length):
    # This seed turns two examples around.
    stream = QuestionStream(examples, length=length, seed=3)
    return stream.batch(0, stream.rows_in_epoch(0))


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def squad(tmp_path):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(SQUAD))
    return path


def test_questions_come_with_their_first_answer_or_none(squad):
    assert read_squad(squad) == [
        Question(context=HARBOUR, question="When does the harbour freeze?", answer="January"),
        Question(context=HARBOUR, question="Who owns the ferry?", answer=""),
        Question(context=BAKER, question="What does Marta bake?", answer="rye bread"),
    ]


def test_what_is_impossible_has_no_answer_even_if_one_is_given(tmp_path):
    entry = {"id": "d", "question": "?", "answers": [{"text": "x"}], "is_impossible": True}
    value = {"data": [{"paragraphs": [{"context": BAKER, "qas": [entry]}]}]}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert [question.answer for question in read_squad(tmp_path / "a.json")] == [""]


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_file_reads_like_the_plain_one(squad, ending, pack):
    packed = squad.with_name(f"squad.json{ending}")
    packed.write_bytes(pack(squad.read_bytes()))
    assert read_squad(packed) == read_squad(squad)
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(UsageError, match="squad.json.* cannot be read"):
        read_squad(packed)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.json.xz"])
@pytest.mark.parametrize("data", [None, b"", b"{", b"\xff\xfe\x00", b"not an archive"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, data):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=f"{name} cannot be read as SQuAD"):
        read_squad(tmp_path / name)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is not SQuAD"),
        ({"data": []}, "holds no questions"),
        ({"data": [3]}, "is not SQuAD"),
        ({"data": [{"paragraphs": [{"qas": [{}]}]}]}, "is not SQuAD: KeyError: 'context'"),
        ({"data": [{"paragraphs": [{"context": "", "qas": [{}]}]}]}, "'answers'"),
        (
            {"data": [{"paragraphs": [{"context": "", "qas": [{"answers": [{}]}]}]}]},
            "is not SQuAD: KeyError: 'text'",
        ),
        (
            {"data": [{"paragraphs": [
                {"context": "", "qas": [{"answers": [], "id": "7", "question": 3}]}
            ]}]},
            "is not SQuAD: .*question '7' .* is no text",
        ),
    ],
)  # fmt: skip
def test_what_is_not_squad_is_refused_by_file(tmp_path, value, message):
    (tmp_path / "a.json").write_text(json.dumps(value))
    with pytest.raises(UsageError, match=message):
        read_squad(tmp_path / "a.json")


def test_the_prompt_ends_where_the_answer_begins(squad):
    january, nobody, _ = read_squad(squad)
    assert format_question(january) == (
        f"{HARBOUR}\n\nQuestion: When does the harbour freeze?\nAnswer:",
        " January",
    )
    assert format_question(nobody)[1] == " unanswerable"


def test_an_example_is_prompt_answer_and_end(squad):
    questions = read_squad(squad)
    examples, num_dropped = encoded(questions, 1000)
    assert num_dropped == 0
    for question, example in zip(questions, examples, strict=True):
        prompt, answer = format_question(question)
        assert decode(example.tokens[: example.answer_start]) == prompt
        assert decode(example.tokens[example.answer_start :]) == answer
        assert example.tokens[-1] == END


def test_a_long_context_loses_its_beginning_and_nothing_else(squad):
    question = read_squad(squad)[0]
    whole = encoded([question], 1000)[0][0]
    core = len("\n\nQuestion: When does the harbour freeze?\nAnswer: January") + 1
    for length in (whole.tokens.size, whole.tokens.size - 1, core + 5, core):
        (example,), num_dropped = encoded([question], length)
        assert num_dropped == 0
        assert example.tokens.tolist() == whole.tokens[-length:].tolist()
        assert decode(example.tokens[example.answer_start :]) == " January"
    assert encoded([question], core - 1) == ([], 1)


def test_questions_that_do_not_fit_are_counted_and_the_others_stay(squad):
    questions = read_squad(squad)
    cores = [
        len(f"\n\nQuestion: {q.question}\nAnswer:{format_question(q)[1]}") + 1 for q in questions
    ]
    assert sorted(cores) == [52, 53, 58]
    examples, num_dropped = encoded(questions, 53)
    assert num_dropped == 1
    assert [decode(example.tokens[example.answer_start :]) for example in examples] == [
        " unanswerable",
        " rye bread",
    ]


def test_two_examples_and_padding_by_hand():
    first = Example(tokens=np.array([10, 11, 12, END]), answer_start=2)
    second = Example(tokens=np.array([20, 21, END]), answer_start=1)
    row = first_epoch([first, second], 9)
    no = IGNORE
    assert row.tokens.tolist() == [20, 21, END, 10, 11, 12, END, END, END]
    assert row.targets.tolist() == [21, END, no, no, 12, END, no, no, no]
    assert row.cu_seqlens.tolist() == [0, 3, 7, 9]
    assert row.tokens.dtype == row.targets.dtype == np.int64
    assert row.cu_seqlens.dtype == np.int32


def test_a_full_row_has_no_padding():
    example = Example(tokens=np.array([1, 2, END]), answer_start=1)
    assert first_epoch([example] * 4, 6).cu_seqlens.tolist() == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("count", [1, 7, 300, 1500])
def test_every_example_lies_whole_in_one_row(count):
    examples = invented(count, 40)
    rows = first_epoch(examples, 40)
    assert sorted(contents(rows)) == sorted(example.tokens.tolist() for example in examples)
    assert rows.tokens.size == rows.targets.size == rows.cu_seqlens[-1]
    assert set(range(0, rows.tokens.size + 1, 40)) <= set(rows.cu_seqlens.tolist())
    assert (np.diff(rows.cu_seqlens) > 0).all()


def test_only_answers_are_learned_each_from_the_token_before_it():
    examples = invented(300, 40)
    rows = first_epoch(examples, 40)
    (places,) = (rows.targets != IGNORE).nonzero()
    assert not {*(rows.cu_seqlens[1:] - 1).tolist()} & {*places.tolist()}
    assert np.array_equal(rows.targets[places], rows.tokens[places + 1])
    answers = [example.tokens[example.answer_start :].tolist() for example in examples]
    assert sorted(rows.targets[places].tolist()) == sorted(itertools.chain(*answers))


def test_rows_are_well_filled():
    examples = invented(1500, 60)
    rows = first_epoch(examples, 60)
    assert sum(example.tokens.size for example in examples) > 0.95 * rows.tokens.size


def test_every_epoch_holds_every_example_once_in_its_own_order():
    examples = invented(200, 40)
    stream = QuestionStream(examples, length=40, seed=5)
    expected = sorted(example.tokens.tolist() for example in examples)
    first, seen = 0, []
    for epoch in range(6):
        rows = stream.batch(first, stream.rows_in_epoch(epoch))
        assert sorted(contents(rows)) == expected
        seen.append(contents(rows))
        first += stream.rows_in_epoch(epoch)
    assert all(a != b for a, b in itertools.combinations(seen, 2))
    assert len({stream.rows_in_epoch(epoch) for epoch in range(6)}) > 1


def test_seeds_have_orders_of_their_own():
    examples = invented(50, 40)
    first, second = (QuestionStream(examples, length=40, seed=seed).batch(0, 5) for seed in (0, 1))
    assert contents(first) != contents(second)


def test_a_stream_resumed_at_any_sample_is_the_stream_that_never_stopped():
    examples = invented(30, 40)
    rows = [QuestionStream(examples, length=40, seed=5).batch(one, 1) for one in range(90)]
    assert sum(QuestionStream(examples, length=40, seed=5).rows_in_epoch(e) for e in range(4)) < 90
    stream = QuestionStream(examples, length=40, seed=5)
    for first in (0, 1, 13, 14, 15, 16, 17, 45, 77, 3, 45, 16):
        for one in (QuestionStream(examples, length=40, seed=5), stream):
            found = one.batch(first, 9)
            assert np.array_equal(
                found.tokens, np.concatenate([row.tokens for row in rows[first:][:9]])
            )
        assert same(stream.batch(first, 1), rows[first])
