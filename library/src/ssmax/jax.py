"""Scalable-Softmax in JAX: count n, scale the query, call `jax.nn.dot_product_attention`.

The twin of `ssmax_attention` in PyTorch, in the layout of `jax.nn`: (batch, tokens, heads,
head_dim). Every function works under jit, grad, vmap and remat, and on sharded arrays: n is that of
the whole array. Shapes and dtypes are checked; values, which jit hides, are not.
"""

# B batch, H query heads, G key heads, T queries, S keys, D head width

import functools
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.ops.window import MASKED, UNBOUNDED, Window, window_pair

require("jax", install="ssmax[jax]", purpose="ssmax.jax")

import jax  # noqa: E402 (what installs it is said first)
import jax.numpy as jnp  # noqa: E402 (likewise)
import numpy as np  # noqa: E402 (likewise)
from jax import Array  # noqa: E402 (likewise)
from jax.typing import ArrayLike  # noqa: E402 (likewise)

Implementation = Literal["xla", "cudnn"] | None

FLOAT16_EXPONENT = 4
"""The power of two that float16 queries are divided by, so that a factor of up to 16 overflows
none."""


def ssmax(
    z: ArrayLike,
    s: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    axis: int = -1,
) -> Array:
    """Compute softmax((s log n + b) z) along axis, n being the number of visible entries.

    `mask` is True where visible and broadcasts to z; an entry of -inf is hidden too. A row in which
    nothing is visible gives zeros. s and bias are numbers or arrays that broadcast to z and do not
    vary along axis: (H, 1, 1) for the logits (B, H, T, S) of H heads.
    """
    z = _floating("z", z)
    if not -z.ndim <= axis < z.ndim:
        raise UsageError(f"axis must name one of the {z.ndim} dimensions of z, got {axis}")
    visible = z != -jnp.inf
    if mask is not None:
        mask = _boolean("mask", mask)
        if not _fits(mask.shape, z.shape):
            raise UsageError(f"mask must broadcast to the shape of z, {z.shape}, got {mask.shape}")
        visible &= mask
    num_visible = visible.sum(axis, keepdims=True)
    factor = _affine_log(
        jnp.maximum(num_visible, 1),
        _constant_along(axis, z, "s", s),
        None if bias is None else _constant_along(axis, z, "bias", bias),
    )
    # The hidden entries leave before the product: -inf times a factor of 0 would be NaN.
    logits = factor * jnp.where(visible, z, 0).astype(factor.dtype)
    # A row with nothing to see is left whole and zeroed afterwards: its gradient stays finite.
    logits = jnp.where(visible | (num_visible == 0), logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=axis)
    return jnp.where(num_visible == 0, 0, weights).astype(z.dtype)


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    is_causal: bool,
    window: Window = None,
    segment_ids: ArrayLike | None = None,
    key_padding_mask: ArrayLike | None = None,
    positions: ArrayLike | None = None,
) -> Array:
    """Count n for every query: (T,), or (B, T) where rows differ; at least 1.

    With fewer queries than keys the queries are the last ones (cached decoding). `window` W is the
    query itself and the W - 1 keys before it; a pair (left, right) is FlashAttention's.
    `segment_ids` (S,) or (B, S) are equal within a packed document and change where the next one
    begins. `positions` (T,) or (B, T) count each query from the start of its document.
    `key_padding_mask` (B, S) is True for tokens.
    """
    spec = _mask_spec(
        num_queries,
        num_keys,
        is_causal=is_causal,
        window=window,
        segment_ids=segment_ids,
        key_padding_mask=key_padding_mask,
        positions=positions,
    )
    return spec.num_visible()


def ssmax_factor(num_keys: ArrayLike, s: ArrayLike, bias: ArrayLike | None = None) -> Array:
    """Compute s log n + b in float32 or wider: (..., T, H) for n (..., T) and values (H,).

    `q * ssmax_factor(n, s)[..., None]` scales a query (B, T, H, D); with s a number it is (..., T).
    """
    n = _check_num_keys(num_keys)
    s = _learned("s", s, n)
    bias = None if bias is None else _learned("bias", bias, n)
    shapes = [value.shape for value in (s, bias) if value is not None]
    if any(len(shape) > 1 for shape in shapes):
        raise UsageError(f"s and bias must be numbers or (heads,), got {shapes}")
    return _affine_log(n[..., None] if any(shapes) else n, s, bias)


def ssmax_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    s: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    num_keys: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    key_padding_mask: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    is_causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    implementation: Implementation = None,
) -> Array:
    """Compute softmax((s log n + b) q k^T scale) v, n being the number of keys each query sees.

    q is (B, T, H, D), k and v (B, S, G, D), as in `jax.nn.dot_product_attention`; H is a multiple
    of G; s and bias are numbers or (H,), learnable. With fewer queries than keys the queries are
    the last ones, so `is_causal` serves cached decoding. `key_padding_mask` (B, S) is True for
    tokens; `window`, `segment_ids` and `positions` are as in `visible_keys`. `mask` broadcasts to
    (B, H, T, S) and is boolean (True is visible) or additive (-5e3 or any lower number hides a key;
    what it adds is not scaled). `num_keys` overrides the count: a number, (T,), (B, T) or
    (B, H, T). A fully masked row gives zeros. `implementation` is that of `dot_product_attention`,
    whose softmax is float32; None computes float64 inputs in float64 throughout.
    """
    q, k, v = _check_heads(q, k, v)
    if scale is not None and not (isinstance(scale, Real) and math.isfinite(scale)):
        raise UsageError(
            f"scale must be a finite number or None for head_dim ** -0.5, got {scale!r}; "
            "what is learned goes into s and bias"
        )
    if implementation not in (None, "xla", "cudnn"):
        raise UsageError(f"implementation must be 'xla', 'cudnn' or None, got {implementation!r}")
    spec = _mask_spec(
        q.shape[1],
        k.shape[1],
        is_causal=is_causal,
        window=window,
        segment_ids=segment_ids,
        key_padding_mask=key_padding_mask,
        positions=positions,
        mask=mask,
        batch=q.shape[0],
        num_heads=q.shape[2],
    )
    factor_BTH = _factor(q, s, bias, num_keys, spec)
    if q.size == 0 or k.size == 0:
        return jnp.zeros_like(q)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if scale <= 0:
        # Fused kernels hide a key by a logit of -inf before they multiply by the scale.
        factor_BTH, scale = (-factor_BTH, -scale) if scale < 0 else (0.0 * factor_BTH, 1.0)
    if q.dtype == jnp.float16:
        # Kernels multiply by `scale` in float32, and powers of two are exact.
        factor_BTH, scale = factor_BTH * 2.0**-FLOAT16_EXPONENT, scale * 2.0**FLOAT16_EXPONENT
    q = (q.astype(factor_BTH.dtype) * factor_BTH[..., None]).astype(q.dtype)
    return _attend(q, k, v, spec, scale, implementation)


@dataclass(kw_only=True, eq=False, frozen=True)
class _MaskSpec:
    """Which keys each query sees: an interval, less the padding and what an explicit mask hides."""

    num_queries: int
    num_keys: int
    is_causal: bool
    window: tuple[int, int]
    """(left, right), -1 for unbounded."""
    segment_ids: Array | None
    positions: Array | None
    key_padding_mask: Array | None
    mask: Array | None
    """Explicit mask, 4-D, boolean or additive."""

    @property
    def is_interval(self) -> bool:
        """True where no padding and no explicit mask punches holes into the interval."""
        return self.key_padding_mask is None and self.mask is None

    @property
    def is_one_document(self) -> bool:
        """True where neither holes nor documents are given: causality and a window are all."""
        return self.is_interval and self.segment_ids is None and self.positions is None

    @property
    def sees_all(self) -> bool:
        """True where every query is known to see every key."""
        left, right = self.window
        is_last = self.num_queries == 1
        opens_left = left == UNBOUNDED or left >= self.num_keys - 1
        opens_right = is_last or not (self.is_causal or right != UNBOUNDED)
        return self.is_one_document and opens_left and opens_right

    @property
    def is_square_causal(self) -> bool:
        """True for the causal triangle, with a window or not, which every kernel has built in."""
        return self.is_one_document and self.is_causal and self.num_queries == self.num_keys

    @property
    def may_hide_all(self) -> bool:
        """True where some query may see no key at all."""
        return not self.is_interval or self.num_queries > self.num_keys

    def num_visible(self) -> Array:
        """Count the keys that each query sees, at least 1: (T,), (B, T) or (B | 1, H | 1, T)."""
        if self.mask is not None:
            n = self.visible_mask().sum(-1)
        else:
            start, stop = self.ends()
            n = stop - start
            if self.key_padding_mask is not None:
                n = self._count_tokens(self.key_padding_mask, start, jnp.maximum(start, stop))
        return jnp.maximum(n, 1)

    @staticmethod
    def _count_tokens(keep_BS: Array, start: Array, stop: Array) -> Array:
        """Count the tokens of every interval, (B, T), without a queries x keys array."""
        seen_before = jnp.pad(jnp.cumsum(keep_BS, axis=-1, dtype=jnp.int32), ((0, 0), (1, 0)))
        start, stop = (
            jnp.broadcast_to(end, (keep_BS.shape[0], end.shape[-1])) for end in (start, stop)
        )
        return jnp.take_along_axis(seen_before, stop, -1) - jnp.take_along_axis(
            seen_before, start, -1
        )

    def visible_mask(self) -> Array:
        """Make the boolean mask, (B | 1, H | 1, T, S)."""
        start, stop = (end[..., None] for end in self.ends())
        key = jnp.arange(self.num_keys)
        visible = (start <= key) & (key < stop)
        visible = visible[None, None] if visible.ndim == 2 else visible[:, None]
        if self.key_padding_mask is not None:
            visible &= self.key_padding_mask[:, None, None]
        if self.mask is not None:
            visible &= self.mask if self.mask.dtype == jnp.bool else self.mask > MASKED
        return visible

    def ends(self) -> tuple[Array, Array]:
        """Find the first and one past the last key of each query's interval, (T,) or (B, T)."""
        # The key at which each query stands.
        index = jnp.arange(self.num_keys - self.num_queries, self.num_keys)
        left, right = self.window
        start, stop = jnp.zeros_like(index), jnp.full_like(index, self.num_keys)
        if left != UNBOUNDED:
            start = jnp.maximum(start, index - left)
        if self.is_causal:
            stop = jnp.minimum(stop, index + 1)
        if right != UNBOUNDED:
            stop = jnp.minimum(stop, index + right + 1)
        if self.segment_ids is not None:
            goes_on = self.segment_ids[..., 1:] == self.segment_ids[..., :-1]
            first, last = (end[..., -self.num_queries :] for end in _runs(goes_on))
            start, stop = jnp.maximum(start, first), jnp.minimum(stop, last)
        if self.positions is not None:
            start = jnp.maximum(start, index - self.positions)
            if not self.is_causal:
                rises = self.positions[..., 1:] == self.positions[..., :-1] + 1
                stop = jnp.minimum(stop, _runs(rises)[1])
        return jnp.clip(start, 0, self.num_keys), jnp.clip(stop, 0, self.num_keys)


def _runs(goes_on: Array) -> tuple[Array, Array]:
    """Find the first and one past the last index of the run around each index."""
    size = goes_on.shape[-1] + 1
    ends = jnp.ones((*goes_on.shape[:-1], 1), bool)
    is_first = jnp.concatenate((ends, ~goes_on), axis=-1)
    is_last = jnp.concatenate((~goes_on, ends), axis=-1)
    index, axis = jnp.arange(size), goes_on.ndim - 1
    first = jax.lax.cummax(jnp.where(is_first, index, 0), axis=axis)
    last = jax.lax.cummin(jnp.where(is_last, index + 1, size), axis=axis, reverse=True)
    return first, last


def _attend(
    q: Array, k: Array, v: Array, spec: _MaskSpec, scale: float, implementation: Implementation
) -> Array:
    """Compute softmax attention of a scaled query, a fully masked row giving zeros."""
    is_exact = implementation is None and q.dtype == jnp.float64
    attend: Any = (
        _float64_attention
        if is_exact
        else functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    )
    if spec.sees_all:
        return attend(q, k, v, scale=scale)
    if spec.is_square_causal and not is_exact:
        left, _ = spec.window
        local_window_size = None if left == UNBOUNDED else (left, 0)
        return attend(q, k, v, scale=scale, is_causal=True, local_window_size=local_window_size)
    visible, added = spec.visible_mask(), None
    if spec.mask is not None and spec.mask.dtype != jnp.bool:
        added = jnp.where(spec.mask > MASKED, spec.mask, 0)
    if not spec.may_hide_all:
        return attend(q, k, v, added, visible, scale=scale)
    # A row with nothing to see sees all and is zeroed afterwards: its gradient stays finite.
    sees_nothing = ~visible.any(-1, keepdims=True)
    out = attend(q, k, v, added, visible | sees_nothing, scale=scale)
    return jnp.where(jnp.swapaxes(sees_nothing, 1, 2), 0, out)


def _float64_attention(
    q: Array, k: Array, v: Array, added: Array | None = None, visible: Array | None = None,
    *, scale: float,
) -> Array:  # fmt: skip
    """Compute it in float64 throughout; in `dot_product_attention` the softmax is float32."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    if added is not None:
        logits = logits + added
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, axis=-1), v)


def _affine_log(n: Array, s: Array, bias: Array | None) -> Array:
    """Compute s log n + b in float32 or wider: in bfloat16, log n is one number for 4,000 of n."""
    wide = s.dtype if bias is None else jnp.promote_types(s.dtype, bias.dtype)
    if jnp.issubdtype(n.dtype, jnp.floating):
        wide = jnp.promote_types(wide, n.dtype)
    factor = s.astype(wide) * jnp.log(n.astype(wide))
    return factor if bias is None else factor + bias.astype(wide)


def _factor(
    q: Array, s: ArrayLike, bias: ArrayLike | None, num_keys: ArrayLike | None, spec: _MaskSpec
) -> Array:
    """Compute s log n + b, broadcastable to (B, T, H)."""
    batch, num_queries, num_heads, _ = q.shape
    if num_keys is None:
        n = spec.num_visible()
    else:
        n = _check_num_keys(num_keys)
        wanted = (num_queries, num_heads, batch) if n.ndim == 3 else (num_queries, batch)
        sizes = zip(n.shape[::-1], wanted, strict=False)
        if n.ndim > 3 or any(size not in (1, most) for size, most in sizes):
            raise UsageError(
                f"num_keys must be a number or broadcast to ({num_queries} queries,), "
                f"({batch}, {num_queries}) or ({batch}, {num_heads}, {num_queries}), got {n.shape}"
            )
    n = jnp.swapaxes(n, -1, -2) if n.ndim == 3 else n[..., None]
    n = n.reshape((1,) * (3 - n.ndim) + n.shape)
    s = _per_head("s", s, q)
    return _affine_log(n, s, None if bias is None else _per_head("bias", bias, q))


def _mask_spec(
    num_queries: int,
    num_keys: int,
    *,
    is_causal: bool,
    window: Window = None,
    segment_ids: ArrayLike | None = None,
    key_padding_mask: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    batch: int | None = None,
    num_heads: int | None = None,
) -> _MaskSpec:
    """Check a description of what is visible."""
    for name, size in (("num_queries", num_queries), ("num_keys", num_keys)):
        if not isinstance(size, Integral) or size < 0:
            raise UsageError(f"{name} must be a whole number, at least 0, got {size!r}")
    if not isinstance(is_causal, bool | np.bool_):
        raise UsageError(
            f"is_causal must be True or False, got {type(is_causal).__name__}; under jit name it "
            "in static_argnames"
        )
    if mask is not None:
        mask = _check_mask(mask, bool(is_causal), (batch, num_heads, num_queries, num_keys))
    if key_padding_mask is not None:
        key_padding_mask = _boolean("key_padding_mask", key_padding_mask)
        _check_rows("key_padding_mask", key_padding_mask, num_keys, "keys", batch, can_share=False)
        batch = key_padding_mask.shape[0]
    if segment_ids is not None:
        segment_ids = _integers("segment_ids", segment_ids)
        _check_rows("segment_ids", segment_ids, num_keys, "keys", batch)
        if num_queries > num_keys:
            raise UsageError(
                "segment_ids name the documents of a row of keys, of which the queries are the "
                f"last: got {num_queries} queries for {num_keys} keys"
            )
    if positions is not None:
        positions = _integers("positions", positions)
        _check_rows("positions", positions, num_queries, "queries", batch)
        if not is_causal and num_queries != num_keys:
            raise UsageError(
                "positions without is_causal must cover every key, to tell where a document ends: "
                f"got {num_queries} queries for {num_keys} keys; pass segment_ids or mask instead"
            )
    return _MaskSpec(
        num_queries=int(num_queries),
        num_keys=int(num_keys),
        is_causal=bool(is_causal),
        window=window_pair(window),
        segment_ids=segment_ids,
        positions=positions,
        key_padding_mask=key_padding_mask,
        mask=mask,
    )


def _array(name: str, value: Any, kind: Any, wanted: str) -> Array:
    """Return an array of a kind of dtype."""
    if not (isinstance(value, Array | np.ndarray) or hasattr(value, "__jax_array__")):
        raise UsageError(
            f"{name} must be an array, got {type(value).__name__}; write jnp.asarray(...)"
        )
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, kind):
        raise UsageError(f"{name} must be {wanted}, got {value.dtype}")
    return value


def _floating(name: str, value: Any) -> Array:
    return _array(name, value, jnp.floating, "floating point: write .astype(jnp.float32)")


def _integers(name: str, value: Any) -> Array:
    return _array(name, value, jnp.integer, "integers: write .astype(jnp.int32)")


def _boolean(name: str, value: Any) -> Array:
    return _array(name, value, jnp.bool, "boolean, True is visible: write .astype(bool)")


def _learned(name: str, value: Any, x: Array) -> Array:
    """Return a number or a floating array, as wide as x and float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if isinstance(value, Real) and not isinstance(value, bool):
        return jnp.asarray(float(value), wide)
    value = _floating(name, value)
    return value.astype(jnp.promote_types(value.dtype, wide))


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """True for a shape that broadcasts to the wanted one; None is any size."""
    sizes = zip(shape[::-1], wanted[::-1], strict=False)
    return len(shape) <= len(wanted) and all(
        most is None or size in (1, most) for size, most in sizes
    )


def _constant_along(axis: int, z: Array, name: str, value: Any) -> Array:
    """Return s or bias of `ssmax`, checked not to vary along axis."""
    value = _learned(name, value, z)
    shape = (1,) * (z.ndim - value.ndim) + value.shape
    if not _fits(shape, z.shape) or shape[axis] != 1:
        raise UsageError(
            f"{name} must be a number, or broadcast to z of shape {z.shape} with size 1 along axis "
            f"{axis}, got {value.shape}; for one value per head of (B, H, T, S) logits pass it as "
            "(H, 1, 1)"
        )
    return value


def _per_head(name: str, value: Any, q: Array) -> Array:
    """Return one number or one per query head."""
    value = _learned(name, value, q)
    if value.shape not in ((), (1,), (q.shape[2],)):
        raise UsageError(
            f"{name} must hold one value per query head: expected ({q.shape[2]},), got "
            f"{value.shape}. With grouped queries, count query heads, not key heads; and is q "
            "(batch, tokens, heads, head_dim)?"
        )
    return value


def _check_num_keys(num_keys: Any) -> Array:
    if isinstance(num_keys, Real) and not isinstance(num_keys, bool):
        if not 1 <= float(num_keys) < math.inf:
            raise UsageError(
                f"num_keys must be at least 1 (log n is taken) and finite, got {num_keys}; "
                "a query that sees nothing has n = 1"
            )
        return jnp.asarray(num_keys)
    return _array("num_keys", num_keys, jnp.number, "numbers")


def _check_heads(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
    q, k, v = (_floating(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise UsageError(
                f"{name} must have 4 dimensions, (batch, tokens, heads, head_dim), got shape "
                f"{x.shape}; take a batch of one as {name}[None]"
            )
    if k.shape != v.shape:
        raise UsageError(f"k and v must have one shape, got {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise UsageError(f"q and k must agree in batch and head_dim, got {q.shape} and {k.shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise UsageError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise UsageError(
            f"query heads must be a multiple of key heads, got {q.shape[2]} and {k.shape[2]}; "
            "is the layout (batch, tokens, heads, head_dim)?"
        )
    return q, k, v


def _check_mask(mask: Any, is_causal: bool, wanted: tuple[int | None, ...]) -> Array:
    if is_causal:
        raise UsageError(
            "is_causal goes with key_padding_mask, positions, window and segment_ids, not with "
            "mask; put causality into the mask, or pass the padding as key_padding_mask"
        )
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise UsageError(
            "mask must be boolean (True is visible) or floating (added to the logits, -inf is "
            f"hidden), got {mask.dtype}"
        )
    if mask.ndim < 2 or not _fits(mask.shape, wanted):
        raise UsageError(
            f"mask must have 2 to 4 dimensions and broadcast to (batch, heads, queries, keys) = "
            f"{wanted}, got {mask.shape}"
        )
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _check_rows(
    name: str, x: Array, length: int, of: str, batch: int | None, *, can_share: bool = True
) -> None:
    """Raise unless it is (length,) where rows may share it, or (batch, length)."""
    fits_batch = x.ndim == 1 or batch in (None, x.shape[0]) or (can_share and x.shape[0] == 1)
    if x.ndim not in ((1, 2) if can_share else (2,)) or x.shape[-1] != length or not fits_batch:
        rows = "batch" if batch is None else batch
        alone = f"({length} {of},) or " if can_share else ""
        raise UsageError(
            f"{name} must be {alone}({rows}, {length} {of}), got {x.shape}"
            + ("; with a cache it covers the cached keys too" if of == "keys" else "")
        )
