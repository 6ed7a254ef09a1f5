"""The embedded corpus: Python's own modules, the same at every reading."""

import platform
import re
import sysconfig
from pathlib import Path

import pytest

from ssmax_lab.data.sources import embedded_documents, embedded_part, embedded_version


@pytest.fixture(scope="module")
def documents():
    return list(embedded_documents())


def test_it_is_large_enough_to_train_on_and_sorted(documents):
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert len(names) == len(set(names))
    assert {"argparse.py", "asyncio/base_events.py", "json/decoder.py"} < set(names)
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert all(document.text.strip() for document in documents)


def test_tests_other_peoples_packages_and_the_machine_are_left_out(documents):
    names = " ".join(document.name for document in documents)
    for unwanted in ("test/", "tests/", "site-packages", "_sysconfigdata", "config-", "idle_test"):
        assert not re.search(rf"(^|[ /]){unwanted}", names), unwanted


def test_indentation_is_tabs_and_nothing_else_has_changed(documents):
    by_name = {document.name: document.text for document in documents}
    for name in ("argparse.py", "textwrap.py"):
        text = by_name[name]
        original = Path(sysconfig.get_path("stdlib"), name).read_text(encoding="utf-8")
        unfolded = re.sub(r"^\t+", lambda tabs: "    " * len(tabs[0]), text, flags=re.MULTILINE)
        assert unfolded == original
        assert not re.search(r"^\t* {4}", text, flags=re.MULTILINE)
        assert re.search(r"^\t\tdef|^\tdef", text, flags=re.MULTILINE)


def test_the_version_names_python_and_the_text(documents, monkeypatch, tmp_path):
    version = embedded_version()
    assert version.startswith(platform.python_version() + "-")
    assert version == embedded_version()
    part = embedded_part()
    assert version in part.name
    assert list(part.read()) == documents
    (tmp_path / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert embedded_version() != version


def test_a_python_without_sources_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(
        ValueError, match="without the sources of its standard library.*text of your own"
    ):
        list(embedded_documents())
