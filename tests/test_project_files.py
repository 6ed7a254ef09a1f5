"""What other services read has the shape that they publish; no network, no service is asked."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.stem != "config")
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))


def read(path):
    return yaml.safe_load(path.read_text())


def check(schema, path):
    return CliRunner().invoke(
        check_jsonschema,
        ["--builtin-schema", f"vendor.{schema}", "--force-filetype", "yaml", str(path)],
    )


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        *(("github-workflows", path) for path in WORKFLOWS),
        *(("github-issue-forms", path) for path in FORMS),
        ("github-issue-config", GITHUB / "ISSUE_TEMPLATE" / "config.yml"),
        ("dependabot", GITHUB / "dependabot.yml"),
        ("citation-file-format", ROOT / "CITATION.cff"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_a_file_has_the_shape_of_its_schema(schema, path, tmp_path):
    checked = check(schema, path)
    assert checked.exit_code == 0, checked.output
    # The schema can fail: a key that it does not know.
    broken = tmp_path / path.name
    broken.write_text(path.read_text() + "\nno-such-key: 1\n")
    assert check(schema, broken).exit_code == 1


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_the_doctor(path):
    asked = [field["attributes"].get("label", "") for field in read(path)["body"]]
    assert any("ssmax doctor" in label for label in asked)


def test_ci_runs_the_pythons_that_the_packages_name_and_the_oldest_that_they_take():
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    named = [
        project["classifiers"]
        for project in (
            tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
            for folder in ("library", "lab")
        )
    ]
    for job in ("test", "library"):
        for classifiers in named:
            pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
            assert jobs[job]["strategy"]["matrix"]["python"] == pythons
    (oldest,) = jobs["library"]["strategy"]["matrix"]["include"]
    library = (ROOT / "library" / "pyproject.toml").read_text()
    for name in ("torch", "triton", "transformers"):
        (least,) = re.findall(rf'"{name}>=([\d.]+)', library)
        assert f"{name}=={least}.*" in oldest["packages"]


def test_only_the_step_that_publishes_may_speak_for_the_project():
    for path in WORKFLOWS:
        assert "secrets." not in path.read_text()
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            expected = {"id-token": "write"} if name == "publish" else None
            assert job.get("permissions") == expected, (path.name, name)


def test_a_commit_is_formatted_by_the_ruff_that_checks_it():
    (hooks,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert f"ruff=={hooks['rev'].removeprefix('v')}" in (ROOT / "constraints.txt").read_text()
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]
