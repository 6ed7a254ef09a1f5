"""One device for all tests: the GPU where there is one, else the CPU with Triton's interpreter."""

import os
import re
import subprocess
import sys

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read by Triton when the kernels are defined, so it is set before anything imports them.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis  # noqa: E402 (Triton's variable comes first)
import pytest  # noqa: E402 (likewise)

hypothesis.settings.register_profile("ci", max_examples=2_000, deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "deep", parent=hypothesis.settings.get_profile("ci"), max_examples=50_000
)
hypothesis.settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run, with the reason."""
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def on_ranks():
    """Runs a script on so many processes of one machine, a thread each."""

    def run(number, script, *arguments):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={number}", str(script), *map(str, arguments),
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def is_same_drawing():
    """Compares drawings as SVG but for two pixels, by which fonts and processors differ."""

    def compare(one: str, other: str) -> bool:
        number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
        words = [re.sub(number, "", text) for text in (one, other)]
        found, expected = (list(map(float, re.findall(number, text))) for text in (one, other))
        return words[0] == words[1] and found == pytest.approx(expected, abs=2, rel=1e-3)

    return compare


@pytest.fixture
def device() -> str:
    """Name the device that tests of kernels run on."""
    return "cuda" if HAS_GPU else "cpu"
