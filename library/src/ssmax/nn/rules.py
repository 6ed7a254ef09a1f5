"""Every scaling rule by its name: how it makes its factor, and what it learns. Without torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from ssmax import ops
from ssmax.ops.length import initial_s, initial_sqrt_log_s

if TYPE_CHECKING:
    from torch import Tensor

    from ssmax.nn.scale import SSMaxScale
    from ssmax.ops.scale import Number


@dataclass(frozen=True)
class Rule:
    """How one rule makes its factor, and what it learns.

    One of your own goes into `RULES` by its name, and is known wherever a rule is named.
    """

    factor: "Callable[[SSMaxScale, Tensor], Tensor] | None" = None
    """Computes the factor from the module, which holds the parameters, and n (..., T): (..., heads,
    T), or (..., T) for a rule that learns nothing. None: `affine` does."""
    learned: dict[str, float | Callable[[int], float]] = field(default_factory=dict)
    """Name of each parameter and its initial value, or that of a training length."""
    affine: "Callable[[SSMaxScale], tuple[Number, Number | None]] | None" = None
    """s and b of a factor that is s log n + b (None: no b), which engines can express."""
    with_bias: str | None = None
    """The rule that learns a b besides: s = 0 and b = 1 start it as softmax."""
    needs_length: bool = False
    """True where its start or its definition needs `train_length`."""
    floor_length: int | None = None
    """Default L0 of the rules that grow in steps."""
    starts_as_softmax: bool = False
    """True where its first factor is 1 up to its length, or everywhere: `ssmax.hf.convert` takes it
    with init="identity"."""

    def compute(self, scale: "SSMaxScale", num_keys: "Tensor") -> "Tensor":
        """Compute the factor of a module's parameters and n."""
        if self.affine is not None:
            return ops.scale.ssmax_factor(num_keys, *self.affine(scale))
        assert self.factor is not None
        return self.factor(scale, num_keys)


RULES: dict[str, Rule] = {
    "softmax": Rule(affine=lambda m: (0.0, 1.0), starts_as_softmax=True),
    "temperature": Rule(learned={"s": 1.0}, affine=lambda m: (0.0, m.s), starts_as_softmax=True),
    "ssmax": Rule(
        learned={"s": initial_s},
        affine=lambda m: (m.s, None),
        with_bias="ssmax_bias",
        needs_length=True,
    ),
    "ssmax_no_s": Rule(affine=lambda m: (1.0, None)),
    "ssmax_bias": Rule(
        learned={"s": initial_s, "bias": 0.0},
        affine=lambda m: (m.s, m.bias),
        with_bias="ssmax_bias",
        needs_length=True,
    ),
    "ssmax_held": Rule(
        lambda m, n: ops.scale.held_ssmax_factor(n, m.s, m.length),
        {"s": initial_s},
        needs_length=True,
    ),
    "mean_log": Rule(affine=lambda m: (0.0, 1.0 / initial_s(m.length)), needs_length=True),
    "probe": Rule(
        lambda m, n: ops.scale.probe_factor(n, m.s, m.bias, m.probe_table(n)),
        {"s": 1.0, "bias": 0.0},
        needs_length=True,
        starts_as_softmax=True,
    ),
    "entropy_invariant": Rule(affine=lambda m: (1.0 / math.log(m.length), None), needs_length=True),
    "clamp": Rule(
        lambda m, n: ops.scale.clamp_factor(n, m.length),
        needs_length=True,
        starts_as_softmax=True,
    ),
    "llama4": Rule(
        lambda m, n: ops.scale.llama4_factor(n, float(m.beta), m.floor_length),
        floor_length=8192,
        starts_as_softmax=True,
    ),
    "ministral3": Rule(
        lambda m, n: ops.scale.ministral3_factor(n, float(m.beta), m.floor_length),
        floor_length=16384,
        starts_as_softmax=True,
    ),
    "yarn": Rule(
        lambda m, n: ops.scale.yarn_factor(n, m.length), needs_length=True, starts_as_softmax=True
    ),
    "sqrt_log": Rule(
        lambda m, n: ops.scale.sqrt_log_factor(n, m.s),
        {"s": initial_sqrt_log_s},
        needs_length=True,
    ),
    # beta = 0 is softmax; gamma = 1 makes the first step that of s log n.
    "polylog": Rule(
        lambda m, n: ops.scale.polylog_factor(n, m.beta, m.gamma),
        {"beta": 0.0, "gamma": 1.0},
        starts_as_softmax=True,
    ),
}
"""Every rule by its name, added ones included."""
OWN_RULES: Mapping[str, Rule] = MappingProxyType(dict(RULES))
"""Those of this package, as it defines them."""
