"""Who cannot see the pictures of docs/counting.md reads the same n."""

import re
from pathlib import Path

import pytest

import pictures
from ssmax import visible_keys

PAGE = Path(__file__).parent.parent.parent / "docs" / "counting.md"


@pytest.mark.parametrize("name", pictures.CASES)
def test_a_picture_is_told_in_words(name):
    (words,) = re.findall(rf"!\[(.*)\]\(pictures/{name}\.svg\)", PAGE.read_text())
    told = [int(n) for n in words.partition(": n = ")[2].split(", ")]
    assert told == visible_keys(**{"is_causal": False, **pictures.CASES[name]}).flatten().tolist()
