"""The hook in Transformers: every attention function is asked for here.

A module that carries an `ssmax` has its query scaled before the function that Transformers would
have called; for all others nothing changes. The hook is installed by the first conversion.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.errors import UsageError
from ssmax.hf.masks import Count, count_keys, count_mask, count_split, is_split, kind_of
from ssmax.hf.written_config import install_writer
from ssmax.nn import RULES, SSMaxScale
from ssmax.ops.scale import Number
from ssmax.ops.scale_query.api import scale_by_ssmax
from ssmax.ops.scale_query.reference import scale_by_ssmax_reference, scale_query
from ssmax.ops.visible import Ramp, is_eager, is_tracing

ATTRIBUTE = "ssmax"
OLDEST, NEWEST = (5, 1), (5, 23)
"""The first Transformers whose models all ask in one place, and the last that was tested."""

_watchers: list[Callable[..., None]] = []
_one_at_a_time = threading.Lock()


def install() -> None:
    """Make Transformers scale queries and write configs of converted models as such, once."""
    install_attention()
    with _one_at_a_time:
        install_writer()


def install_attention() -> None:
    """Install the hook once, however often and by however many threads it is asked for.

    Copies in remote code have hooks of their own.
    """
    with _one_at_a_time:
        _install_attention()


@functools.cache
def _install_attention() -> None:
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface

    def get_interface(self, attn_implementation, default):
        function = original(self, attn_implementation, default)
        return functools.partial(_attend, function, attn_implementation)

    AttentionInterface.get_interface = get_interface
    # In a graph each is one call, which is looked into when the graph is made. Not said where they
    # are defined: it needs torch's compiler, which Transformers has imported, others may not have.
    for function in (count_mask, scale_by_ssmax_reference):
        torch.compiler.allow_in_graph(function)


class HookedScale(SSMaxScale):
    """An SSMaxScale that brings the hook along where it is unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore it as nn.Module does."""
        install()
        super().__setstate__(state)


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
    """Call what Transformers would have called, the query scaled where the module has an ssmax."""
    scale = scale_of(module)
    if scale is not None:
        kind = kind_of(implementation)
        if is_split(function, kind):
            num_keys = count_split(kind, query, options)
        else:
            # Two numbers need no launch; in a graph they would be those of its first length.
            as_ramp = is_eager(query) or not (torch.compiler.is_compiling() or is_tracing())
            num_keys = count_keys(
                kind, module, query, key, attention_mask, options, as_ramp=as_ramp
            )
        for watch in _watchers:

            def attend(query: Tensor, value: Tensor) -> Any:
                return function(module, query, key, value, attention_mask, *arguments, **options)

            watch(module, _as_tensor(num_keys, query), query, key, value, attend)
        query = _scaled(module, scale, query, num_keys)
    return function(module, query, key, value, attention_mask, *arguments, **options)


def scale_of(module: nn.Module) -> Any:
    """Find the ssmax of an attention module, also inside PEFT's wrapper; None: it has none.

    The wrapper answers as the copy that is active; its original shows whether it is ours.
    """
    found = module._modules.get(ATTRIBUTE)
    if found is None or isinstance(found, SSMaxScale):
        return found
    return found if isinstance(getattr(found, "original_module", None), SSMaxScale) else None


def _as_tensor(num_keys: Count, query: Tensor) -> Tensor:
    """Turn numbers into n of every query, (Q,)."""
    return (
        num_keys if isinstance(num_keys, Tensor) else num_keys.counts(query.shape[2], query.device)
    )


def _scaled(module: nn.Module, scale: Any, query: Tensor, num_keys: Count) -> Tensor:
    if not isinstance(num_keys, Tensor) or num_keys.dim() < 3:
        in_graph = torch.compiler.is_compiling()
        learned = _plain_learned(scale, query) if in_graph or query.is_cuda else None
        if learned is not None:
            scaled = scale_by_ssmax_reference if in_graph else scale_by_ssmax
            return scaled(query, *learned, num_keys)
    if isinstance(num_keys, Ramp) and num_keys.first == num_keys.most:
        if not RULES[scale.rule].learned:
            # The same for every head, and on no device: a number.
            return query * scale(num_keys.most)[0].item()
        factor = scale(num_keys.most)
    elif not isinstance(num_keys, Tensor) or num_keys.dim() < 3:
        factor = scale(_as_tensor(num_keys, query))
    else:
        return _scaled_by_head(scale, query, num_keys)
    # Tensor parallelism leaves a rank some of the heads, and of what they learned; a rule that
    # learns nothing is the same for all.
    if not RULES[scale.rule].learned:
        factor = factor[..., : query.shape[1], :]
    if factor.shape[-2] != query.shape[1]:
        raise UsageError(
            f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')} has "
            f"{query.shape[1]} query heads here, its ssmax was made for {factor.shape[-2]}; a "
            "layer whose heads are not those of its config has to give them as num_heads"
        )
    return scale_query(query, factor)


def _scaled_by_head(scale: Any, query: Tensor, num_keys: Tensor) -> Tensor:
    # Heads that see different keys: of every head's factor its own.
    batch, heads, queries = num_keys.shape
    factor = scale(num_keys.flatten(0, 1)).view(batch, heads, heads, queries)
    return scale_query(query, factor.diagonal(dim1=1, dim2=2).transpose(1, 2))


def _plain_learned(scale: Any, query: Tensor) -> tuple[Number, Number | None] | None:
    """Find s and b where nothing stands between them and the factor; None where something may.

    Before each run a graph asks whether all that was looked at is as it was when it was made, for
    every layer: here that is s and b, and nothing of SSMaxScale, its rules and its call.
    """
    rule = RULES[scale.rule] if isinstance(scale, HookedScale) else None
    if rule is None or rule.affine is None or not rule.learned:
        return None
    for name in rule.learned:
        value = scale._parameters.get(name)
        # Others are computed (by a parametrization, a hook), elsewhere (offloaded), or parts.
        if value is None or value.device != query.device or value.shape[0] != query.shape[1]:
            return None
        if type(value) is not nn.Parameter and hasattr(value, "to_local"):
            return None
    return None if scale._forward_hooks or scale._forward_pre_hooks else rule.affine(scale)


@contextmanager
def watched(watch: Callable[..., None]) -> Iterator[None]:
    """Call `watch` before every scaling.

    It is given the module, its n, its query, its keys, its values, and a function of a query and
    values that attends as the kernel is about to.
    """
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
