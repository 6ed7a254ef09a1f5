"""Figures say what the records say, and the same records give the same bytes."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from ssmax_lab.analysis.figure_inputs import figure3_input, softmax_output_of_last
from ssmax_lab.analysis.fits import fit_shapes
from ssmax_lab.analysis.measures import accuracy_map
from ssmax_lab.configurations import labels, look
from ssmax_lab.records import NeedleScore, NeedleTrial, PositionLoss, Provenance, Sharpness
from ssmax_lab.report import figures
from ssmax_lab.report.style import save

HERE = Provenance(
    commit="test", config_hash="0", versions={}, device="cpu", seed=0, date="2026-11-15"
)


def trial(length, depth, number, *, whole, first=True):
    return NeedleTrial(
        run="r", length=length, depth=depth, trial=number, city="Oslo", number="1234567",
        said="", is_whole=whole, first_digit=first, digits_right=7 * whole, provenance=HERE,
    )  # fmt: skip


def score(number, values, *, whole=False, first=False):
    return NeedleScore(
        run="r", length=100, depth=0.5, trial=number, number="1234567", said="", is_whole=whole,
        first_digit=first, number_scores=values, provenance=HERE,
    )  # fmt: skip


LOSS = PositionLoss(
    run="r",
    mean=list(np.linspace(5, 3, 1000)),
    count=4,
    edges=[0, 128, 1000],
    binned=[],
    provenance=HERE,
)
SHARPNESS = Sharpness(
    run="r",
    num_keys=[1, 4, 16, 64],
    entropy=[[[0.0] * 4] * 2],
    largest=[[[1.0, 0.6, 0.4, 0.2], [1.0, 0.4, 0.2, 0.1]]],
    count=1,
    provenance=HERE,
)
GRID = [trial(n, d, i, whole=n < 300) for n in (100, 500) for d in (0.0, 1.0) for i in range(2)]
SCORES = [
    score(0, [[0.1, 0.7], [0.2, 0.0]], whole=True),
    score(1, [[0.3, 0.1], [0.0, 0.0]], first=True),
    score(2, [[0.05, 0.0], [0.0, 0.0]]),
]
DRAWN = {
    "figure1": lambda: figures.figure1([10, 100, 1000]),
    "figure1_in_heads": lambda: figures.figure1_in_heads({"a": [SHARPNESS]}, train_length=16),
    "figure2": lambda: figures.figure2({"seed 0": (0.2 * np.log(np.arange(1, 65)) + 1).tolist()}),
    "figure3": figures.figure3,
    "figure4": lambda: figures.figure4({n: (range(1, 101), np.linspace(9, 3, 100)) for n in "ab"}),
    "figure5": lambda: figures.figure5({"a": [LOSS], "b": [LOSS]}, train_length=128),
    "figure6": lambda: figures.figure6(dict.fromkeys("abcd", GRID)),
    "figure7": lambda: figures.figure7({"a": SCORES[2:], "b": SCORES}),
    "figure8": lambda: figures.figure8({"b": SCORES}),
    "variants": lambda: figures.variants({"loss": {"no-rotary": {"a": [3.0, 3.2], "b": [2.9]}}}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_same_records_give_the_same_bytes(name, tmp_path):
    save(DRAWN[name](), tmp_path / "figures", name)
    save(DRAWN[name](), tmp_path / "again", name)
    for suffix, begin in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        drawn = (tmp_path / "figures" / name).with_suffix(suffix).read_bytes()
        assert drawn.startswith(begin) and len(drawn) > 1000
        assert drawn == (tmp_path / "again" / name).with_suffix(suffix).read_bytes()


def lines(figure, axis=0):
    return {line.get_label(): line.get_xydata() for line in figure.axes[axis].get_lines()}


def test_figure_1_is_the_papers_input():
    drawn = lines(figures.figure1([10, 1000, 100_000]))
    softmax, ssmax = drawn["softmax"][:, 1], drawn["SSMax, s = 0.43"][:, 1]
    assert softmax == pytest.approx([1 / (1 + (n - 1) * np.exp(-5)) for n in (10, 1000, 100_000)])
    assert ssmax == pytest.approx(
        [1 / (1 + (n - 1) * n ** (-0.43 * 5)) for n in (10, 1000, 100_000)]
    )
    assert softmax[-1] < 0.01 < 0.99 < ssmax[-1]


def test_figure_3_has_n_entries_and_the_critical_gap():
    assert len(figure3_input(10, 5.0)) == 10
    assert figure3_input(10, 5.0)[[0, 8, 9]].tolist() == [0.0, 1.0, 5.0]
    assert figure3_input(10, 5.0)[1] == pytest.approx(1 / 8)
    # A lead of more than 1/s over all others wins for any n, one of less than that loses.
    for n, (low, high) in {1000: (0.3, 0.95), 100_000: (0.1, 0.99)}.items():
        factor = 0.43 * np.log(n)
        lead = 1 / 0.43
        assert softmax_output_of_last(figure3_input(n, 0.5 + 0.5 * lead), factor) < low
        assert softmax_output_of_last(figure3_input(n, 1 + 2 * lead), factor) > high


def test_figure_2_shows_p_n_over_n_and_over_its_logarithm():
    table = (0.2 * np.log(np.arange(1, 65)) + 1).tolist()
    axes = figures.figure2({"seed 0": table}).axes
    assert [axis.get_xscale() for axis in axes] == ["linear", "log"]
    for axis in axes:
        learned, fitted = (line.get_xydata() for line in axis.lines)
        assert learned[:, 0].tolist() == list(range(2, 65))
        assert learned == pytest.approx(fitted)


def test_the_largest_weight_is_a_mean_over_heads_and_runs():
    other = dataclasses.replace(SHARPNESS, largest=[[[1.0, 0.1, 0.1, 0.1], [1.0, 0.1, 0.1, 0.1]]])
    drawn = lines(figures.figure1_in_heads({"a": [SHARPNESS, other]}, train_length=16))[
        "(a) softmax"
    ]
    assert drawn[:, 0].tolist() == SHARPNESS.num_keys
    assert drawn[:, 1] == pytest.approx([1.0, 0.3, 0.2, 0.125])


def test_figure_5_shows_means_over_hundredths():
    drawn = lines(figures.figure5({"b": [LOSS]}, train_length=128))["(b) SSMax"]
    assert len(drawn) == 100
    assert drawn[0] == pytest.approx([5.0, np.mean(LOSS.mean[:10])])


def test_figure_5_marks_the_rope_limit():
    drawn = figures.figure5({"b": [LOSS]}, train_length=128, rope_limit=500.0)
    (axis,) = drawn.axes
    marks = {text.get_text(): text.xy[0] for text in axis.texts}
    assert marks == {"training length": 128, "RoPE limit": 500.0}
    (axis,) = figures.figure5({"b": [LOSS]}, train_length=128).axes
    assert [text.get_text() for text in axis.texts] == ["training length"]


def test_figures_5_and_7_are_means_over_all_runs():
    other = dataclasses.replace(LOSS, mean=[2.0] * 1000)
    drawn = lines(figures.figure5({"b": [LOSS, other]}, train_length=128))["(b) SSMax"]
    assert drawn[-1, 1] == pytest.approx((np.mean(LOSS.mean[-10:]) + 2) / 2)
    # Ranked in each trial, then the mean by rank; the answer is that of most trials.
    drawn = lines(figures.figure7({"b": [*SCORES, SCORES[2]]}))["(b) SSMax: wrong"]
    assert drawn[:, 1] == pytest.approx([1.1 / 4, 0.3 / 4, 0.1 / 4, 0.0])


def test_figure_6_counts_whole_numbers():
    lengths, depths, accuracy = accuracy_map(
        [*GRID, trial(500, 1.0, 2, whole=True), trial(500, 1.0, 3, whole=True)]
    )
    assert (lengths, depths) == ([100, 500], [0.0, 1.0])
    assert accuracy.tolist() == [[1.0, 0.0], [1.0, 0.5]]


def test_figure_6_says_percent_in_every_cell():
    texts = [text.get_text() for text in figures.figure6({"b": GRID}).axes[0].texts]
    assert texts == ["100", "0", "100", "0"]
    with pytest.raises(ValueError, match="at least one configuration"):
        figures.figure6({})


def test_figure_8_sorts_trials_and_marks_what_was_said():
    drawn = figures.figure8({"b": SCORES}).axes[0].get_lines()
    assert drawn[0].get_ydata() == pytest.approx([0.7, 0.3, 0.05])
    marked = {line.get_marker(): list(line.get_xdata()) for line in drawn[1:4]}
    shares = {"o": [100 / 3], "^": [200 / 3], "x": [100]}
    assert {marker: pytest.approx(places) for marker, places in marked.items()} == shares


def test_variants_stand_below_each_other_and_their_configurations_apart():
    figure = figures.variants(
        {
            "loss": {"as it is": {"a": [3.0, 4.0], "b": [2.0]}, "windows": {"b": [2.5]}},
            "found": {"as it is": {"b": [0.5]}, "windows": {}},
        }
    )
    loss, found = figure.axes
    assert [text.get_text() for text in loss.get_yticklabels()] == ["as it is", "windows"]
    dots = {
        (line.get_color(), round(line.get_ydata()[0])): (line.get_xdata()[0], line.get_ydata()[0])
        for line in loss.get_lines()
        if len(line.get_xdata()) == 1
    }
    black, orange = look("a").colour, look("b").colour
    assert {place: x for place, (x, _) in dots.items()} == {
        (black, 0): 3.5, (orange, 0): 2.0, (orange, 1): 2.5,
    }  # fmt: skip
    assert dots[black, 0][1] < dots[orange, 0][1]
    assert loss.get_lines()[0].get_xdata().tolist() == [3.0, 4.0]
    # One legend serves all panels.
    names = [text.get_text() for text in found.get_legend().get_texts()]
    assert names == ["(a) softmax", "(b) SSMax"] and loss.get_legend() is None


def test_a_variant_that_is_far_off_is_written_and_presses_no_other_together():
    near = {f"variant {number}": {"a": [4.0 + 0.05 * number]} for number in range(9)}
    axis = figures.variants({"loss": near | {"no-rotary": {"a": [7.0, 8.0], "b": [17.9]}}}).axes[0]
    assert [text.get_text()[:-2] for text in axis.texts] == ["7.5", "17.9"]
    assert axis.get_xlim()[1] < 5
    dots = [line for line in axis.get_lines() if len(line.get_xdata()) == 1]
    assert len(dots) == 9


def test_the_logarithm_is_told_from_its_rivals():
    n = list(range(1, 1025))
    rng = np.random.default_rng(0)
    for name, values in {
        "log n": np.log(n),
        "n": np.array(n) / 500,
        "sqrt n": np.sqrt(n) / 10,
    }.items():
        fits = fit_shapes(n, values + 0.01 * rng.standard_normal(1024))
        assert fits[0].name in (
            name,
            "n^0.5" if name == "sqrt n" else "n^1" if name == "n" else name,
        )
        (own,) = (fit for fit in fits if fit.name == name)
        assert own.r2 > 0.99
    with pytest.raises(ValueError, match="at least 3 values"):
        fit_shapes([1, 2], [0.0, 1.0])


def test_the_largest_output_does_not_overflow():
    assert softmax_output_of_last(np.array([-1e4, 1e4]), 1.0) == 1.0


def test_legends_say_how_many_runs_where_configurations_differ_in_it():
    assert labels({"a": 3, "b": 3}) == {"a": "(a) softmax", "b": "(b) SSMax"}
    uneven = labels({"a": 3, "b": 1})
    assert uneven == {"a": "(a) softmax, 3 runs", "b": "(b) SSMax, 1 run"}
    drawn = figures.figure5({"b": [LOSS]}, train_length=128, labels=uneven)
    assert "(b) SSMax, 1 run" in lines(drawn)


def test_drawing_needs_no_torch():
    code = (
        "import sys, ssmax_lab.report.figures as f; f.figure1([10]); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
