"""The one place where Transformers is entered: every attention function is asked for here.

A module that carries an `ssmax` has its query scaled before the function that Transformers would
have called; for all others nothing changes. The hook is installed by the first conversion.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.errors import UsageError
from ssmax.hf.counting import (
    Count,
    Kind,
    as_tensor,
    is_traced,
    kind_of,
    known_keys,
    of_mask,
    visible_keys,
)
from ssmax.nn import RULES, SSMaxScale
from ssmax.ops.rope_scale.api import scale_query
from ssmax.ops.scale import unchecked_ssmax_factor

ATTRIBUTE = "ssmax"
OLDEST, NEWEST = (5, 1), (5, 23)
"""The first Transformers whose models all ask in one place, and the last that was tested."""

SHARED_ELEMENTS = 1 << 22
"""Of factors: with more, launches do not matter and memory does."""

_WIDE = (torch.float32, torch.float64)

# Called with a module, its n and, for a watcher, its query; for an auditor, its keys and how many
# of them the kernel weighs.
_watchers: list[Callable[[nn.Module, Tensor, Tensor], None]] = []
_auditors: list[Callable[[nn.Module, Tensor, Tensor, Tensor], None]] = []
_one_at_a_time = threading.Lock()


def install() -> None:
    """Once, however often and by however many threads it is asked for.

    Copies in remote code have hooks of their own.
    """
    with _one_at_a_time:
        _install()


@functools.cache
def _install() -> None:
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface

    def get_interface(self, attn_implementation, default):
        function = original(self, attn_implementation, default)
        return functools.partial(_attend, function, attn_implementation)

    AttentionInterface.get_interface = get_interface
    # In a graph each is one call, which is looked into when the graph is made. Not said where they
    # are defined: it needs torch's compiler, which Transformers has imported, others may not have.
    for function in (of_mask, _scaled_in_graph):
        torch.compiler.allow_in_graph(function)


class Company:
    """Scales of one model that meet the same n, so that their factors can be made together.

    Eager code that makes no gradients is launches, one after the other: here are some for all
    layers instead of some for each. Whoever asks becomes a member: a copy, made alone or with its
    model, starts without any.
    """

    def __init__(self) -> None:
        self._members: dict[HookedScale, None] = {}
        self._first: HookedScale | None = None
        self._pass: tuple[int, Count, dict[HookedScale, tuple[int, Tensor]]] = (0, 0, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "Company":
        return memo.setdefault(id(self), Company())

    def __getstate__(self) -> dict[str, Any]:
        return vars(Company())

    def factor(self, scale: "HookedScale", num_keys: Count) -> Tensor:
        """(..., heads, queries), float32 or wider, without gradients."""
        self._members.setdefault(scale)
        if self._first is None or scale.place < self._first.place:
            self._first = scale
        # The first layer begins anew, since s may have changed, and makes those of the others: they
        # use them once.
        if scale is self._first:
            self._pass = (threading.get_ident(), num_keys, self._make(scale, num_keys))
        # Layers that were left out, or called by themselves, may find one of another pass. A thread
        # may have a stream of its own.
        thread, of_keys, made = self._pass
        if thread == threading.get_ident() and _is_same(of_keys, num_keys):
            version, factor = made.pop(scale, (-1, scale.scale))
            if version == _version(scale):
                return factor
        return _together(num_keys, [scale])[0]

    def _make(
        self, first: "HookedScale", num_keys: Count
    ) -> dict["HookedScale", tuple[int, Tensor]]:
        """For the first layer and those that are like it, where that is not too much."""
        if first.scale.numel() * len(self._members) * _queries(num_keys) > SHARED_ELEMENTS:
            return {}
        # Offloaded and sharded layers are elsewhere, or parts, until it is their turn.
        about = _about(first)
        alike = [each for each in self._members if _about(each) == about]
        factors = _together(num_keys, alike)
        return {each: (_version(each), made) for each, made in zip(alike, factors, strict=True)}


def _version(scale: "HookedScale") -> int:
    """How often s and b have changed."""
    version = 0
    for parameter in scale._parameters.values():
        if parameter is not None:
            version += parameter._version
    return version


def _about(scale: "HookedScale") -> tuple[Any, ...] | None:
    """What has to be equal for factors to be made together; None: that cannot be.

    Others are parts of a tensor, are computed (by a parametrization), are too narrow, or do not
    count their changes.
    """
    s = scale._parameters.get("scale")
    if type(s) is not nn.Parameter or s.is_inference() or s.dtype not in _WIDE:
        return None
    return s.shape, s.dtype, s.device


def _together(num_keys: Count, scales: Sequence["HookedScale"]) -> Sequence[Tensor]:
    """s log n + b of every one, as SSMaxScale has it."""
    s, n, columns = torch.stack([scale.scale for scale in scales]), num_keys, (len(scales), -1, 1)
    if not isinstance(n, int):
        n = as_tensor(n, s).unsqueeze(-2)
        columns = (len(scales), *(1,) * (n.dim() - 2), -1, 1)
    bias = None
    if scales[0].rule == "ssmax_bias":
        bias = torch.stack([scale.bias for scale in scales]).view(columns)
    return unchecked_ssmax_factor(n, s.view(columns), bias).unbind()


def _queries(num_keys: Count) -> int:
    if isinstance(num_keys, int):
        return 1
    return len(num_keys) if isinstance(num_keys, range) else num_keys.numel()


def _is_same(one: Count, other: Count) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one == other


class HookedScale(SSMaxScale):
    """An SSMaxScale that knows those of its model, and brings the hook along where it goes."""

    company: Company | None = None
    place: int = 0
    """Among its company: layers are called in this order."""

    @property
    def shares(self) -> bool:
        """True while factors are made with those of the others, and n may be a range."""
        # A compiled graph looks at nothing else here, and so asks for nothing else before it runs.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.company is None:
            return False
        return _about(self) is not None

    def forward(self, num_keys: Count) -> Tensor:
        """As SSMaxScale's; a range is n of the queries of a prompt."""
        if self.shares:
            assert self.company is not None
            return self.company.factor(self, num_keys)
        assert not isinstance(num_keys, range)
        # Not super(), which would be asked for too, layer by layer.
        return SSMaxScale.forward(self, num_keys)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As nn.Module's."""
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
    """What Transformers would have called, its query scaled where the module has an ssmax."""
    scale = scale_of(module)
    if scale is not None:
        asked = (_known_kind(implementation), module, query, key, attention_mask, options)
        # Numbers need no launch; in a graph they would be those of the lengths it was made with.
        in_graph = torch.compiler.is_compiling() or is_traced()
        num_keys = None if in_graph else known_keys(*asked)
        if num_keys is None:
            num_keys = visible_keys(*asked)
        elif isinstance(num_keys, range) and not getattr(scale, "shares", False):
            num_keys = as_tensor(num_keys, query)
        for watch in _watchers:
            watch(module, as_tensor(num_keys, query), query)
        for audit in _auditors:

            def attend(query: Tensor, value: Tensor) -> Any:
                return function(module, query, key, value, attention_mask, *arguments, **options)

            weighed = _weighed_keys(attend, query, key, value)
            audit(module, as_tensor(num_keys, query), key, weighed)
        query = _scaled(module, scale, query, num_keys)
    return function(module, query, key, value, attention_mask, *arguments, **options)


def scale_of(module: nn.Module) -> Any:
    """The ssmax of an attention module, in the wrapper of PEFT where it has one; None: it has none.

    The wrapper answers as the copy that is active; what it was made of tells whether it is ours.
    """
    found = module._modules.get(ATTRIBUTE)
    if found is None or isinstance(found, SSMaxScale):
        return found
    return found if isinstance(getattr(found, "original_module", None), SSMaxScale) else None


def _known_kind(implementation: str | None) -> Kind:
    kind = kind_of(implementation)
    if kind is None:
        raise UsageError(
            f"the attention implementation {implementation!r} is not known, so it cannot be known "
            "what it masks; use eager, sdpa, flex_attention or flash attention"
        )
    return kind


def _scaled(module: nn.Module, scale: Any, query: Tensor, num_keys: Count) -> Tensor:
    if torch.compiler.is_compiling() and isinstance(num_keys, Tensor) and num_keys.dim() < 3:
        learnt = _plain_learnt(scale, query)
        if learnt is not None:
            return _scaled_in_graph(query, num_keys, *learnt)
    if isinstance(num_keys, int) and not RULES[scale.rule].learnt:
        # The same for every head, and on no device: a number.
        return query * scale(num_keys)[0].item()
    if not isinstance(num_keys, Tensor) or num_keys.dim() < 3:
        factor = scale(num_keys)
        # Tensor parallelism leaves a rank some of the heads, and of what they learnt; a rule that
        # learns nothing is the same for all.
        if not RULES[scale.rule].learnt:
            factor = factor[..., : query.shape[1], :]
        if factor.shape[-2] != query.shape[1]:
            raise UsageError(
                f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')} has "
                f"{query.shape[1]} query heads here, its ssmax was made for {factor.shape[-2]}; a "
                "layer whose heads are not those of its config has to tell them as num_heads"
            )
        return scale_query(query, factor)
    # Heads that see different keys: of every head's factor its own.
    batch, heads, queries = num_keys.shape
    factor = scale(num_keys.flatten(0, 1)).view(batch, heads, heads, queries)
    return scale_query(query, factor.diagonal(dim1=1, dim2=2).transpose(1, 2))


def _plain_learnt(scale: Any, query: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """s and b where nothing stands between them and the factor; None where something may.

    Before each run a graph asks whether all that was looked at is as it was when it was made, for
    every layer: here that is s and b, and nothing of SSMaxScale, its rules and its call.
    """
    if not isinstance(scale, HookedScale) or scale.rule not in ("ssmax", "ssmax_bias"):
        return None
    s, bias = scale._parameters.get("scale"), scale._parameters.get("bias")
    # Others are computed (by a parametrization, a hook), elsewhere (offloaded), or parts.
    if s is None or (bias is None) == (scale.rule == "ssmax_bias"):
        return None
    if s.device != query.device or s.shape[0] != query.shape[1] or hasattr(s, "to_local"):
        return None
    return None if scale._forward_hooks or scale._forward_pre_hooks else (s, bias)


def _scaled_in_graph(query: Tensor, num_keys: Tensor, s: Tensor, bias: Tensor | None) -> Tensor:
    return scale_query(query, unchecked_ssmax_factor(num_keys, s, bias))


def _weighed_keys(
    attend: Callable[[Tensor, Tensor], Any], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """(B, H, Q): how many keys the kernel itself gives weight to, when no logit is larger.

    Values that are 1 in one place each make its output the weights of as many keys as they are
    wide.
    """
    weighed = torch.zeros((), dtype=torch.long, device=query.device)
    for keys in torch.arange(key.shape[2], device=query.device).split(value.shape[-1]):
        one_hot = torch.zeros_like(value)
        one_hot[:, :, keys, keys - keys[0]] = 1
        weights_BQHD, *_ = attend(torch.zeros_like(query), one_hot)
        weighed = weighed + (weights_BQHD > 0).sum(-1).transpose(1, 2)
    return weighed


@contextmanager
def watched(watch: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """Be told of every scaled query meanwhile: its module, its n, itself before."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


@contextmanager
def audited(audit: Callable[[nn.Module, Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """Be told of every scaled query meanwhile: its module, its n, its keys, what is weighed."""
    _auditors.append(audit)
    try:
        yield
    finally:
        _auditors.remove(audit)
