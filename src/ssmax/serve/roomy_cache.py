"""A cache of Transformers that writes where there is room instead of copying itself."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ssmax.serve.past import Past


class _RoomyLayer(DynamicLayer):
    """Keys and values of one layer of a past."""

    def __init__(self, past: Past, layer: int) -> None:
        super().__init__()
        self._past, self._layer = past, layer
        self.keys, self.values = (
            past.tensors[2 * layer + kind][:, :, : past.length] for kind in (0, 1)
        )
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """All keys and values, the new ones included."""
        self.keys = self._past.write(2 * self._layer, key_states)
        self.values = self._past.write(2 * self._layer + 1, value_states)
        return self.keys, self.values


def roomy_cache(past: Past) -> DynamicCache:
    """For one call of a model."""
    cache = DynamicCache()
    cache.layers.extend(_RoomyLayer(past, layer) for layer in range(len(past.tensors) // 2))
    return cache
