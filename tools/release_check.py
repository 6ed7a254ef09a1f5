"""Is it ready to be released? make release-check: minutes, most of them for torch.

Builds the sdist and, out of it, the wheel; installs the wheel into an environment of its own, first
bare, then with the command line; and tries both from an empty folder, as a newcomer would.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What torch alone has to be enough for.
BARE = """
import torch
from ssmax import SSMaxScale, initial_s, ssmax, ssmax_attention
from ssmax_lab.model import LM, LMConfig

z = torch.full((1000,), -2.0)
z[-1] = 3.0
assert ssmax(z, s=0.43).max() > 0.99 > z.softmax(-1).max()
q, k, v = (torch.randn(1, 4, 32, 16) for _ in range(3))
s = torch.full((4,), initial_s(32), requires_grad=True)
ssmax_attention(q, k, v, s, is_causal=True).sum().backward()
assert s.grad.isfinite().all()
sizes = dict(num_layers=1, num_heads=2, hidden_size=16, intermediate_size=16, vocab_size=9)
model = LM(LMConfig(**sizes, rule="ssmax"))
assert len(model.eval().generate([[1, 2]], max_new_tokens=3)[0]) == 3
"""


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


def check(folder: Path) -> None:
    """Build, install, try; raises SystemExit with what went wrong."""
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    home = folder / "home"
    home.mkdir()

    def install(*what: str | Path) -> None:
        pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
        run(*pip, *what, cwd=folder)

    install(wheel)
    assert run(python, "-W", "error", "-c", "import ssmax", cwd=home) == ""
    run(python, "-c", BARE, cwd=home)
    print(f"{wheel.name}: with torch alone, right")

    install(f"{wheel}[lab]")
    ssmax = folder / "venv" / "bin" / "ssmax"
    said = run(ssmax, "generate", "tiny-b", "def __init__(self", "--max-new-tokens", "8", cwd=home)
    assert said.startswith("def __init__(self"), said
    said = run(
        ssmax, "evaluate", "needle", "tiny-b-qa", "--digits", "4", "--length", "64",
        "--depths", "3", "--trials", "5", cwd=home,
    )  # fmt: skip
    assert "whole number" in said, said
    print(f"{wheel.name}: with the command line, right\n{said.splitlines()[-2]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        check(Path(scratch))
