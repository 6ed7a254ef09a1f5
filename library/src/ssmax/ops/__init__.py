"""Mathematics: tensors in, tensors out. The public names live in the files beside this one."""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax.ops import scale as scale
else:
    __all__, __getattr__, __dir__ = door(__name__)
