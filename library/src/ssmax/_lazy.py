"""Load the names of a package on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def door(
    package: str, home_of: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package: each name from its module in there.

    A name whose home is "" is a module itself.
    """

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name] or name
        found = importlib.import_module(f"{package}.{home}")
        value = getattr(found, name) if home_of[name] else found
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *home_of})

    return load, names
