"""The one place where Transformers is entered: every attention function is asked for here.

A module that carries an `ssmax` has its query scaled before the function that Transformers would
have called; for all others nothing changes. The hook is installed by the first conversion.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ssmax.hf.counting import kind_of, visible_keys
from ssmax.nn import RULES, SSMaxScale
from ssmax.ops.rope_scale.api import scale_query

ATTRIBUTE = "ssmax"
OLDEST = (5, 1)
"""The first Transformers whose models all ask in one place."""

_watchers: list[Callable[[nn.Module, Tensor, Tensor], None]] = []


def install() -> None:
    """Once, however often it is asked for."""
    from transformers.modeling_utils import AttentionInterface

    if hasattr(AttentionInterface.get_interface, "_ssmax_original"):
        return
    original = AttentionInterface.get_interface

    def get_interface(self, attn_implementation, default):
        function = original(self, attn_implementation, default)
        return functools.partial(_attend, function, attn_implementation)

    get_interface._ssmax_original = original  # pyright: ignore[reportFunctionMemberAccess]
    AttentionInterface.get_interface = get_interface


def _attend(
    function: Callable[..., Any],
    implementation: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    """What Transformers would have called, its query scaled where the module has an ssmax."""
    scale = scale_of(module)
    if scale is not None:
        query = _scale(scale, implementation, module, query, key, attention_mask, options)
    return function(module, query, key, value, attention_mask, *arguments, **options)


def scale_of(module: nn.Module) -> Any:
    """The ssmax of an attention module, in the wrapper of PEFT where it has one; None: it has none.

    The wrapper answers as the copy that is active; what it was made of tells whether it is ours.
    """
    found = getattr(module, ATTRIBUTE, None)
    return found if isinstance(getattr(found, "original_module", found), SSMaxScale) else None


def _scale(
    scale: SSMaxScale,
    implementation: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    options: dict[str, Any],
) -> Tensor:
    kind = kind_of(implementation)
    if kind is None:
        raise ValueError(
            f"the attention implementation {implementation!r} is not known, so it cannot be known "
            "what it masks; use eager, sdpa, flex_attention or flash attention"
        )
    num_keys = visible_keys(kind, module, query, key, mask, options)
    for watch in _watchers:
        watch(module, num_keys, query)
    if num_keys.dim() < 3:
        factor = scale(num_keys)
        # Tensor parallelism leaves a rank some of the heads, and of what they learnt; a rule that
        # learns nothing is the same for all.
        if not RULES[scale.rule].learnt:
            factor = factor[..., : query.shape[1], :]
        if factor.shape[-2] != query.shape[1]:
            raise ValueError(
                f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')} has "
                f"{query.shape[1]} query heads here, its ssmax was made for {factor.shape[-2]}; a "
                "layer whose heads are not those of its config has to tell them as num_heads"
            )
        return scale_query(query, factor)
    # Heads that see different keys: of every head's factor its own.
    batch, heads, queries = num_keys.shape
    factor = scale(num_keys.flatten(0, 1)).view(batch, heads, heads, queries)
    return scale_query(query, factor.diagonal(dim1=1, dim2=2).transpose(1, 2))


@contextmanager
def watched(watch: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """Be told of every scaled query meanwhile: its module, its n, itself before."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
