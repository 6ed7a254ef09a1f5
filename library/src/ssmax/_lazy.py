"""Load the names of a package on first use."""

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

_NAME = re.compile(r"^ +from (\S+) import (\w+) as \2$", re.MULTILINE)


def door(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__all__`, `__getattr__` and `__dir__` of a package.

    Its names are those that its file imports for type checkers, `from HOME import NAME as NAME`, so
    that they are told once. A name whose home is the package itself is a module.
    """
    source = sys.modules[package].__loader__.get_source(package)  # pyright: ignore
    home_of = {name: home for home, name in _NAME.findall(source)}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        if home == package:
            value = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *home_of})

    return sorted(home_of), load, names
