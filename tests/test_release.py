"""What would be released can be installed and used by someone who has nothing else."""

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest

import release_check
import ssmax

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ssmax.__version__ == version
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_versions_of_the_docs_are_those_of_the_package():
    """The oldest are what the package asks for, the newest what `make` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = json.dumps([project["dependencies"], project["optional-dependencies"]])
    names = ("torch", "triton", "transformers")
    least = {name: re.search(rf'"{name}>=([\d.]+)', asked)[1] for name in names}
    newest = {name: ".".join(importlib.metadata.version(name).split(".")[:2]) for name in names}
    least["python"] = project["requires-python"].removeprefix(">=")
    page = (ROOT / "docs" / "quickstart.md").read_text().split("## What it was tested with")[1]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert {name.lower(): oldest for name, oldest, _ in rows} == least
    assert {name.lower(): last for name, _, last in rows if name != "Python"} == newest
    (python,) = (last for name, _, last in rows if name == "Python")
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path):
    release_check.check(tmp_path)
