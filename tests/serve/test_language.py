"""Text as it is said: whole characters, no stop string, conversations as the model knows them."""

import pytest
import tokenizers
import transformers
from served import BYTES

from ssmax.data.tokenizer import load_tokenizer
from ssmax.serve.language import Speech, plain_language, transcript, transformers_language

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]


def said(decode, tokens, stops=()):
    speech = Speech(decode, stops)
    pieces = []
    for token in tokens:
        pieces.append(speech.add(token))
        if speech.is_stopped:
            return pieces
    return [*pieces, speech.rest()]


@pytest.mark.parametrize("name", ["bytes", "small"])
@pytest.mark.parametrize("text", ["plain words", "Zürich, 東京 \N{ROCKET}!", "\n\n  x\ty  \n"])
def test_pieces_are_the_text_and_never_half_a_character(name, text):
    tokenizer = load_tokenizer(name)
    pieces = said(tokenizer.decode, tokenizer.encode(text))
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert sum(map(bool, pieces)) > 1


def test_bytes_that_are_no_text_come_out_as_the_whole_decodes():
    tokens = [104, 0xFF, 0xE2, 0x82, 105, 0xF0, 0x9F]
    assert "".join(said(BYTES.decode, tokens)) == BYTES.decode(tokens)


def test_a_tokenizer_that_drops_the_first_space_keeps_the_others():
    pieces = ["▁Hello", "▁small", "▁world", "!"]

    def decode(tokens):
        return "".join(pieces[t] for t in tokens).replace("▁", " ").removeprefix(" ")

    assert said(decode, [0, 1, 2, 3]) == ["Hello", " small", " world", "!", ""]


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one. two. three", [". t"], "one"),
        ("one. two", ["three", "two", "one."], ""),
        ("aaab", ["aab"], "a"),
        ("ends with STO", ["STOP"], "ends with STO"),
        ("\n\nUse\n\nUser: x", ["\n\nUser:"], "\n\nUse"),
    ],
)
def test_nothing_of_a_stop_string_is_said(text, stops, kept):
    pieces = said(BYTES.decode, BYTES.encode(text), stops)
    assert "".join(pieces) == kept


def test_what_may_become_a_stop_string_is_held_back_and_no_more():
    assert said(BYTES.decode, b"xSTy", ["STOP"]) == ["x", "", "", "STy", ""]


def test_a_transcript_is_what_the_docs_say():
    assert transcript(CHAT) == (
        "System: Be brief.\n\nUser: Hello\n\nAssistant: Yes?\n\nUser: Bye\n\nAssistant:"
    )
    language = plain_language(BYTES, ends=[7])
    assert BYTES.decode(language.encode_chat(CHAT)) == transcript(CHAT)
    assert language.ends == {7, BYTES.vocabulary.end_of_document}
    assert language.chat_stops == ("\n\nUser:",)


def of_transformers(**options):
    small = tokenizers.Tokenizer.from_str(load_tokenizer("small").definition)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=small, eos_token="<|endoftext|>", **options
    )


def test_a_chat_is_written_by_the_models_template():
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    language = transformers_language(of_transformers(chat_template=template), ends=[5])
    written = language.decode(language.encode_chat(CHAT))
    assert written == "[system]Be brief.[user]Hello[assistant]Yes?[user]Bye[assistant]"
    assert language.ends == {0, 5} and language.chat_stops == ()
    # A special token is no text.
    assert language.decode([*language.encode("ab"), 0]) == "ab"


def test_a_template_that_refuses_is_the_callers_mistake_and_none_is_a_transcript():
    refusing = of_transformers(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="template refuses it: roles must alternate"):
        transformers_language(refusing).encode_chat(CHAT)
    language = transformers_language(of_transformers())
    assert language.decode(language.encode_chat(CHAT)) == transcript(CHAT)
    assert language.chat_stops == ("\n\nUser:",)
