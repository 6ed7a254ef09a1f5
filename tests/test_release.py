"""What would be released can be installed and used by someone who has nothing else."""

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


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path):
    release_check.check(tmp_path)
