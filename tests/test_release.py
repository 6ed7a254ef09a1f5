"""What would be released can be installed and used by someone who has nothing else."""

import contextlib
import io
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import release_check
import ssmax
import ssmax_lab
from ssmax.cli import doctor
from ssmax.hf.hook import NEWEST, OLDEST

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere():
    version = release_check.version()
    assert ssmax.__version__ == ssmax_lab.__version__ == version
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_versions_of_the_docs_are_those_of_the_packages():
    """The oldest are what is asked for, and what was tested is what doctor knows."""
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    told = {name.lower(): (oldest, newest) for name, oldest, newest in rows}
    tested = {**doctor.TESTED, "transformers": (OLDEST, NEWEST)}
    assert told == {
        name: tuple(".".join(map(str, numbers)) for numbers in ends)
        for name, ends in tested.items()
    }
    for folder in ("library", "lab"):
        text = (ROOT / folder / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        assert project["requires-python"] == f">={told['python'][0]}"
        assert f"Programming Language :: Python :: {told['python'][1]}" in project["classifiers"]
    library = (ROOT / "library" / "pyproject.toml").read_text()
    installed = (ROOT / "constraints.txt").read_text()
    for name in ("torch", "triton", "transformers"):
        assert f'"{name}>={told[name][0]}' in library
    for name in ("torch", "transformers"):
        assert f"\n{name}=={told[name][1]}." in installed


def test_the_six_lines_of_the_librarys_page_run():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(release_check.code_of_the_readme(), {})
    assert printed.getvalue().count("\n") == 3


def test_a_wheel_with_more_than_the_package_is_refused(tmp_path):
    wheel = tmp_path / "ssmax-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("ssmax/ops/scale.py", "")
        archive.writestr("ssmax/py.typed", "")
        archive.writestr("ssmax-0.dist-info/RECORD", "")
    release_check.check_contents(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/test_x.py", "")
    with pytest.raises(SystemExit, match=r"tests/test_x\.py"):
        release_check.check_contents(wheel)
    wheel.write_bytes(bytes(release_check.LARGEST))
    with pytest.raises(SystemExit, match="bytes"):
        release_check.check_contents(wheel)


def test_a_tag_of_another_version_is_refused():
    command = [sys.executable, str(ROOT / "tools" / "release_check.py"), "--tag", "v99.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "v99.0" in done.stderr


@pytest.mark.slow
def test_the_wheels_work_in_an_environment_of_their_own(tmp_path):
    release_check.check(tmp_path, tmp_path / "dist")
