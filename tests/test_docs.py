"""The site builds without a warning, and what the pages say of the code is so."""

import ast
import html.parser
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import licences
import pictures
import speed_page
import ssmax
from ssmax.cli.app import app
from ssmax_lab.cli.app import app as lab_app
from ssmax_lab.report.style import as_svg
from ssmax_lab.train.recipes import PRETRAINING

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "library" / "src" / "ssmax", ROOT / "lab" / "src" / "ssmax_lab")
SOURCES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


class Links(html.parser.HTMLParser):
    """What a page loads and what it leads to, and the names that others can lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads, self.leads, self.names = [], [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.names.add(values.get("id"))
        if tag in ("script", "img", "iframe") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.loads.append(values["href"])
        if tag == "a" and "href" in values:
            self.leads.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return {
        page.relative_to(folder).as_posix(): Links(page) for page in folder.rglob("*.html")
    }, folder


def test_every_link_of_the_site_leads_somewhere(site):
    pages, folder = site
    for name, page in pages.items():
        if name == "404.html":
            continue  # served from anywhere, so its links start at the root
        for link in page.leads:
            if re.match(r"https?:|mailto:", link):
                continue
            target, _, part = link.partition("#")
            path = (folder / name).parent / target if target else folder / name
            assert path.exists(), f"{name}: {link}"
            if part and path.suffix == ".html":
                there = pages[path.resolve().relative_to(folder.resolve()).as_posix()]
                assert part in there.names, f"{name}: {link}"


def test_no_page_asks_another_server_for_anything(site):
    pages, folder = site
    for name, page in pages.items():
        for load in page.loads:
            assert not re.match(r"(https?:)?//", load), f"{name}: {load}"
            if name != "404.html" and not load.startswith("data:"):
                assert ((folder / name).parent / load.partition("?")[0]).exists(), f"{name}: {load}"


def test_the_explorer_is_on_the_first_page(site):
    pages, _ = site
    assert "explorer.html" in pages["index.html"].loads
    assert "figure-explorer" in pages["explorer.html"].names


@pytest.mark.parametrize("name", pictures.CASES)
def test_a_picture_is_what_is_computed(name, is_same_drawing):
    drawn = pictures.picture(pictures.CASES[name])
    there = (pictures.FOLDER / f"{name}.svg").read_text()
    assert is_same_drawing(there, drawn), "write it anew: make pictures"


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.md").read_text()
    listed = {line.rsplit(".", 1)[1] for line in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    rooms = {name for name in ssmax.__all__ if inspect.ismodule(getattr(ssmax, name))}
    library = [f"ssmax{room}" for room in ("", ".nn", ".hf", ".export", ".testing")]
    for name in (*library, "ssmax_lab.model"):
        missing = set(importlib.import_module(name).__all__) - listed - rooms
        assert not missing, f"{name}: {missing}"


def spoken() -> str:
    """Every string of the sources, f-strings with their values left out."""
    strings = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                strings.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    return "\n".join(strings)


def test_messages_of_the_troubleshooting_page_are_real():
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## By place")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(messages) > 30
    said = spoken()
    assert [message for message in messages if message not in said] == []


def test_every_message_leads_to_a_line_of_the_troubleshooting_page():
    """By its room, where its words are not quoted; and every verb by its name."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## By place")[1]
    for path in SOURCES:
        raises = any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(path.read_text())))
        (package,) = (package for package in PACKAGES if package in path.parents)
        room = path.relative_to(package).parts[0].removesuffix(".py")
        # What all rooms share passes on the words of others, or is quoted.
        if raises and not room.startswith("_"):
            assert f"`{package.name}.{room}`" in text, path
    for verb in {
        **typer.main.get_command(app).commands,
        **typer.main.get_command(lab_app).commands,
    }:
        assert f"`{verb}`" in text, verb


def test_the_glossary_is_in_order_and_names_every_preset():
    text = (ROOT / "docs" / "glossary.md").read_text()
    words = [word.strip("`= ").lower() for word in re.findall(r"^\| (.+?) \|", text, re.MULTILINE)]
    assert words[1:] == sorted(words[1:])
    (presets,) = re.findall(r"^\| preset \|.*: (.+) \|$", text, re.MULTILINE)
    assert presets.split(", ") == list(PRETRAINING)


def test_every_dependency_has_its_licence():
    text = licences.page()
    assert "| ssmax | torch |" in text
    assert "not stated" not in text


def test_nothing_unpickles_and_no_remote_code_is_trusted():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "marshal", "shelve"} & set(names), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "eval", "exec"), path
                # It unpickles; serve asks before it comes to that.
                assert called != "torch.export.load" or path.name == "sessions.py", path
                for keyword in node.keywords:
                    is_trusted = keyword.arg == "trust_remote_code" and ast.unparse(keyword.value)
                    # Or what was compared with the file that this package writes.
                    assert is_trusted in (False, "False", "job['is_our_code']"), path


def test_import_warns_of_nothing():
    code = (
        "import ssmax.nn, ssmax.ops.attention, ssmax_lab.data, ssmax_lab.eval, ssmax_lab.model, "
        "ssmax_lab.records"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_page_on_speed_quotes_the_records(is_same_drawing):
    text = speed_page.PAGE.read_text()
    assert speed_page.written(text) == text, "write it anew: make speed"
    for table in speed_page.TABLES.values():
        assert text.count("\n".join(table())) == 1
    for name, draw in speed_page.DRAWN.items():
        assert f"](pictures/{name}.svg)" in text
        drawn = (speed_page.PICTURES / f"{name}.svg").read_text()
        assert is_same_drawing(drawn, as_svg(draw())), "draw it anew: make speed"


def test_a_drawing_is_told_from_one_that_is_moved_or_has_other_words(is_same_drawing):
    drawn = '<path d="M 15 20.001" clip-path="url(#clip1)"/><text>b</text>'
    assert is_same_drawing(drawn, drawn.replace("20.001", "20.5"))
    assert not is_same_drawing(drawn, drawn.replace("15", "18"))
    assert not is_same_drawing(drawn, drawn.replace(">b<", ">c<"))
