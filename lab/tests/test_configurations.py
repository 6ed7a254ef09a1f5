"""One row for each configuration is all that the study knows of it."""

from pathlib import Path

import pytest

import ssmax_lab
from ssmax.nn.rules import RULES
from ssmax_lab.configurations import (
    CONFIGURATIONS,
    CONTROL,
    MEASURED,
    PROBE,
    called,
    look,
)
from ssmax_lab.study.presets import PRESETS


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_row_names_what_there_is(name):
    one = CONFIGURATIONS[name]
    assert one.rule in RULES
    assert set(one.seeds) <= set(PRESETS)
    assert {*one.loses_less_than, *one.loses_more_than} <= set(CONFIGURATIONS)
    # What is not pretrained is made of what is.
    assert one.is_pretrained or CONFIGURATIONS[one.base].is_pretrained
    assert one.is_pretrained == (one.applied in ("training", "last steps"))


def test_the_papers_are_its_six_letters():
    assert [name for name, one in CONFIGURATIONS.items() if one.is_papers] == list("abcdef")


def test_every_control_is_compared_and_drawn():
    controls = set(MEASURED) - set("abcdef") - {CONTROL}
    for name in controls:
        one = CONFIGURATIONS[name]
        assert one.loses_less_than or one.loses_more_than
        assert called(name) != f"({name})"
    assert len({look(name).colour for name in MEASURED}) == len(MEASURED)
    assert PROBE not in MEASURED


def test_no_other_file_names_a_control():
    # Words of their own besides: two rules whose s begins otherwise, and a kind of s.
    controls = set(MEASURED) - set("abcdef") - {CONTROL, "sqrt_log", "constant"}
    home = Path(ssmax_lab.__file__).parent
    for room in ("analysis", "eval", "report", "study"):
        # The figures of docs/results.md are of configurations that are chosen.
        for path in set((home / room).glob("*.py")) - {home / "report/results_figures.py"}:
            text = path.read_text()
            assert not [name for name in controls if f'"{name}"' in text], path
