"""Mathematics: tensors in, tensors out. The public names live in the files beside this one."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssmax.ops import decode as decode
    from ssmax.ops import loss as loss

__all__ = ["decode", "loss"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module 'ssmax.ops' has no attribute {name!r}")
    return importlib.import_module(f"ssmax.ops.{name}")
