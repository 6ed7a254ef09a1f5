"""A watch over memory: the largest tensor that any operation makes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """`with LargestTensor() as watch:` ... `watch.elements`, counted by storage, not by view."""

    elements: int = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and look at what it made."""
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                stored = tensor.untyped_storage().nbytes() // tensor.itemsize
                self.elements = max(self.elements, stored)
        return out
