"""Text as its tokens come: whole characters, and in all what the whole decodes to."""

import pytest

from ssmax_lab.data.tokenizer import IncrementalDetokenizer, load_tokenizer


def pieces_of(decode, tokens):
    text = IncrementalDetokenizer(decode)
    return [*(text.add(token) for token in tokens), text.finish()]


@pytest.mark.parametrize("name", ["bytes", "small"])
@pytest.mark.parametrize("text", ["plain words", "Zürich, 東京 \N{ROCKET}!", "\n\n  x\ty  \n"])
def test_pieces_are_the_text_and_never_half_a_character(name, text):
    tokenizer = load_tokenizer(name)
    pieces = pieces_of(tokenizer.decode, tokenizer.encode(text))
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert sum(map(bool, pieces)) > 1


def test_bytes_that_are_no_text_come_out_as_the_whole_decodes():
    tokens = [104, 0xFF, 0xE2, 0x82, 105, 0xF0, 0x9F]
    decode = load_tokenizer("bytes").decode
    assert "".join(pieces_of(decode, tokens)) == decode(tokens)


def test_a_tokenizer_that_drops_the_first_space_keeps_the_others():
    words = ["▁Hello", "▁small", "▁world", "!"]

    def decode(tokens):
        return "".join(words[t] for t in tokens).replace("▁", " ").removeprefix(" ")

    assert pieces_of(decode, [0, 1, 2, 3]) == ["Hello", " small", " world", "!", ""]
