"""Find the engines that run models of others: each in a Python of its own, asked as a process."""

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssmax.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """How an engine is found and what installs it."""

    modules: tuple[str, ...]
    """What its Python has to be able to import."""
    command: str
    """What it puts on PATH, beside its Python; "" where that is nothing."""
    install: str


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(modules=("vllm",), command="vllm", install="pip install vllm"),
    "transformers": Engine(
        modules=("transformers",), command="transformers", install="pip install transformers"
    ),
    "mlx-lm": Engine(modules=("mlx_lm",), command="mlx_lm.generate", install="pip install mlx-lm"),
    "llama.cpp": Engine(modules=("llama_cpp",), command="", install="pip install llama-cpp-python"),
}


def python_of(engine: Engine) -> str | None:
    """Find the Python that runs an engine: this one, or the one beside its command on PATH."""
    if all(importlib.util.find_spec(module) is not None for module in engine.modules):
        return sys.executable
    command = shutil.which(engine.command) if engine.command else None
    # Not resolved: the python of an environment is a link out of it.
    beside = Path(command).parent / "python" if command else None
    return str(beside) if beside is not None and beside.is_file() else None


def parse(text: str, known: Sequence[str]) -> tuple[str, str | None]:
    """Split NAME or NAME=PYTHON; raise on another name, and on a Python that is not there."""
    name, given, python = text.partition("=")
    if name not in known:
        raise UsageError(f"an engine must be one of {', '.join(known)}, got {name!r}")
    if not given:
        return name, None
    found = shutil.which(python)
    if found is None:
        raise UsageError(f"the Python of {name} cannot be run: {python!r}; give its path")
    return name, found
