"""Keys and values of the tokens so far, for every layer of a model."""

# B batch, G key heads, T new tokens, S keys so far, D head_dim

import torch
from torch import Tensor

from ssmax.errors import UsageError


class KVCache:
    """Keys and values per layer, growing or in memory set aside beforehand.

    A layer writes its new keys and gets all of them back; the model then advances the cache once.
    Until then `length` does not count the new tokens, and a layer may write again.

    >>> cache = KVCache(num_layers=12)                                    # grows
    >>> cache = KVCache.preallocated(12, batch=1, num_kv_heads=12, max_keys=4096, head_dim=64)
    """

    def __init__(self, num_layers: int) -> None:
        if num_layers < 1:
            raise UsageError(f"num_layers must be at least 1, got {num_layers}")
        self.length: int = 0
        self.max_keys: int | None = None
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._written = [0] * num_layers

    @classmethod
    def preallocated(
        cls,
        num_layers: int,
        *,
        batch: int,
        num_kv_heads: int,
        max_keys: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "KVCache":
        """Make a cache of at most max_keys tokens that never allocates again.

        It is written in place, so autograd refuses a backward pass through several chunks of it:
        decode under `torch.no_grad()`, or take the growing form.
        """
        shape = (batch, num_kv_heads, max_keys, head_dim)
        if min(shape) < 1:
            raise UsageError(
                f"batch, num_kv_heads, max_keys and head_dim must be at least 1, got {shape}"
            )
        cache = cls(num_layers)
        cache.max_keys = max_keys
        for buffers in (cache._keys, cache._values):
            buffers[:] = [torch.zeros(shape, dtype=dtype, device=device) for _ in buffers]
        return cache

    @property
    def num_layers(self) -> int:
        """Count the layers that the cache serves."""
        return len(self._keys)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind `length`; return all keys and values of the layer."""
        if not 0 <= layer < self.num_layers:
            raise UsageError(f"layer must lie in 0..{self.num_layers - 1}, got {layer}")
        if k_BGTD.shape[:3] != v_BGTD.shape[:3]:
            raise UsageError(
                "new keys and values must agree in batch, heads and tokens, "
                f"got {tuple(k_BGTD.shape)} and {tuple(v_BGTD.shape)}"
            )
        keys = self._write(self._keys, layer, k_BGTD)
        values = self._write(self._values, layer, v_BGTD)
        self._written[layer] = self.length + k_BGTD.shape[2]
        return keys, values

    def room(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a preallocated layer, (B, G, max_keys, D), all of them."""
        keys, values = self._keys[layer], self._values[layer]
        if self.max_keys is None or keys is None or values is None:
            raise UsageError("a growing cache has no room of its own; make it with preallocated()")
        return keys, values

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every layer has written."""
        if num_tokens < 0:
            raise UsageError(f"num_tokens must be at least 0, got {num_tokens}")
        written = min(self._written)
        if self.length + num_tokens > written:
            raise UsageError(
                f"every layer must have written what is counted: {self.length} + {num_tokens} "
                f"tokens, layer {self._written.index(written)} holds {written}"
            )
        self.length += num_tokens

    def _write(self, buffers: list[Tensor | None], layer: int, new_BGTD: Tensor) -> Tensor:
        past = buffers[layer]
        if past is None:
            buffers[layer] = new_BGTD
            return new_BGTD
        wanted, came = list(past.shape), list(new_BGTD.shape)
        if len(came) != 4 or wanted[:2] + wanted[3:] != came[:2] + came[3:]:
            raise UsageError(
                f"new keys must fit the cache: (batch, heads, new tokens, width) like "
                f"{tuple(wanted)}, got {tuple(came)}"
            )
        if new_BGTD.dtype != past.dtype:
            raise UsageError(
                f"new keys must have the cache's dtype, {past.dtype}, got {new_BGTD.dtype}"
            )
        stop = self.length + new_BGTD.shape[2]
        if self.max_keys is None:
            grown = torch.cat((past[:, :, : self.length], new_BGTD), dim=2)
            buffers[layer] = grown
            return grown
        if stop > self.max_keys:
            raise UsageError(
                f"the cache holds {self.max_keys} keys; {self.length} are there and "
                f"{new_BGTD.shape[2]} more came. Give it a larger max_keys"
            )
        past[:, :, self.length : stop] = new_BGTD
        return past[:, :, :stop]
