"""Packages that only some rooms need, asked for where they are used."""

import importlib
from types import ModuleType

from ssmax.errors import MissingExtraError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """The module, or an error that names the extra and the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{purpose} needs the package {module!r}, which is not installed; it comes with the "
            f"extra {extra!r}: {how_to_install(extra)}"
        ) from missing


def how_to_install(extra: str) -> str:
    """The command for an extra, of a release and of a checkout."""
    return f"pip install 'ssmax[{extra}]', or '.[{extra}]' in a checkout"
