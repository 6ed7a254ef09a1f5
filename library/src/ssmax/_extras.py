"""Packages that only some rooms need, asked for where they are used."""

import importlib
from types import ModuleType

from ssmax.errors import MissingExtraError


def require(module: str, *, install: str, purpose: str) -> ModuleType:
    """Import a module, or raise an error that says which requirement brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{purpose} needs the package {module!r}, which is not installed; {how_to(install)}"
        ) from missing


def how_to(install: str) -> str:
    """Make the command that installs a requirement, as ssmax[hf] or ssmax-lab."""
    return f"pip install '{install}', or `make install` in a checkout"
