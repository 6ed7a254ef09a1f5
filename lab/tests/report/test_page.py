"""The page holds every number without JavaScript, and in a real browser every figure answers."""

import os
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from ssmax_lab.analysis.findings import Findings, Replica
from ssmax_lab.analysis.formulas import softmax_output_of_last
from ssmax_lab.analysis.statistics import SECONDARY
from ssmax_lab.configurations import MEASURED, look
from ssmax_lab.records import (
    Comparison,
    NeedleScore,
    NeedleTrial,
    PositionLoss,
    Provenance,
    Sharpness,
)
from ssmax_lab.report.figures import study_figures
from ssmax_lab.report.page import explorer_page
from ssmax_lab.report.study_page import draw, study_page
from ssmax_lab.report.style import as_svg, dark
from ssmax_lab.study.presets import quick

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NAMES = list(MEASURED)[:8]
HERE = Provenance(
    commit="0123456789ab", config_hash="89abcdef0123", versions={"python": "3.11.7"}, device="cpu",
    seed=0, date="2026-11-15",
)  # fmt: skip
VERDICTS = (
    "supported", "too few seeds", "supported", "no difference larger than 0.005", "contradicted",
    "inconclusive", "model too small", "not measured",
)  # fmt: skip


def comparison(claim, verdict, text="loss of (b) less that of (a)"):
    return Comparison(
        claim=claim, text=text, effect=-0.1234, unit="nats", low=-0.2, high=-0.05, p_holm=None,
        basis="3 seeds", verdict=verdict, is_ours=False, provenance=HERE,
    )  # fmt: skip


def made_up():
    """Findings of eight configurations with all there can be in them; plausible, not measured."""
    rng = np.random.default_rng(0)
    found = Findings(study=quick().to_dict(), commands=["ssmax-lab reproduce --preset quick"])
    steps = list(range(10, 2001, 10))
    keys = [2**power for power in range(11)]
    zero, one = Replica(0), Replica(1)
    found.tables = {
        seed: (0.5 + 0.19 * np.log(np.arange(1, 65)) + 0.01 * rng.standard_normal(64)).tolist()
        for seed in (zero, one)
    }
    for rank, name in enumerate(NAMES):
        for seed in (zero, one):
            shift = 0.1 * rank + 0.02 * seed.seed
            curve = (np.geomspace(7, 3, 200) + shift).tolist()
            found.curves.setdefault(name, {})[seed] = steps, curve
            losses = PositionLoss(
                run=name, mean=(np.geomspace(5, 3, 512) + shift).tolist(), count=4, edges=[0],
                binned=[], provenance=HERE,
            )  # fmt: skip
            found.position_losses.setdefault(name, {})[seed] = losses
            found.same_theta_losses.setdefault(name, {})[seed] = losses
            weights = [[[k ** (-0.05 * (1 + rank + head)) for k in keys] for head in range(4)]] * 3
            found.sharpness.setdefault(name, {})[seed] = Sharpness(
                run=name, num_keys=keys, largest=weights, count=4, provenance=HERE,
                entropy=[[[0.1 * (1 + rank) * float(np.log(k)) for k in keys]] * 4] * 3,
            )  # fmt: skip
            found.scales.setdefault(name, {})[seed] = {
                f"blocks.{layer}.ssmax.s": rng.uniform(0.1, 0.4, 4).tolist() for layer in range(3)
            }
            found.trials.setdefault(name, {})[seed] = [
                NeedleTrial(
                    run=name, length=length, depth=depth, trial=trial, city="Oslo",
                    number="1234", said="", is_whole=trial < 8 - rank, first_digit=trial < 9 - rank,
                    digits_right=0, provenance=HERE,
                )
                for length in (32, 64, 128, 512)
                for depth in (0.0, 0.5, 1.0)
                for trial in range(10)
            ]  # fmt: skip
            for home in (found.scores, found.papers_needle):
                home.setdefault(name, {})[seed] = [
                    NeedleScore(
                        run=name, length=256, depth=0.5, trial=trial, number="1234", said="",
                        is_whole=trial < 4, first_digit=trial < 6, provenance=HERE,
                        number_scores=rng.beta(2, 1 + rank, (3, 4)).tolist(),
                    )
                    for trial in range(10)
                ]  # fmt: skip
    found.comparisons = [
        comparison(f"C{place}", verdict) for place, verdict in enumerate(VERDICTS, 1)
    ] + [comparison("C5", SECONDARY, "<b>another</b> loss")]
    found.provenances = [("loss, a, seed 0", HERE)]
    return found


@pytest.fixture(scope="module")
def found():
    return made_up()


@pytest.fixture(scope="module")
def figures(found):
    return study_figures(found)


@pytest.fixture(scope="module")
def text(found, figures):
    return study_page(found, figures, {name: as_svg(one) for name, one in figures.items()})


class Tags(HTMLParser):
    """What a page opens, what it loads, and whether every tag is closed in order."""

    VOID = frozenset(("meta", "link", "input", "br", "img"))

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


def test_every_tag_is_closed_and_nothing_is_loaded(text):
    tags = Tags(text)
    assert not tags.open and not tags.crossed
    assert tags.loads and all(address.startswith("data:") for address in tags.loads)
    ids = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    leads = [attributes["href"][1:] for tag, attributes in tags.seen if tag == "a"]
    assert {one for one in leads if not one.startswith("ttps:")} <= set(ids)
    assert len(text) < 3_000_000


def test_the_text_has_every_claim_every_message_and_every_table(text, found, figures):
    told = "".join(Tags(text).text)
    for one in found.comparisons:
        assert one.text in told and one.verdict in told
    assert "-0.123 [-0.200, -0.050] nats" in told
    for figure in figures.values():
        assert figure.title in told
    assert told.count("Data") == len(figures) == 11
    assert "Not measured" not in told


def test_a_first_run_is_shown_first_beside_the_recorded_studies(text, found, figures):
    order = [text.index(f'id="{name}"') for name in ("shows", "verdicts", "figures")]
    assert order == sorted(order)
    assert "What larger models show" in text and "162 million parameters" in text
    other = Findings(study={**found.study, "preset": "gpu"})
    assert "What larger models show" not in study_page(other, {}, {})


@pytest.mark.parametrize("words", ["</script><script>alert(1)</script>", "<!--<script>", "<b>&"])
def test_a_text_cannot_break_out(words, found):
    hostile = Findings(study=found.study, commands=[words], provenances=[(words, HERE)])
    hostile.comparisons = [comparison("C1", "supported", words)]
    hostile.curves = {"a": {Replica(0, words): ([1, 2], [1.0, 2.0])}}
    hostile.scales = {"b": {Replica(0, words): {"x.s": [1.0]}}}
    tags = Tags(study_page(hostile, (drawn := study_figures(hostile)), dict.fromkeys(drawn, "")))
    assert [tag for tag, _ in tags.seen].count("script") == 2
    assert not tags.open and not tags.crossed
    assert "".join(tags.text).count(words) >= 3


def test_what_is_missing_says_so(found):
    told = "".join(Tags(study_page(Findings(study=found.study), {}, {})).text)
    assert told.count("Not measured in this study") == 16  # eight figures and eight claims


def test_the_same_records_give_the_same_page(text, figures):
    drawings = {name: as_svg(one) for name, one in figures.items()}
    assert study_page(made_up(), study_figures(made_up()), drawings) == text


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(tmp_path):
    pages = [draw(made_up(), tmp_path / folder).read_bytes() for folder in ("one", "other")]
    assert pages[0] == pages[1]
    drawn = {path.suffix for path in (tmp_path / "one" / "figures").iterdir()}
    assert drawn == {".svg", ".png"}


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
def address(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text)
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
        return tab

    yield go
    for context in opened:
        context.close()
    assert complaints == []
    assert all(url.startswith(("file:", "data:")) for url in requests)
    assert len({url.partition("#")[0] for url in requests if url.startswith("file:")}) == 1


def drawing(tab, figure):
    """The drawing of a figure, once it is there."""
    tab.locator(f"#{figure} .plot").first.scroll_into_view_if_needed()
    tab.locator(f"#{figure} .plot[data-drawn]").first.wait_for()
    # Its neighbours are drawn meanwhile, and may move it.
    tab.wait_for_timeout(400)
    tab.locator(f"#{figure} .plot").first.scroll_into_view_if_needed()
    return tab.locator(f"#{figure} .plot svg").first


def strokes(tab, figure):
    """The colours of the curves that are drawn."""
    paths = tab.locator(f"#{figure} .mark-line.role-mark path").all()
    return {path.get_attribute("stroke") for path in paths if path.get_attribute("d")}


def settle(tab):
    tab.wait_for_timeout(150)


def words(tab, figure):
    return tab.locator(f"#{figure} svg").first.text_content()


def test_every_figure_is_drawn(visit, figures):
    tab = visit()
    ids = tab.evaluate("[...document.querySelectorAll('.plot')].map((p) => p.closest('figure').id)")
    for name in dict.fromkeys(ids):
        drawing(tab, name)
    assert len(set(ids)) == len(figures) + 1  # and the explorer
    paths = tab.evaluate(
        "[...document.querySelectorAll('.mark-line path')].map((p) => p.getAttribute('d'))"
    )
    assert len(paths) > 30 and not any("NaN" in (path or "") for path in paths)
    shown = {look(name).colour for name in ("a", "b", "temperature")}
    assert strokes(tab, "figure-4") == strokes(tab, "figure-5") == shown
    assert tab.locator("#figure-6 .mark-rect.role-mark path").count() == 3 * 12


def test_a_curve_is_shown_on_request_and_hidden_again(visit):
    tab = visit()
    drawing(tab, "figure-4")
    for label, name, is_there in (("(c) SSMax, no s", "c", True), ("(b) SSMax", "b", False)):
        tab.locator("#figure-4").get_by_role("checkbox", name=label).click()
        settle(tab)
        assert (look(name).colour in strokes(tab, "figure-4")) == is_there
        assert (label in words(tab, "figure-4")) == is_there


def test_a_curve_is_toggled_by_keys(visit):
    tab = visit()
    drawing(tab, "figure-4")
    tab.locator("#figure-4").get_by_role("checkbox", name="(a) softmax").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Space")
    settle(tab)
    assert look("b").colour not in strokes(tab, "figure-4")


@pytest.mark.parametrize("figure", ["figure-4", "figure-5"])
def test_a_loss_opens_as_a_difference_and_can_be_shown_as_it_is(visit, figure):
    tab = visit()
    drawing(tab, figure)
    assert "loss less (a)'s, nats" in words(tab, figure)
    less = ticks(tab, figure)
    tab.locator(f"#{figure}").get_by_role("radio", name="loss, nats", exact=True).click()
    settle(tab)
    assert "loss less (a)'s" not in words(tab, figure)
    assert less != ticks(tab, figure)


def ticks(tab, figure):
    return set(tab.locator(f"#{figure} .role-axis-label text").all_text_contents())


def test_values_are_read_by_pointer_and_by_keys(visit):
    tab = visit()
    plot = drawing(tab, "figure-4")
    box = plot.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    settle(tab)
    tip = tab.locator("#vg-tooltip-element")
    told = tip.text_content()
    assert "step" in told and all(label in told for label in ("(a) softmax", "(b) SSMax"))
    assert re.search(r"\(b\) SSMax:?\s*\+0\.1", told)
    assert look("c").label not in told
    tab.mouse.move(2, 2)
    plot.focus()
    tab.keyboard.press("ArrowRight")
    settle(tab)
    first = tip.text_content()
    for _ in range(4):
        tab.keyboard.press("ArrowRight")
    settle(tab)
    assert "step" in first and first != tip.text_content()


@pytest.mark.parametrize("way", ["wheel", "keys"])
def test_zoom_changes_the_axis_and_goes_back(visit, way):
    tab = visit()
    plot = drawing(tab, "figure-4")
    whole = ticks(tab, "figure-4")
    box = plot.bounding_box()
    if way == "wheel":
        tab.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
        tab.keyboard.down("Control")
        tab.mouse.wheel(0, -400)
        tab.keyboard.up("Control")
    else:
        plot.focus()
        for _ in range(3):
            tab.keyboard.press("+")
    settle(tab)
    assert ticks(tab, "figure-4") != whole
    assert "(b) SSMax" in words(tab, "figure-4")  # labels stay in view
    if way == "wheel":
        tab.mouse.dblclick(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    else:
        tab.keyboard.press("Escape")
    settle(tab)
    assert ticks(tab, "figure-4") == whole


def test_the_wheel_alone_scrolls_the_page(visit):
    tab = visit()
    box = drawing(tab, "figure-4").bounding_box()
    whole, before = ticks(tab, "figure-4"), tab.evaluate("scrollY")
    tab.mouse.move(box["x"] + 100, box["y"] + 100)
    tab.mouse.wheel(0, 300)
    tab.wait_for_timeout(400)
    assert tab.evaluate("scrollY") > before and ticks(tab, "figure-4") == whole


def test_maps_hold_numbers_tell_more_and_have_others_on_request(visit, figures):
    tab = visit()
    drawing(tab, "figure-6")
    shown = tab.locator("#figure-6 .plot").first.locator(".mark-text.role-mark text")
    expected = [row["text"] for panel in figures["6"].panels[:3] for row in panel.rows]
    assert shown.all_text_contents() == expected
    tab.locator("#figure-6 .plot").first.locator(".mark-text.role-mark text").first.hover()
    settle(tab)
    told = tab.locator("#vg-tooltip-element").text_content()
    assert "first digit" in told and "trials" in told
    tab.locator("#figure-6 details.more summary").click()
    tab.locator("#figure-6 .more .plot[data-drawn]").wait_for()
    rest = tab.locator("#figure-6 .more .mark-rect.role-mark path").count()
    assert rest == 12 * (len(NAMES) - 3)


SETTINGS = [(3.0, 0.43, 0, 5), (0.5, 0.5, 0, 0.5), (1.0, 0, 0, 5), (5.0, 2, -1.5, 20)]


@pytest.mark.parametrize(("power", "s", "b", "lead"), SETTINGS)
def test_the_explorer_says_what_numpy_says(visit, power, s, b, lead):
    tab = visit()
    drawing(tab, "figure-explorer")
    for name, value in (("power", power), ("s", s), ("b", b), ("lead", lead)):
        tab.locator(f"#figure-explorer input[name={name}]").evaluate(
            "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }",
            str(value),
        )
    settle(tab)
    n = max(2, round(10**power))
    told = words(tab, "figure-explorer")
    assert f"n = {n:,}" in told
    for name, factor in {"softmax": 1.0, "SSMax": s * np.log(n) + b}.items():
        (shown,) = re.findall(rf"{name} (\d\.\d{{4}})", told)
        expected = softmax_output_of_last(np.append(np.zeros(n - 1), lead), factor)
        assert float(shown) == pytest.approx(expected, abs=6e-5), name
    assert (f"1/s = {1 / s:.3g}" in told) if s else ("1/s" not in told)


def test_a_slider_is_moved_by_keys(visit):
    tab = visit()
    drawing(tab, "figure-explorer")
    before = words(tab, "figure-explorer")
    slider = tab.locator("#figure-explorer input[name=power]")
    slider.focus()
    tab.keyboard.press("End")
    settle(tab)
    assert "n = 1,000,000" in words(tab, "figure-explorer") != before


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_screen(visit, width):
    tab = visit(width=width)
    for name in ("figure1_in_heads", "figure-5", "figure-6", "figure-explorer"):
        drawing(tab, name)
    tab.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def stroke(tab):
    return tab.evaluate(
        "getComputedStyle(document.querySelector('#figure-4 .mark-line path')).stroke"
    )


def test_dark_is_dark_and_the_button_turns_it(visit):
    light, black = visit(color_scheme="light"), visit(color_scheme="dark")
    for tab in (light, black):
        drawing(tab, "figure-4")

    def ground(tab):
        return tab.evaluate("getComputedStyle(document.body).backgroundColor")

    assert ground(light) == "rgb(255, 255, 255)" and ground(black) == "rgb(20, 23, 27)"
    turned = dark(look("a").colour)
    assert stroke(black) == f"rgb({', '.join(str(int(turned[i : i + 2], 16)) for i in (1, 3, 5))})"
    assert stroke(light) != stroke(black)
    light.locator("#scheme").click()
    assert ground(light) == ground(black) and stroke(light) == stroke(black)


def test_without_javascript_tables_and_drawings_are_there(visit):
    tab = visit(java_script_enabled=False)
    claim = tab.locator("#claim-C4")
    claim.locator("summary").click()
    assert claim.locator("table").is_visible()
    tab.locator("#figure-4 .data summary").click()
    assert tab.locator("#figure-4 .data table").first.is_visible()
    image = tab.locator("#figure-1 img")
    assert image.is_visible() and image.bounding_box()["height"] > 100


def test_the_explorer_works_alone_in_the_scheme_of_its_address(visit, tmp_path):
    (tmp_path / "explorer.html").write_text(explorer_page())
    tab = visit((tmp_path / "explorer.html").as_uri() + "#dark", color_scheme="light")
    drawing(tab, "figure-explorer")
    assert tab.evaluate("document.documentElement.dataset.scheme") == "dark"
    assert "softmax 0.1293" in words(tab, "figure-explorer")
    tab.evaluate("location.hash = 'light'")
    settle(tab)
    assert tab.evaluate("document.documentElement.dataset.scheme") == "light"
