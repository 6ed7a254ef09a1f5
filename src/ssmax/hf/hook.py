"""The one place where Transformers is entered: every attention function is asked for here.

A module that carries an `ssmax` has its query scaled before the function that Transformers would
have called; for all others nothing changes. The hook is installed by the first conversion.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.hf.counting import Kind, kind_of, sees_every_key, visible_keys
from ssmax.nn import RULES, SSMaxScale
from ssmax.ops.rope_scale.api import scale_query

ATTRIBUTE = "ssmax"
OLDEST, NEWEST = (5, 1), (5, 22)
"""The first Transformers whose models all ask in one place, and the last that was tested."""

# Called with a module, its n and, for a watcher, its query; for an auditor, what the kernel weighs.
_watchers: list[Callable[[nn.Module, Tensor, Tensor], None]] = []
_auditors: list[Callable[[nn.Module, Tensor, Tensor], None]] = []
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


class Company:
    """The scales of one model, whose factors for one n are made together.

    An eager decoder's time is that of its calls, one after the other: a launch for the factors of
    all layers instead of one for each is the difference between 3 % and 1 % of a token.
    """

    def __init__(self, scales: Iterable["HookedScale"]) -> None:
        self.scales: list[HookedScale] = list(scales)
        self._made: dict[HookedScale, tuple[tuple[int, int], Tensor]] = {}

    def factor(self, scale: "HookedScale", num_keys: int) -> Tensor:
        """(heads,), float32 or wider, for the n of a single query; without gradients."""
        # A thread may have a stream of its own.
        mine = (threading.get_ident(), num_keys)
        # Each is used once, and the first layer always begins anew: s may have changed since.
        found = self._made.pop(scale, None)
        if found is None or found[0] != mine or scale is self.scales[0]:
            # Offloaded layers are elsewhere until it is their turn.
            device = scale.scale.device
            learnt: list[dict[str, Any]] = [each._parameters for each in self.scales]
            here = [i for i, each in enumerate(learnt) if each["scale"].device == device]
            s = [learnt[i]["scale"] for i in here]
            log_n = math.log(num_keys)
            # Names with an underscore that PyTorch's own optimizers, and others, stand on.
            if scale.rule == "ssmax":
                made = torch._foreach_mul(s, log_n)  # pyright: ignore[reportPrivateImportUsage]
            else:
                b = [learnt[i]["bias"] for i in here]
                made = torch._foreach_add(b, s, alpha=log_n)  # pyright: ignore[reportPrivateImportUsage]
            ready = {self.scales[i]: (mine, x) for i, x in zip(here, made, strict=True)}
            found = ready.pop(scale)
            self._made = ready
        return found[1]


class HookedScale(SSMaxScale):
    """An SSMaxScale that knows those of its model, and brings the hook along where it goes."""

    company: Company | None = None

    def forward(self, num_keys: int | Tensor) -> Tensor:
        """As SSMaxScale's."""
        # In this order: a compiled graph, which has no ints, looks at nothing else, and so asks for
        # nothing else before each of its runs.
        if (
            isinstance(num_keys, int)
            and not torch.is_grad_enabled()
            and self.company is not None
            # Tensor parallelism and FSDP leave other types.
            and type(self._parameters.get("scale")) is nn.Parameter
        ):
            return self.company.factor(self, num_keys).unsqueeze(-1)
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
        kind = _known_kind(implementation)
        # An int needs no launch; under torch.compile it would need a graph for every length.
        is_quick = not torch.compiler.is_compiling()
        if is_quick and sees_every_key(kind, query, attention_mask, options):
            num_keys = key.shape[2]
        else:
            num_keys = visible_keys(kind, module, query, key, attention_mask, options)
        for watch in _watchers:
            watch(module, _as_tensor(num_keys, query), query)
        for audit in _auditors:

            def attend(query: Tensor, value: Tensor) -> Any:
                return function(module, query, key, value, attention_mask, *arguments, **options)

            audit(module, _as_tensor(num_keys, query), _weighed_keys(attend, query, key, value))
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
        raise ValueError(
            f"the attention implementation {implementation!r} is not known, so it cannot be known "
            "what it masks; use eager, sdpa, flex_attention or flash attention"
        )
    return kind


def _as_tensor(num_keys: int | Tensor, query: Tensor) -> Tensor:
    if isinstance(num_keys, Tensor):
        return num_keys
    return torch.full((query.shape[2],), num_keys, device=query.device)


def _scaled(module: nn.Module, scale: Any, query: Tensor, num_keys: int | Tensor) -> Tensor:
    if isinstance(num_keys, int) and not RULES[scale.rule].learnt:
        # The same for every head, and on no device: a number.
        return query * scale(num_keys)[0].item()
    if isinstance(num_keys, int) or num_keys.dim() < 3:
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
def audited(audit: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """Be told of every scaled query meanwhile: its module, its n, what its kernel weighs."""
    _auditors.append(audit)
    try:
        yield
    finally:
        _auditors.remove(audit)
