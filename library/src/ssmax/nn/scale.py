"""SSMaxScale: the factor that multiplies the query, under any rule of the family.

Parameters are raw values of shape (heads,), `scale` being the paper's s and `bias` its b: one
dimension, so that weight decay on matrices leaves them alone.
"""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.errors import UsageError
from ssmax.nn.rules import RULES
from ssmax.ops.length import check_length
from ssmax.ops.scale import check_num_keys, unchecked_ssmax_factor
from ssmax.ops.visible import can_read_without_sync


class _KeepsFloat32(nn.Module):
    """Parameters that `.half()` and `.to(bfloat16)` pass by, since their updates are smaller."""

    def _apply(self, fn, recurse: bool = True):
        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_narrow = moved.is_floating_point() and torch.finfo(moved.dtype).bits < 32
            return tensor.to(moved.device, torch.float32) if is_narrow else moved

        return super()._apply(at_least_float32, recurse)

    def _load_from_state_dict(self, state_dict, prefix, *rest: Any, **named: Any) -> None:
        # With assign=True what is loaded becomes the parameter, as narrow as it is.
        for name in self._parameters:
            found = state_dict.get(prefix + name)
            if isinstance(found, Tensor) and found.is_floating_point() and found.itemsize < 4:
                state_dict[prefix + name] = found.float()
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)


class ProbeTable(_KeepsFloat32):
    """The probe's p_n for n = 1..L: one table, owned by the model and shared by its layers."""

    def __init__(self, train_length: int) -> None:
        super().__init__()
        check_length(train_length, "train_length")
        self.p: nn.Parameter = nn.Parameter(torch.empty(int(train_length), dtype=torch.float32))
        self._has_warned = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set p_n = 1: softmax."""
        nn.init.ones_(self.p)

    def forward(self, num_keys: Tensor) -> Tensor:
        """Return the table; warn the first time that n lies beyond it."""
        length = self.p.shape[0]
        can_read = num_keys.numel() and can_read_without_sync(num_keys)
        if can_read and not self._has_warned and int(num_keys.max()) > length:
            warnings.warn(
                f"the probe's table ends at n = {length}; beyond it p_n holds its last value, so "
                f"n = {int(num_keys.max())} is scaled as n = {length}",
                stacklevel=4,
            )
            self._has_warned = True
        return self.p


class SSMaxScale(_KeepsFloat32):
    """`forward(num_keys)` gives the factor (heads, T) for num_keys (T,), (B, heads, T) for (B, T).

    `train_length` is the length of the training sequences; rules that start from it, or are
    defined by it, ask for it. `beta` and `floor_length` belong to `llama4` and `ministral3`. The
    probe makes a table of its own unless it is given the model's.
    """

    s: Tensor
    bias: Tensor
    beta: Tensor | float
    gamma: Tensor
    floor_length: int

    def __init__(
        self,
        num_heads: int,
        rule: str = "ssmax",
        train_length: int | None = None,
        *,
        beta: float | None = None,
        floor_length: int | None = None,
        table: ProbeTable | None = None,
    ) -> None:
        super().__init__()
        if rule not in RULES:
            raise UsageError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        if num_heads < 1:
            raise UsageError(f"num_heads must be at least 1, got {num_heads}")
        spec = RULES[rule]
        if spec.needs_length and train_length is None:
            raise UsageError(
                f"rule={rule!r} needs train_length, the length of the training sequences, "
                "for example train_length=1024"
            )
        if train_length is not None:
            check_length(train_length, "train_length")
            train_length = int(train_length)
        if spec.floor_length is None and not (beta is None and floor_length is None):
            raise UsageError(f"beta and floor_length belong to llama4 and ministral3, not {rule!r}")
        if floor_length is not None and floor_length < 1:
            raise UsageError(f"floor_length must be at least 1, got {floor_length}")
        if table is not None and rule != "probe":
            raise UsageError(f"table belongs to rule='probe', not to {rule!r}")
        if table is not None and table.p.shape[0] != train_length:
            raise UsageError(
                f"the table ends at n = {table.p.shape[0]}, train_length is {train_length}"
            )
        self.num_heads = num_heads
        self.rule = rule
        self.train_length = train_length
        if spec.floor_length is not None:
            self.beta = 0.1 if beta is None else beta
            self.floor_length = floor_length or spec.floor_length
        for name in spec.learned:
            # float32 whatever the default dtype: bfloat16 would round the updates of s away.
            setattr(self, name, nn.Parameter(torch.empty(num_heads, dtype=torch.float32)))
        if rule == "probe":
            assert train_length is not None
            self.table: ProbeTable | None = ProbeTable(train_length) if table is None else None
            # In a tuple, so that a table shared by the layers is registered by its owner alone.
            self._shared_table = (table,)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the rule's initial values: those that leave training where softmax starts."""
        # Values that start at no length, or come from a checkpoint, take any here.
        length = 2 if self.train_length is None else self.train_length
        for name, initial in RULES[self.rule].learned.items():
            value = initial(length) if callable(initial) else initial
            nn.init.constant_(getattr(self, name), value)

    @property
    def length(self) -> int:
        """Return the training length of a rule that needs one."""
        # torch.jit.trace looks at every attribute that there is.
        if self.train_length is None:
            raise AttributeError(f"rule={self.rule!r} was given no train_length")
        return self.train_length

    def probe_table(self, num_keys: Tensor) -> Tensor:
        """Return the probe's table, its own or the model's."""
        owner = self.table or self._shared_table[0]
        assert owner is not None
        return owner(num_keys)

    def forward(self, num_keys: int | Tensor) -> Tensor:
        """Compute the factor (..., heads, T), float32 or wider, for num_keys (..., T).

        An int is the n of a single query: (heads, 1).
        """
        check_num_keys(num_keys)
        if not isinstance(num_keys, Tensor):
            rule = RULES[self.rule]
            if rule.affine is not None and rule.learned:
                s, bias = rule.affine(self.of_this_rank())
                return unchecked_ssmax_factor(num_keys, s, bias).unsqueeze(-1)
            device = next((p.device for p in self.parameters()), None)
            num_keys = torch.full((1,), num_keys, device=device)
        if num_keys.dim() not in (1, 2):
            raise UsageError(
                f"num_keys must be (queries,) or (batch, queries), got {tuple(num_keys.shape)}; "
                + (
                    "for a single number write n[None]"
                    if num_keys.dim() == 0
                    else "an n of its own for every head is ssmax_attention's, under attn_mask"
                )
            )
        factor = RULES[self.rule].compute(self.of_this_rank(), num_keys)
        if not RULES[self.rule].learned:
            factor = factor.unsqueeze(-2).expand(*num_keys.shape[:-1], self.num_heads, -1)
        return factor

    def of_this_rank(self) -> "SSMaxScale":
        """Return itself; where tensor parallelism has split the heads, a view with those here."""
        # By type first: a compiled graph asks for what was looked at before each of its runs.
        learned = [getattr(self, name) for name in RULES[self.rule].learned]
        if not any(type(x) is not nn.Parameter and hasattr(x, "to_local") for x in learned):
            return self
        here: Any = copy.copy(self)
        split: dict[str, Any] = dict(self._parameters)
        here._parameters = {name: parameter.to_local() for name, parameter in split.items()}
        return here

    def extra_repr(self) -> str:
        """Describe it in the module's print-out."""
        length = "" if self.train_length is None else f", train_length={self.train_length}"
        steps = ""
        if RULES[self.rule].floor_length is not None:
            steps = f", beta={self.beta}, floor_length={self.floor_length}"
        return f"{self.num_heads}, rule={self.rule!r}{length}{steps}"
