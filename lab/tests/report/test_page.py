"""The page holds every number without JavaScript, and in a real browser every plot answers."""

import os
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from ssmax_lab.analysis.figure_inputs import softmax_output_of_last
from ssmax_lab.configurations import MEASURED
from ssmax_lab.report import figures
from ssmax_lab.report.page import MISSING, explorer_page, page, write_page
from ssmax_lab.report.page_tables import MAX_ROWS, number, thin
from ssmax_lab.report.payload import looks
from ssmax_lab.report.style import as_svg

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NAMES = list(MEASURED)
ANSWERS = ("whole number", "first digit", "wrong")


def smooth(rng, start, end, size, noise=0.01):
    return (np.geomspace(start, end, size) + noise * rng.standard_normal(size)).round(4).tolist()


def made_up_fits(n):
    shapes = {"log n": np.log(n), "n^0.12": n**0.12, "sqrt n": np.sqrt(n), "n": n}
    return [
        {"name": name, "a1": 0.2, "a2": 0.5, "r2": 0.99 - 0.1 * i,
         "curve": (0.5 + 0.9 * shape / shape[-1]).tolist()}
        for i, (name, shape) in enumerate(shapes.items())
    ]  # fmt: skip


def made_up_claim(i, verdict, rng):
    comparisons = [
        {"text": f"loss of ({name}) less that of (a), over the last tenth", "unit": "nats",
         "effect": effect, "low": effect - 0.06, "high": effect + 0.05, "verdict": verdict,
         "basis": "3 seeds, p = 0.012"}
        for name, effect in zip("bcd", rng.normal(-0.1, 0.08, 3).round(3).tolist(), strict=True)
    ]  # fmt: skip
    if verdict == "not measured":
        nothing = dict.fromkeys(("effect", "low", "high", "unit"))
        comparisons = [nothing | {"text": "no such run", "basis": "", "verdict": verdict}]
    texts = {
        1: "Softmax's largest output falls to 0 with n; SSMax's stays near 1.",
        4: "SSMax trains to a lower loss than softmax throughout; with a bias lowest.",
    }
    text = texts.get(i, f"What figure {i} shows holds for the models of this study too.")
    return {
        "id": f"C{i}",
        "figure": i,
        "text": text,
        "verdict": verdict,
        "comparisons": comparisons,
    }


def made_up():
    """A payload of seven configurations with all there can be in it; plausible, not measured."""
    rng = np.random.default_rng(0)
    rank = {name: i for i, name in enumerate(NAMES)}
    n = np.arange(1, 129)
    steps, positions = list(range(10, 2001, 10)), list(range(1, 1281, 5))
    lengths, depths = [64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280], np.linspace(0, 1, 11)
    verdicts = [
        "supported", "too few seeds", "supported", "no difference larger than 0.005",
        "contradicted", "inconclusive", "model too small", "not measured",
    ]  # fmt: skip

    def shares(scale):
        reach = np.clip(1.1 - np.asarray(lengths) / scale, 0, 1) * np.ones((11, 1))
        return (np.clip(reach + 0.1 * rng.standard_normal(reach.shape), 0, 1) * 20).round() / 20

    maps = {}
    for name in NAMES:
        whole = shares(300 + 150 * (len(NAMES) - rank[name]) * (name != "a"))
        first = np.clip(whole + 0.2, 0, 1)
        maps[name] = {"lengths": lengths, "depths": depths.tolist(), "whole": whole.tolist(),
                      "first": first.tolist(), "trials": 20}  # fmt: skip
    trials = {
        name: {
            "y": sorted((rng.beta(2, 1 + rank[name], 100)).round(4).tolist(), reverse=True),
            "answers": [ANSWERS[min(2, i // 35)] for i in range(100)],
        }
        for name in NAMES
    }
    heads = {
        name: {"y": smooth(rng, 0.9 / (1 + rank[name]), 0.01, 25, 0), "answer": ANSWERS[i % 3]}
        for i, name in enumerate(NAMES)
    }
    scales = {
        name: {"s": rng.normal(start, 0.06, (4, 4)).round(4).tolist(), "start": start,
               "b": rng.normal(0, 0.3, (4, 4)).round(4).tolist() if name == "d" else None}
        for name, start in (("b", 0.2515), ("d", 0.2515), ("f", 0.2515), ("temperature", 1.0))
    }  # fmt: skip
    keys = [2**i for i in range(11)]
    sharpness = {
        name: {
            "n": keys,
            "largest": [k ** (-0.1 * (1 + rank[name])) for k in keys],
            "entropy": [0.12 * (1 + rank[name]) * float(np.log(k)) for k in keys],
            "heads": {
                "n": [128, 1024],
                "largest": rng.uniform(0.05, 0.95, (2, 4, 4)).round(4).tolist(),
                "entropy": rng.uniform(0.5, 4.5, (2, 4, 4)).round(4).tolist(),
            },
        }
        for name in NAMES
    }
    tables = {
        f"seed {seed}": (0.5 + 0.19 * np.log(n) + 0.02 * rng.standard_normal(128)).tolist()
        for seed in range(2)
    }
    training = {
        name: {"x": steps, "y": smooth(rng, 7, 2.8 + 0.05 * rank[name], 200)} for name in NAMES
    }
    test = {
        name: {"x": positions, "y": smooth(rng, 5, 2.6 + 0.2 * rank[name], 256)} for name in NAMES
    }
    higher = {
        name: {"x": positions, "y": [y + 1 for y in curve["y"]]} for name, curve in test.items()
    }

    def less(curves):
        of_a = np.asarray(curves["a"]["y"])
        found = {
            name: {"x": curve["x"], "y": (np.asarray(curve["y"]) - of_a).round(4).tolist()}
            for name, curve in curves.items()
        }
        return {"curves": found, "note": "means over the runs that share seed with a run of (a)"}

    provenance = [
        {
            "what": f"position loss, {name}, seed 0",
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "config_hash": "89abcdef0123",
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "device": "cpu",
            "seed": 0,
            "date": "2026-11-15",
        }
        for name in NAMES
    ]
    caption = "What the paper shows in its figure {}: where to look, and what was found there."
    return {
        "title": "Scalable-Softmax, measured again",
        "preset": "quick",
        "train_length": 128,
        "looks": looks(MEASURED),
        "claims": [made_up_claim(i, verdict, rng) for i, verdict in enumerate(verdicts, 1)],
        "figures": {
            "2": {"tables": tables, "fits": dict.fromkeys(tables, made_up_fits(n))},
            "4": {"curves": training, "less": less(training)},
            "5": {
                "curves": test,
                "less": less(test),
                "theta": 500_000,
                "rope_limit": 300,
                "same_theta": {"curves": higher, "less": less(higher), "theta": 10_000},
            },
            "6": {"maps": maps},
            "7": {"heads": heads, "length": 256},
            "8": {"trials": trials, "length": 256},
        },
        "captions": {str(i): caption.format(i) for i in range(1, 9)},
        "static": {"1": as_svg(figures.figure1([10, 100, 1000]))},
        "scales": scales,
        "sharpness": sharpness,
        "provenance": provenance,
        "commands": ["make reproduce", "make study PRESET=quick"],
        "choices": ["Greedy decoding.", "Long public-domain prose as the haystack."],
    }


class Tags(HTMLParser):
    """What a page opens, what it loads, and whether every tag is closed in order."""

    VOID = frozenset(("meta", "link", "input", "br", "img", "path", "circle"))

    def __init__(self, text):
        super().__init__()
        self.open, self.crossed, self.seen, self.loads = [], [], [], []
        self.text = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag != "a":
            self.loads += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag):
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
            self.crossed.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


PAYLOAD = made_up()


def test_every_tag_is_closed_and_nothing_is_loaded():
    tags = Tags(page(PAYLOAD))
    assert not tags.open and not tags.crossed
    assert all(address.startswith("data:") for address in tags.loads)
    ids = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_text_has_every_claim_and_every_figure_has_its_table():
    tags = Tags(page(PAYLOAD))
    text = "".join(tags.text)
    for claim in PAYLOAD["claims"]:
        assert claim["text"] in text and claim["verdict"] in text
        for comparison in claim["comparisons"]:
            assert comparison["text"] in text and comparison["basis"] in text
    effect = PAYLOAD["claims"][3]["comparisons"][0]
    assert number(effect["effect"], 3).replace("&minus;", "\u2212") + " nats" in text
    assert text.count("Data") == 11  # eight figures, s, sharpness and sharpness by head
    assert number(PAYLOAD["figures"]["4"]["curves"]["a"]["y"][0]) in text
    assert MISSING not in text


@pytest.mark.parametrize("size", [1, 29, 30, 31, 20_000])
def test_thinned_rows_are_few_and_keep_both_ends(size):
    kept = thin(range(1, size + 1))
    assert len(kept) == min(size, MAX_ROWS) == len(set(kept))
    assert kept[0] == 1 and kept[-1] == size


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!--<script>", "<b>&"])
def test_a_text_cannot_break_out(text):
    claim = PAYLOAD["claims"][0] | {"text": text}
    hostile = PAYLOAD | {"title": text, "claims": [claim], "choices": [text], "commands": [text]}
    tags = Tags(page(hostile))
    assert [tag for tag, _ in tags.seen].count("script") == 2
    assert not tags.open and not tags.crossed
    assert "".join(tags.text).count(text) >= 3


def bare():
    kept = ("title", "preset", "train_length", "looks", "claims")
    return {key: PAYLOAD[key] for key in kept}


def test_what_is_missing_says_so():
    text = "".join(Tags(page(bare())).text)
    for key in "245678":
        assert f"Figure {key}: {MISSING}." in text
    assert text.count(f"{MISSING}.") == 8  # six figures, s and sharpness


def test_the_same_payload_gives_the_same_bytes(tmp_path):
    write_page(made_up(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page(made_up())
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    # Chromium's sandbox refuses to run as root, which containers do.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(PAYLOAD, path)
    return path.as_uri()


@pytest.fixture
def visit(browser, address):
    """Opens the page; at the end nothing else was asked for and nothing was complained about."""
    opened, complaints, requests = [], [], []

    def go(url=address, *, width=1280, height=900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        opened.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(url)
        if options.get("java_script_enabled", True):
            # Figures are drawn when their size is known, a frame later than the page is there.
            tab.evaluate(
                "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
        return tab

    yield go
    for context in opened:
        context.close()
    assert complaints == []
    assert all(url.startswith(("file:", "data:")) for url in requests)
    assert len({url for url in requests if url.startswith("file:")}) == 1


def ticks(tab, figure, axis):
    return tab.locator(f"#{figure} .{axis}-tick").all_text_contents()


def line(tab, figure, name):
    return tab.locator(f'{figure} [data-series="{name}"] .line').first.get_attribute("d")


def slide(tab, name, value):
    slider = tab.locator(f"#explorer-{name}")
    slider.evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }",
        str(value),
    )


def drag(tab, figure, start, end):
    tab.locator(f"#{figure}").scroll_into_view_if_needed()
    box = tab.locator(f"#{figure} .canvas svg").first.bounding_box()
    y = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + start * box["width"], y)
    tab.mouse.down()
    tab.mouse.move(box["x"] + end * box["width"], y, steps=4)
    tab.mouse.up()


def test_every_figure_is_drawn(visit):
    tab = visit()
    for key in "145":
        assert tab.locator(f"#figure-{key} .series .line").count() == (
            2 if key == "1" else len(NAMES)
        )
    assert tab.locator("#figure-2 .series .shape").count() == 128
    assert tab.locator("#figure-3 .series .line").count() == 8
    assert tab.locator("#figure-6 .cell").count() == 110
    assert tab.locator("#figure-7 .series .shape").count() == len(NAMES) * 25
    assert tab.locator("#figure-8 .series .shape").count() == len(NAMES) * 100
    assert tab.locator("#scales .cell").count() == 16
    assert tab.locator("#sharpness .series .line").count() == 2 * (len(NAMES) + 1)
    assert tab.locator("#sharpness .cell").count() == 16
    drawn = tab.evaluate(
        "[...document.querySelectorAll('path.line')].map((p) => p.getAttribute('d'))"
    )
    assert all(path and "NaN" not in path for path in drawn)


SETTINGS = [
    (1000, 0.43, 0, 3),
    (2, 0.5, 0, 0.5),
    (10, 0, 0, 5),
    (100_000, 2, -1.5, 20),
    (100, 0.1, -2, 4),
]


# The slider's places are a list of n; this finds the one of a given n.
SLIDE_TO_N = """(text) => {
  const slider = document.getElementById("explorer-n");
  const shown = document.getElementById("explorer-n-value");
  for (let place = 0; place <= Number(slider.max); place += 1) {
    slider.value = place;
    slider.dispatchEvent(new Event("input"));
    if (shown.textContent === text) break;
  }
}"""


@pytest.mark.parametrize(("n", "s", "b", "z_max"), SETTINGS)
def test_the_explorer_says_what_numpy_says(visit, n, s, b, z_max):
    tab = visit()
    before = line(tab, "#explorer", "ssmax")
    tab.evaluate(SLIDE_TO_N, f"{n:,}")
    for name, value in (("s", s), ("b", b), ("z", z_max)):
        slide(tab, name, value)
    assert tab.locator("#explorer-n-value").text_content() == f"{n:,}"
    factors = {"softmax": 1.0, "ssmax": s * np.log(n) + b}
    inputs = {
        "explorer": np.append(np.full(n - 1, -2.0), z_max),
        "explorer3": np.append(np.linspace(0, 1, n - 1), z_max),
    }
    for room, z in inputs.items():
        for name, factor in factors.items():
            shown = tab.locator(f"#{room}-{name}").text_content()
            assert shown == f"{softmax_output_of_last(z, factor):.4f}", (room, name)
    moved = line(tab, "#explorer", "ssmax") != before
    assert moved == ((s, b, z_max) != (0.43, 0, 3))
    # The paper's bounds hold without a bias only.
    assert tab.locator('#explorer [data-series="lower"]').count() == (2 if b == 0 else 0)
    assert ("hidden" in tab.locator("#explorer-note").text_content()) == (b != 0)


def test_the_critical_gap_is_marked_at_one_plus_one_over_s(visit):
    tab = visit()
    slide(tab, "s", 0.5)
    marks = tab.locator("#explorer3-plot .marks")
    assert "1 + 1/s = 3" in marks.text_content()
    slide(tab, "s", 0)
    assert "1/s" not in marks.text_content()


def heights(path):
    return np.array([float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)])


def test_the_curve_lies_between_the_bounds(visit):
    tab = visit()
    lower, upper, ssmax = (
        heights(line(tab, "#explorer3-plot", name)) for name in ("lower", "upper", "ssmax")
    )
    ssmax = ssmax[-len(lower) :]  # the bounds begin where z_max is the largest entry
    # Down the screen; a tenth of a pixel is what the path is rounded to.
    assert (lower >= ssmax - 0.11).all() and (ssmax >= upper - 0.11).all()
    assert (lower - upper).max() > 10


def test_a_slider_is_moved_by_the_keyboard(visit):
    tab = visit()
    tab.locator("#explorer-s").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#explorer-s-value").text_content() == "0.44"
    tab.locator("#explorer-n").focus()
    tab.keyboard.press("End")
    assert tab.locator("#explorer-n-value").text_content() == "1,000,000"
    tab.keyboard.press("Home")
    assert tab.locator("#explorer-n-value").text_content() == "2"
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#explorer-n-value").text_content() == "3"


def press(tab, figure, name):
    tab.locator(f"#{figure} .switch button", has_text=re.compile(f"^{re.escape(name)}$")).click()


@pytest.mark.parametrize("figure", ["figure-4", "figure-5"])
def test_a_loss_can_be_shown_less_that_of_softmax(visit, figure):
    tab = visit()
    before = line(tab, f"#{figure}", "b")
    press(tab, figure, "less (a)")
    # (a) less itself is a line at 0, and (b) another curve than before.
    assert np.ptp(heights(line(tab, f"#{figure}", "a"))) == 0.0
    assert line(tab, f"#{figure}", "b") != before
    assert "less (a)'s" in tab.locator(f"#{figure} .canvas").text_content()
    assert "that share seed" in tab.locator(f"#{figure} .controls").text_content()
    press(tab, figure, "linear" if figure == "figure-4" else "as it is")
    assert line(tab, f"#{figure}", "b") == before
    assert "that share seed" not in tab.locator(f"#{figure} .controls").text_content()


def test_figure_5_has_both_thetas_where_both_were_measured(visit, tmp_path):
    tab = visit()
    before = ticks(tab, "figure-5", "y")
    marks = tab.locator("#figure-5 .marks")
    assert marks.text_content() == "training lengthRoPE limit"
    press(tab, "figure-5", "10,000")
    assert ticks(tab, "figure-5", "y") != before
    assert marks.text_content() == "training length"
    press(tab, "figure-5", "less (a)")
    assert "less (a)'s" in tab.locator("#figure-5 .canvas").text_content()
    press(tab, "figure-5", "500,000")
    assert np.ptp(heights(line(tab, "#figure-5", "a"))) == 0.0


def test_what_cannot_be_compared_is_not_in_the_view_and_is_named_there(visit, tmp_path):
    left = made_up()
    for found in (left["figures"]["4"]["less"], left["figures"]["5"]["less"]):
        del found["curves"]["c"]
        found["note"] += "; left out, as none of theirs does: (c)"
    write_page(left, tmp_path / "report.html")
    tab = visit((tmp_path / "report.html").as_uri())
    for figure in ("figure-4", "figure-5"):
        assert tab.locator(f'#{figure} [data-series="c"]').count() == 1
        press(tab, figure, "less (a)")
        assert tab.locator(f'#{figure} [data-series="c"]').count() == 0
        assert tab.locator(f'#{figure} .legend [data-name="c"]').count() == 0
        assert "left out, as none of theirs does: (c)" in tab.locator(f"#{figure}").text_content()


def test_every_plot_counts_what_it_draws(visit, tmp_path):
    counted = made_up()
    drawn = counted["figures"]
    drawn["4"]["curves"]["b"]["label"] = "(b) of 5"
    drawn["4"]["less"]["curves"]["b"]["label"] = "(b) of 4"
    for key, kind in (("6", "maps"), ("7", "heads"), ("8", "trials")):
        drawn[key][kind]["b"]["label"] = f"(b) of {key}"
    drawn["6"]["maps"]["b"]["trials"] = 80
    counted["scales"]["b"]["label"] = "(b), seed 3"
    counted["sharpness"]["b"]["label"] = "(b) of 2"
    counted["sharpness"]["b"]["heads"]["label"] = "(b), seed 4"
    write_page(counted, tmp_path / "report.html")
    tab = visit((tmp_path / "report.html").as_uri())

    def legend(place):
        return tab.locator(f'{place} .legend [data-name="b"]').first.text_content()

    assert legend("#figure-4") == "(b) of 5"
    press(tab, "figure-4", "less (a)")
    assert legend("#figure-4") == "(b) of 4"
    assert legend("#figure-7").startswith("(b) of 7: ")
    assert legend("#figure-8") == "(b) of 8"
    assert legend("#sharpness") == "(b) of 2"
    assert "20 trials a cell" in tab.locator("#figure-6 .controls").text_content()
    chosen = tab.locator('#figure-6 .thumbs [data-name="b"]')
    chosen.click()
    assert "(b) of 6" in chosen.text_content()
    assert "80 trials a cell" in tab.locator("#figure-6 .controls").text_content()
    assert tab.locator("#scales .summary").text_content().startswith("s of (b), seed 3: ")
    assert tab.locator("#scales .switch button").first.text_content() == "(b), seed 3: s"
    tab.locator('#sharpness .thumbs [data-name="b"]').click()
    assert tab.locator("#sharpness .summary").text_content().startswith("(b), seed 4: ")
    text = tab.locator("main").text_content()
    assert "(b) of 6: whole number / first digit, %; 80 trials a cell" in text


def test_without_softmax_nothing_is_shown_less_it(visit, tmp_path):
    left = made_up()
    for found in (left["figures"]["4"], left["figures"]["5"], left["figures"]["5"]["same_theta"]):
        del found["curves"]["a"], found["less"]
    write_page(left, tmp_path / "report.html")
    tab = visit((tmp_path / "report.html").as_uri())
    for figure in ("figure-4", "figure-5"):
        assert "less (a)" not in tab.locator(f"#{figure} .controls").text_content()


def test_a_legend_hides_and_shows(visit):
    tab = visit()
    button = tab.locator('#figure-4 .legend [data-name="b"]')
    curve = tab.locator('#figure-4 [data-series="b"]')
    button.click()
    assert button.get_attribute("aria-pressed") == "false" and curve.count() == 0
    button.click()
    assert button.get_attribute("aria-pressed") == "true" and curve.count() == 1


def test_a_legend_is_reached_by_tab_and_pressed_by_space(visit):
    tab = visit()
    tab.locator('#figure-4 .legend [data-name="a"]').focus()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.dataset.name") == "b"
    tab.keyboard.press("Space")
    assert tab.locator('#figure-4 [data-series="b"]').count() == 0
    assert tab.evaluate("document.activeElement.dataset.name") == "b"


@pytest.mark.parametrize("way_back", ["button", "double click", "escape"])
def test_zoom_changes_the_axis_and_goes_back(visit, way_back):
    tab = visit()
    reset = tab.locator("#figure-5 .reset")
    whole = ticks(tab, "figure-5", "x"), ticks(tab, "figure-5", "y")
    assert reset.is_disabled()
    drag(tab, "figure-5", 0.3, 0.6)
    zoomed = [float(text.replace(",", "")) for text in ticks(tab, "figure-5", "x")]
    assert min(zoomed) > 250 and max(zoomed) < 900
    assert ticks(tab, "figure-5", "y") != whole[1]
    if way_back == "button":
        reset.click()
    elif way_back == "double click":
        tab.locator("#figure-5 .canvas svg").dblclick()
    else:
        tab.keyboard.press("Escape")
    assert (ticks(tab, "figure-5", "x"), ticks(tab, "figure-5", "y")) == whole


def test_a_plot_is_read_by_pointer_and_by_arrow_keys(visit):
    tab = visit()
    plot, tip = tab.locator("#figure-4 .canvas svg"), tab.locator("#figure-4 .tip")
    plot.hover()
    assert all(look["label"] in tip.text_content() for look in PAYLOAD["looks"].values())
    tab.mouse.move(0, 0)
    assert tip.text_content() == ""
    plot.focus()
    tab.keyboard.press("Home")
    first = PAYLOAD["figures"]["4"]["curves"]["b"]
    assert f"step {first['x'][0]}" in tip.text_content()
    assert f"{first['y'][0]:.4g}" in tip.text_content()
    tab.keyboard.press("ArrowRight")
    assert f"step {first['x'][1]}" in tip.text_content()


def test_a_tap_is_still_read_when_the_finger_is_gone(visit):
    tab = visit(width=360, has_touch=True)
    for figure, word in (("figure-4", "step"), ("figure-6", "context")):
        plot = tab.locator(f"#{figure} .canvas svg")
        plot.tap()
        assert word in tab.locator(f"#{figure} .tip").text_content()


def test_figure_4_has_a_logarithmic_axis(visit):
    tab = visit()
    before = line(tab, "#figure-4", "a")
    tab.locator("#figure-4 .switch button", has_text="log").click()
    assert line(tab, "#figure-4", "a") != before


def cells(tab, figure):
    return tab.locator(f"#{figure} .value").all_text_contents()


def test_the_needle_map_switches(visit):
    tab = visit()
    maps = PAYLOAD["figures"]["6"]["maps"]

    def expected(name, key):
        return [f"{100 * share:.0f}" for row in maps[name][key] for share in row]

    assert cells(tab, "figure-6") == expected("a", "whole")
    tab.locator('#figure-6 .thumbs [data-name="b"]').click()
    assert cells(tab, "figure-6") == expected("b", "whole")
    tab.locator("#figure-6 .switch button", has_text="first digit").click()
    assert cells(tab, "figure-6") == expected("b", "first")
    colours = tab.locator("#figure-6 .cell").evaluate_all(
        "(nodes) => new Set(nodes.map((node) => getComputedStyle(node).fill)).size"
    )
    assert colours > 5
    tab.locator("#figure-6 .canvas svg").focus()
    tab.keyboard.press("ArrowRight")
    tip = tab.locator("#figure-6 .tip").text_content()
    assert "context 64, depth 0 %" in tip
    assert all(look["label"] in tip for look in PAYLOAD["looks"].values())


def test_the_learned_scales_switch(visit):
    tab = visit()
    buttons = tab.locator("#scales .switch button")
    assert buttons.count() == 5  # s of four configurations, b of one
    buttons.nth(2).click()
    expected = [
        f"{v:.2f}".replace("-", "\u2212") for row in PAYLOAD["scales"]["d"]["b"] for v in row
    ]
    assert cells(tab, "scales") == expected
    assert "start 0" in tab.locator("#scales .ramp").text_content()


def test_sharpness_is_shown_of_every_head(visit):
    tab = visit()
    tab.locator("#sharpness .thumbs button").nth(1).click()
    name = NAMES[1]
    before, after = np.asarray(PAYLOAD["sharpness"][name]["heads"]["largest"])
    factors = after / before
    assert cells(tab, "sharpness") == [f"{v:.2f}" for v in factors.ravel()]
    told = tab.locator("#sharpness .summary").text_content()
    assert told.startswith(f"{PAYLOAD['looks'][name]['label']}: {(factors < 1).sum()} of 16 heads")
    assert f"{(factors < 0.5).sum()} below half" in told
    tab.locator("#sharpness .switch button").nth(1).click()
    before, after = np.asarray(PAYLOAD["sharpness"][name]["heads"]["entropy"])
    gains = after - before
    assert cells(tab, "sharpness") == [f"{v:.1f}".replace("-", "\u2212") for v in gains.ravel()]
    told = tab.locator("#sharpness .summary").text_content()
    assert f"{np.log(8):.2f} where attention is spread evenly" in told
    tab.locator("#sharpness .canvas svg[role=application]").last.press("ArrowDown")
    tip = tab.locator("#sharpness .tip").last.text_content()
    assert "layer 1, head 1" in tip
    assert "n = 1,024" in tip


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_screen(visit, width):
    tab = visit(width=width)
    tab.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def background(tab):
    return tab.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_is_dark_and_the_button_turns_it(visit):
    light, dark = visit(color_scheme="light"), visit(color_scheme="dark")
    assert background(light) == "rgb(255, 255, 255)"
    assert background(dark) == "rgb(18, 20, 23)"
    stroke = (
        """getComputedStyle(document.querySelector('#figure-4 [data-series="a"] .line')).stroke"""
    )
    assert light.evaluate(stroke) != dark.evaluate(stroke)
    light.locator("#theme").click()
    assert background(light) == background(dark)
    assert light.evaluate(stroke) == dark.evaluate(stroke)
    light.locator("#theme").click()
    assert background(light) == "rgb(255, 255, 255)"


def test_without_javascript_tables_and_drawings_are_there(visit):
    tab = visit(java_script_enabled=False)
    claim = tab.locator("#claim-C4")
    assert claim.locator("summary").is_visible()
    claim.locator("summary").click()
    assert claim.locator("table").is_visible()
    tab.locator("#figure-4 .data summary").click()
    as_it_is, less = tab.locator("#figure-4 .data table").all()
    assert as_it_is.is_visible() and less.is_visible()
    image = tab.locator("#figure-1 img")
    assert image.is_visible() and image.bounding_box()["height"] > 100
    assert not tab.locator(".explorer").is_visible()


def test_a_page_with_nothing_measured_works(visit, tmp_path):
    write_page(bare(), tmp_path / "bare.html")
    tab = visit((tmp_path / "bare.html").as_uri())
    assert tab.locator("#figure-1 .series .line").count() == 2
    assert tab.locator("#figure-5 .missing").is_visible()
    assert tab.locator("#explorer-ssmax").text_content() != ""


def test_the_explorer_works_alone(visit, tmp_path):
    (tmp_path / "explorer.html").write_text(explorer_page())
    tab = visit((tmp_path / "explorer.html").as_uri())
    before = tab.locator("#explorer-ssmax").text_content()
    slide(tab, "s", 0.05)
    assert tab.locator("#explorer-ssmax").text_content() != before
