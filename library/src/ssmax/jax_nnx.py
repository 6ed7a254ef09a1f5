"""The parameters of Scalable-Softmax as a Flax NNX module."""

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.ops.length import initial_s

require("flax", install="ssmax[jax]", purpose="ssmax.jax_nnx")

import jax.numpy as jnp  # noqa: E402 (what installs it is said first)
from flax import nnx  # noqa: E402 (likewise)
from jax import Array  # noqa: E402 (likewise)
from jax.typing import ArrayLike  # noqa: E402 (likewise)

from ssmax.jax import ssmax_factor  # noqa: E402 (likewise)


class SSMaxScale(nnx.Module):
    """`s`, and `bias` where it is asked for: one float32 per query head.

    They start where the mean factor over n = 1..train_length is 1. Pass them to `ssmax_attention`,
    or multiply the query of an attention of your own by `scale(num_keys)[..., None]`.
    """

    def __init__(self, num_heads: int, train_length: int, *, bias: bool = False) -> None:
        if num_heads < 1:
            raise UsageError(f"num_heads must be at least 1, got {num_heads}")
        # float32 whatever the model is: bfloat16 would round the updates of s away.
        s = jnp.full((num_heads,), initial_s(train_length), jnp.float32)
        self.s: nnx.Param[Array] = nnx.Param(s)
        self.bias: nnx.Param[Array] | None = nnx.Param(jnp.zeros_like(s)) if bias else None

    def __call__(self, num_keys: ArrayLike) -> Array:
        """Compute the factor (..., T, H) for num_keys (..., T)."""
        bias = None if self.bias is None else self.bias[...]
        return ssmax_factor(num_keys, self.s[...], bias)
