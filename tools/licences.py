"""The site's page on what the packages depend on, and under which licences.

Read from the metadata of what is installed.
"""

import importlib.metadata as metadata
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = """# Licences

`ssmax` and `ssmax-lab` are under the Apache License 2.0. They copy no code of others; what they
need is installed beside them. Here is what each requires, with the licence that the package itself
states. The four addresses to the Congress that `ssmax-lab` carries as a text are
works of the United States Government, in the public domain.

| required by | package | licence |
|---|---|---|
"""


def licence(package: str) -> str:
    """As the metadata states it: an SPDX expression, else a classifier, else the first line."""
    about = metadata.metadata(package)
    if expression := about.get("License-Expression"):
        return expression
    classifiers = [
        line.rsplit(" :: ", 1)[1]
        for line in about.get_all("Classifier") or []
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    stated = (about.get("License") or "").strip().split("\n")[0]
    return ", ".join(classifiers) or stated or "not stated"


def page() -> str:
    """Write one row for every package that a pyproject.toml names."""
    groups: dict[str, list[str]] = {}
    for folder in ("library", "lab"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        groups[project["name"]] = project["dependencies"]
        for extra, requirements in project["optional-dependencies"].items():
            groups[f"{project['name']}[{extra}]"] = requirements
    groups |= tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    rows = []
    for owner, requirements in groups.items():
        for requirement in requirements:
            if isinstance(requirement, dict):  # a group within a group
                continue
            name = re.match(r"[\w-]+", requirement)[0]
            if name != "ssmax":
                rows.append(f"| {owner} | {name} | {licence(name)} |")
    return HEAD + "\n".join(rows) + "\n"
