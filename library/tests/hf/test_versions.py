"""The oldest and the newest Transformers that work; others are refused with those that do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from tiny_models import build

import ssmax.hf
from ssmax.hf.hook import NEWEST, OLDEST

ROOT = Path(__file__).parents[3]
# What the oldest needs besides, where it must not be as new as what is installed.
NEEDS = [
    f"transformers=={OLDEST[0]}.{OLDEST[1]}.*",
    "huggingface_hub<2",
    "tokenizers<=0.23.0",
    "httpx<1",
    "httpcore<2",
]
CORE = [
    f"library/tests/hf/{name}.py" for name in ("test_conversion", "test_saving", "test_remote_code")
]


@pytest.fixture(scope="module")
def oldest():
    """A folder with the oldest Transformers, made once."""
    folder = ROOT / ".venv" / "oldest-transformers"
    if not (folder / "transformers").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", str(folder), *NEEDS], capture_output=True, text=True
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1]
            pytest.skip(f"the oldest Transformers cannot be had here: {last}")
    return folder


@pytest.mark.slow
def test_the_oldest_transformers_passes_the_core_of_these_tests(oldest):
    paths = [str(oldest), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    version = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    told = subprocess.run(version, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert told.stdout.startswith(f"{OLDEST[0]}.{OLDEST[1]}."), told.stderr
    # T5 had attention code of its own then, and models did not run on the meta device; a process
    # without the package takes too long twice.
    left_out = "not t5 and not without_the_package and not stays_on_the_device_of_its_query"
    pytest_ = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-k", left_out]
    done = subprocess.run(
        [*pytest_, *CORE], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_installed_transformers_is_one_that_was_tested():
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert OLDEST <= version <= NEWEST


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.0.0rc1", "5.0.0.dev0"])
def test_an_older_one_is_refused_with_those_that_work(version, monkeypatch):
    model = build("llama")
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ValueError, match=rf"Transformers {version} .*5\.1 or later"):
        ssmax.hf.convert(model)


def test_one_that_lost_the_place_is_refused_however_new(monkeypatch):
    model = build("llama")
    monkeypatch.setattr("transformers.__version__", "9.0rc1")
    monkeypatch.delattr("transformers.AttentionInterface.get_interface")
    with pytest.raises(ValueError, match=r"Transformers 9.0rc1 .*tested to 5\.\d+"):
        ssmax.hf.convert(model)
