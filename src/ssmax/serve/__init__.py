"""A trained model in the engines that people already run.

Names are loaded on first use, and with them what they need.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssmax.serve.exporting import export as export

_HOME_OF = {"export": "exporting"}

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ssmax.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ssmax.serve.{_HOME_OF[name]}"), name)
