"""Figures say what the records say, and the same records give the same bytes."""

import subprocess
import sys

import numpy as np
import pytest

from ssmax_lab.analysis.formulas import figure3_input, fit_shapes, softmax_output_of_last
from ssmax_lab.analysis.measures import by_octave
from ssmax_lab.configurations import labels
from ssmax_lab.records import (
    NeedleScore,
    NeedleTrial,
    PositionLoss,
    Provenance,
    RetrievalGrid,
    Sharpness,
)
from ssmax_lab.report import figures
from ssmax_lab.report.explorer import explorer
from ssmax_lab.report.style import as_svg, dark, dark_rules, save
from ssmax_lab.report.tables import MAX_ROWS, thin

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


def loss(level):
    mean = (level + np.linspace(5, 3, 1000)).tolist()
    return PositionLoss(run="r", mean=mean, count=4, edges=[0], binned=[], provenance=HERE)


def sharp(*weights):
    return Sharpness(
        run="r", num_keys=[1, 4, 16, 64], entropy=[[[0.0, 1.0, 2.0, 3.0]] * len(weights)],
        largest=[list(weights)], count=1, provenance=HERE,
    )  # fmt: skip


GRID = [trial(n, d, i, whole=n < 300) for n in (100, 500) for d in (0.0, 1.0) for i in range(2)]
SCORES = [
    score(0, [[0.1, 0.7], [0.2, 0.0]], whole=True),
    score(1, [[0.3, 0.1], [0.0, 0.0]], first=True),
    score(2, [[0.05, 0.0], [0.0, 0.0]]),
]
TABLE = (0.2 * np.log(np.arange(1, 65)) + 1).tolist()
CURVE = (list(range(1, 101)), np.linspace(9, 3, 100).tolist())
LOWER = (CURVE[0], (np.array(CURVE[1]) - 0.5).tolist())
HEADS = {"a": {0: sharp([1.0, 0.6, 0.4, 0.2], [1.0, 0.4, 0.2, 0.1])}}
DRAWN = {
    "figure1": lambda: figures.figure1([10, 100, 1000]),
    "figure2": lambda: figures.figure2({"seed 0": TABLE}),
    "figure3": figures.figure3,
    "figure4": lambda: figures.figure4({"a": {0: CURVE}, "b": {0: LOWER}}),
    "figure5": lambda: figures.figure5(
        {"": {"a": {0: loss(0)}, "b": {0: loss(-1)}}}, train_length=128
    ),
    "figure6": lambda: figures.figure6(dict.fromkeys("abcd", GRID)),
    "figure7": lambda: figures.figure7({"a": SCORES[2:], "b": SCORES}),
    "figure8": lambda: figures.figure8({"b": SCORES}),
    "sharpness": lambda: figures.sharpness(HEADS, train_length=16),
    "retrieval": lambda: figures.retrieval({"a": {0: GRID}}, train_length=128),
    "s": lambda: figures.scales({"b": {0: {"x.s": [0.1], "y.s": [0.3]}}}, train_length=64),
    "explorer": explorer,
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_the_same_records_give_the_same_bytes(name, tmp_path):
    save(DRAWN[name](), tmp_path / "figures", name)
    save(DRAWN[name](), tmp_path / "again", name)
    for suffix, begin in ((".svg", b"<svg"), (".png", b"\x89PNG")):
        drawn = (tmp_path / "figures" / name).with_suffix(suffix).read_bytes()
        assert drawn.startswith(begin) and len(drawn) > 1000
        assert drawn == (tmp_path / "again" / name).with_suffix(suffix).read_bytes()


def points(figure, name, panel=0, **where):
    """A curve's points, of the rows where every field is what is given."""
    rows = figure.panels[panel].rows
    x = next(key for key in rows[0] if key not in ("name", "label", "y", "low", "high", "measure"))
    mine = [row for row in rows if row["name"] == name and where.items() <= row.items()]
    return np.array([[row[x], row["y"]] for row in mine])


def test_figure_1_is_the_papers_input():
    figure = figures.figure1([10, 1000, 100_000])
    softmax, ssmax = points(figure, "a")[:, 1], points(figure, "b")[:, 1]
    sizes = (10, 1000, 100_000)
    assert softmax == pytest.approx([1 / (1 + (n - 1) * np.exp(-5)) for n in sizes], rel=1e-3)
    expected = [1 / (1 + (n - 1) * n ** (-0.43 * 5)) for n in sizes]
    assert ssmax == pytest.approx(expected, rel=1e-3)


def test_figure_3_has_n_entries_and_the_critical_gap():
    assert figure3_input(10, 5.0)[[0, 8, 9]].tolist() == [0.0, 1.0, 5.0]
    assert figure3_input(10, 5.0)[1] == pytest.approx(1 / 8)
    # A lead of more than 1/s over all others wins for any n, one of less than that loses.
    for n, (low, high) in {1000: (0.3, 0.95), 100_000: (0.1, 0.99)}.items():
        factor = 0.43 * np.log(n)
        lead = 1 / 0.43
        assert softmax_output_of_last(figure3_input(n, 0.5 + 0.5 * lead), factor) < low
        assert softmax_output_of_last(figure3_input(n, 1 + 2 * lead), factor) > high


def test_figure_2_shows_every_fit_with_its_share_of_the_variance():
    figure = figures.figure2({"seed 0": TABLE})
    drawn = {row["name"]: row["label"] for row in figure.panels[0].rows}
    assert set(drawn) == {"p", "log n", "n", "sqrt n", "power"}
    assert drawn["log n"] == "log n: R² = 1.000"
    assert drawn["power"].startswith("the best power of n: R² = ")
    assert points(figure, "p")[0, 0] == 2  # a single key's p_1 never learns
    assert points(figure, "log n")[:, 1] == pytest.approx(points(figure, "p")[:, 1], rel=1e-3)
    assert "explains 100 %" in figure.title
    assert any(row[1] == "n^0.02" for row in figure.tables[0].rows)


def test_losses_open_as_differences_from_softmax_of_the_same_seed():
    found = {"a": {0: CURVE, 1: LOWER}, "b": {0: LOWER, 1: LOWER, 2: CURVE}, "c": {5: CURVE}}
    figure = figures.figure4(found)
    assert points(figure, "a", measure=figures.LESS)[:, 1] == pytest.approx(0.0)
    assert points(figure, "b", measure=figures.LESS)[:, 1] == pytest.approx(-0.25)
    assert len(points(figure, "c", measure=figures.LESS)) == 0
    assert len(points(figure, "c", measure=figures.LOSS)) > 0
    assert "(c) shares no seed" in figure.note
    band = next(row for row in figure.panels[0].rows if row["name"] == "b")
    assert (band["low"], band["high"]) == (-0.5, 0.0)
    spec = figure.spec()
    assert next(one for one in spec["params"] if one["name"] == "measure")["value"] == figures.LESS


def test_only_softmax_ssmax_and_the_control_are_shown_at_first():
    found = {name: {0: CURVE} for name in ("a", "b", "c", "d", "temperature", "sqrt_log")}
    params = {
        one["name"]: one["value"]
        for one in figures.figure4(found).spec()["params"]
        if "value" in one
    }
    shown = {name for name, value in params.items() if value is True}
    assert shown == {"show_a", "show_b", "show_temperature"}
    assert params["show_d"] is False  # on request


def test_the_title_is_the_message_of_the_numbers():
    def title(*levels):
        found = {"a": {}, "b": {}}
        for seed, level in enumerate(levels):
            found["a"][seed] = CURVE
            found["b"][seed] = (CURVE[0], (np.array(CURVE[1]) + level).tolist())
        return figures.figure4(found).title

    assert "0.100 nats below softmax's (2 seeds)" in title(-0.1, -0.1)
    assert "0.200 nats above softmax's (1 seed)" in title(0.2)
    assert "seeds differ in sign (2 seeds)" in title(0.1, -0.2)
    assert figures.figure4({"b": {0: CURVE}}).title == "Training loss by step"


def test_losses_are_averaged_within_octaves():
    mean = np.arange(1.0, 1025.0)
    places, losses = by_octave(mean)
    assert places[0] >= 16 and places[-1] <= 1024 and len(places) < 60
    assert losses == pytest.approx(places, rel=0.03)  # at position n the loss is n
    assert losses[-1] * 1.05 > 1024 > losses[-1]


def test_figure_5_marks_the_training_length_and_the_rope_limit():
    losses = {"a": {0: loss(0)}, "b": {0: loss(-1)}}
    figure = figures.figure5(
        {"x 50": losses, "unchanged": losses}, train_length=128, rope_limits={"x 50": 500.0}
    )
    first, second = (str(panel.chart.to_dict()) for panel in figure.panels)
    assert "RoPE limit" in first and "500" in first and "training length" in first
    assert "RoPE limit" not in second and "training length" in second
    assert "1.000 nats below" in figure.title


def test_figure_6_counts_whole_numbers_and_shows_three_maps_at_first():
    grid = [*GRID, trial(500, 1.0, 2, whole=True), trial(500, 1.0, 3, whole=True)]
    figure = figures.figure6({"b": grid, **dict.fromkeys("acd", GRID)})
    assert figure.num_first == 2 and len(figure.panels) == 4
    first = figure.panels[0]
    assert [row["text"] for row in first.rows] == ["100", "0", "100", "50"]
    assert [row["first digit"] for row in first.rows] == ["100 %"] * 4
    assert len(figure.spec()["concat"]) == len(figure.spec(rest=True)["concat"]) == 2


def test_figure_7_ranks_in_each_trial_and_tells_the_usual_answer():
    figure = figures.figure7({"b": [*SCORES, SCORES[2]]})
    assert points(figure, "b")[:, 1] == pytest.approx([1.1 / 4, 0.3 / 4, 0.1 / 4, 0.0])
    assert {row["label"] for row in figure.panels[0].rows} == {"(b) SSMax: wrong"}


def test_figure_8_sorts_trials_and_marks_what_was_said():
    rows = figures.figure8({"b": SCORES}).panels[0].rows
    assert [row["y"] for row in rows] == [0.7, 0.3, 0.05]
    assert [row["answer"] for row in rows] == ["whole number", "first digit", "wrong"]
    assert [row["trials, %"] for row in rows] == pytest.approx([100 / 3, 200 / 3, 100], rel=1e-3)


def test_sharpness_is_a_mean_over_heads_and_runs():
    other = sharp([1.0, 0.1, 0.1, 0.1], [1.0, 0.1, 0.1, 0.1])
    figure = figures.sharpness({"a": {**HEADS["a"], 1: other}}, train_length=16)
    assert points(figure, "a")[:, 1] == pytest.approx([1.0, 0.3, 0.2, 0.125])
    assert "changes by \u221238 % with softmax" in figure.title  # 0.2 to 0.125


def test_retrieval_is_told_beyond_the_training_length():
    figure = figures.retrieval({"a": {0: GRID}, "b": {0: GRID[:4]}}, train_length=128)
    assert points(figure, "a").tolist() == [[100, 1.0], [500, 0.0]]
    assert "softmax finds 0 %" in figure.title


def grid(*accuracy):
    return RetrievalGrid(
        run="r", taught_length=64, base_factors=[1.0, 4.0], lengths=[64, 128, 256], count=9,
        accuracy=[list(accuracy), [1.0, 0.5, 0.5]], provenance=HERE,
        weights=[[[[0.2, 0.7], [0.1, 0.0]]] * 3, [[[0.1]]] * 3],
    )  # fmt: skip


def test_retrieval_taught_in_short_documents_opens_where_it_is_undecided():
    found = {"a": {0: grid(1.0, 0.1, 0.0)}, "b": {0: grid(1.0, 0.9, 0.8), 1: grid(1.0, 0.7, 0.8)}}
    figure = figures.retrieval_grid(found, train_length=128)
    measure = next(one for one in figure.spec()["params"] if one["name"] == "measure")
    assert measure["value"] == "RoPE base x 4"  # (a) finds half there, and 5 % at the other
    at_one = points(figure, "b", measure="RoPE base x 1")
    assert at_one.tolist() == [[64, 1.0], [128, 0.8], [256, 0.8]]
    assert points(figure, "b", panel=1, measure="RoPE base x 1")[:, 1].tolist() == [0.7] * 3
    assert "taught to 64 tokens" in figure.title and "SSMax 50 % (2 seeds)" in figure.title


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


def test_tables_say_how_many_runs_where_configurations_differ_in_it():
    assert labels({"a": 3, "b": 3}) == {"a": "(a) softmax", "b": "(b) SSMax"}
    figure = figures.figure4({"a": {0: CURVE, 1: CURVE}, "b": {0: CURVE}})
    assert figure.tables[-1].header[1:] == ["(a) softmax, 2 runs", "(b) SSMax, 1 run"]


@pytest.mark.parametrize("size", [1, 29, 30, 31, 20_000])
def test_thinned_rows_are_few_and_keep_both_ends(size):
    kept = thin(range(1, size + 1))
    assert len(kept) == min(size, MAX_ROWS) == len(set(kept))
    assert kept[0] == 1 and kept[-1] == size


def test_a_drawing_has_colours_for_a_dark_ground():
    svg = as_svg(figures.figure1([10, 100]))
    assert "prefers-color-scheme: dark" in svg
    assert 'fill="white"' not in svg  # transparent
    rule = f'[stroke="#24292f" i]{{stroke:{dark("#24292f")}}}'
    assert rule in svg

    def brightness(colour):
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    for colour in ("#24292f", "#0072b2", "#556b2f"):
        assert brightness(dark(colour)) > brightness(colour)
    assert brightness(dark("#e5e7eb")) < 300  # a grid stays faint
    assert dark_rules("rgb(1, 2, 3) black") == ""  # maps keep theirs


def test_nothing_on_paper_waits_for_a_pointer():
    svg = as_svg(figures.figure1([10, 100]))
    assert "voronoi" not in svg and svg.count("<line") < 60


def test_drawing_needs_no_torch():
    code = (
        "import sys, ssmax_lab.report.figures as f; f.figure1([10]); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
