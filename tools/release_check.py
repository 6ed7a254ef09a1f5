"""Is it ready to be released? make release-check: minutes, most of them for torch.

Builds the sdists of both packages and, out of these, the wheels; installs them into an environment
of its own, first the library bare, then the laboratory; and tries each from an empty folder, as a
newcomer would.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LARGEST = 400_000
"""Bytes of the library's wheel."""

# What torch alone has to be enough for.
BARE = """
import torch
from ssmax import initial_s, ssmax_attention

q, k, v = (torch.randn(1, 4, 32, 16) for _ in range(3))
s = torch.full((4,), initial_s(32), requires_grad=True)
ssmax_attention(q, k, v, s, is_causal=True).sum().backward()
assert s.grad.isfinite().all()
"""


def version() -> str:
    """The version of both packages; raises SystemExit where they differ."""
    library, lab = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in ("library", "lab")
    )
    if library["version"] != lab["version"]:
        raise SystemExit(
            f"ssmax is {library['version']}, ssmax-lab {lab['version']}; they must agree"
        )
    if not any(one.endswith(f"=={library['version']}") for one in lab["dependencies"]):
        raise SystemExit(f"ssmax-lab must require ssmax=={library['version']}")
    return library["version"]


def run(*command: str | Path, cwd: Path) -> str:
    """A step; what it printed, or its end with all that it said."""
    # What this shell can import is no part of a clean environment.
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=outside, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    """Build both into a folder; the wheels of the library and of the laboratory."""
    for folder in ("library", "lab"):
        run(sys.executable, "-m", "build", "--outdir", out, ROOT / folder, cwd=ROOT)
    (library,), (lab,) = (out.glob(f"{name}-{version()}-*.whl") for name in ("ssmax", "ssmax_lab"))
    return library, lab


def check_contents(library: Path) -> None:
    """The library's wheel is small and holds nothing but the package."""
    if library.stat().st_size >= LARGEST:
        raise SystemExit(f"{library.name} has {library.stat().st_size:,} bytes, over {LARGEST:,}")
    names = zipfile.ZipFile(library).namelist()
    package = re.compile(r"ssmax/(.*\.py|py\.typed)|ssmax-[^/]+\.dist-info/.*")
    if strangers := [name for name in names if not package.fullmatch(name)]:
        raise SystemExit(f"{library.name} holds {', '.join(strangers)}")


def check(scratch: Path, out: Path) -> None:
    """Build, install, try; raises SystemExit with what went wrong."""
    library, lab = build(out)
    check_contents(library)
    run(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
    programs, home = scratch / "venv" / "bin", scratch / "home"
    home.mkdir()

    def install(*what: str | Path) -> None:
        pip = [programs / "python", "-m", "pip", "install", "--quiet", "--find-links", out]
        run(*pip, "-c", ROOT / "constraints.txt", *what, cwd=scratch)

    install(library)
    assert run(programs / "python", "-W", "error", "-c", "import ssmax", cwd=home) == ""
    run(programs / "python", "-c", BARE, cwd=home)
    said = run(programs / "python", "-c", code_of_the_readme(), cwd=home)
    assert re.search(r"n = 100000 +softmax 0\.00\d +ssmax 1\.000", said), said
    print(f"{library.name}: with torch alone, right\n{said}")

    install(lab)
    doctor = run(programs / "ssmax", "doctor", cwd=home)
    assert "ssmax-lab" in doctor, doctor
    typed = ["generate", "tiny-b", "def __init__(self", "--max-new-tokens", "8"]
    said = run(programs / "ssmax-lab", *typed, cwd=home)
    assert said.startswith("def __init__(self"), said
    print(f"{lab.name}: with its command line, right\n{said}")


def code_of_the_readme() -> str:
    """The first lines that a reader of the library's page runs."""
    page = (ROOT / "library" / "README.md").read_text()
    return page.split("```python\n")[1].split("```")[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep what was built in this folder")
    parser.add_argument("--tag", help="of the release: v and the version")
    options = parser.parse_args()
    if options.tag not in (None, f"v{version()}"):
        raise SystemExit(f"the tag is {options.tag}, the packages are {version()}")
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder), (options.out or Path(folder) / "dist").resolve())
