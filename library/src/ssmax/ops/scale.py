"""Every scaling rule as a factor of n: the reference for the log that kernels take.

A rule multiplies the query by its factor; softmax does the rest. Here each rule is one function of
num_keys and, where it learns, of one value per head. The factor is float32 or wider throughout and
is cast once, by whoever multiplies the query: in bfloat16, log n is one number from 58,032 to
61,774 keys.

Shapes: num_keys (..., T) and values per head (H,) give (..., H, T); scalar values give (..., T);
values of two or more dimensions broadcast against num_keys as they stand.
"""

import functools
import math
from numbers import Real

import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.ops.dtypes import at_least_float32
from ssmax.ops.visible import can_read_without_sync

Number = float | Tensor

# The first log, cosine or root of a process must not be taken by two threads at once: MKL 2024.2,
# which CPU builds of torch bring along, may then give one of them a kernel of half the digits
# (pytorch/pytorch#188792). One element is one thread's, and settles it for all functions.
torch.ones(1, dtype=torch.float32, device="cpu").log()


def ssmax_factor(num_keys: int | Tensor, s: Number, bias: Number | None = None) -> Tensor:
    """Compute s log n + b, the factor of Scalable-Softmax."""
    check_num_keys(num_keys)
    check_finite("s", s)
    if bias is not None:
        check_finite("bias", bias)
    return unchecked_ssmax_factor(num_keys, s, bias)


def unchecked_ssmax_factor(num_keys: int | Tensor, s: Number, bias: Number | None = None) -> Tensor:
    """Compute it for n and s that were checked before: reading them again takes time."""
    if isinstance(num_keys, int) and isinstance(s, Tensor) and isinstance(bias, Tensor | None):
        # In one launch: the step of an eager decoder is made of little else.
        log_n, s = math.log(num_keys), s.to(at_least_float32(s.dtype))
        return s * log_n if bias is None else torch.add(bias, s, alpha=log_n)
    if bias is None:
        n, s = _per_head(num_keys, s)
        return s * n.log()
    n, s, b = _per_head(num_keys, s, bias)
    return s * n.log() + b


def held_ssmax_factor(num_keys: int | Tensor, s: Number, train_length: int) -> Tensor:
    """Compute s log min(n, L): SSMax up to the training length, a constant beyond."""
    is_tensor = isinstance(num_keys, Tensor)
    return ssmax_factor(
        num_keys.clamp_max(train_length) if is_tensor else min(num_keys, train_length), s
    )


def probe_factor(num_keys: Tensor, s: Number, bias: Number, table: Tensor) -> Tensor:
    """Compute s p_n + b with p_n from a table over n = 1..L, held at its last value beyond."""
    index = (num_keys - 1).clamp(0, table.shape[0] - 1).long()
    p_n, s, b = _per_head(table[index], s, bias)
    return s * p_n + b


def clamp_factor(num_keys: int | Tensor, train_length: int) -> Tensor:
    """Compute max(1, log n / log L): softmax within the training length."""
    (n,) = _per_head(num_keys)
    return (n.log() / math.log(train_length)).clamp_min(1.0)


def llama4_factor(num_keys: int | Tensor, beta: float, floor_length: int) -> Tensor:
    """Compute 1 + beta log(1 + floor(n / L0)): Llama 4 counts n, the position plus one."""
    (steps,) = _per_head(1 + torch.as_tensor(num_keys) // floor_length)
    return 1.0 + beta * steps.log()


def ministral3_factor(num_keys: int | Tensor, beta: float, floor_length: int) -> Tensor:
    """Compute 1 + beta log(1 + floor((n - 1) / L0)): Ministral 3 counts positions, n - 1."""
    return llama4_factor(torch.as_tensor(num_keys) - 1, beta, floor_length)


def yarn_factor(num_keys: int | Tensor, train_length: int) -> Tensor:
    """Compute (0.1 log max(n / L, 1) + 1)^2: YaRN scales query and key alike."""
    (n,) = _per_head(num_keys)
    return (0.1 * (n.log() - math.log(train_length)).clamp_min(0.0) + 1.0).square()


def sqrt_log_factor(num_keys: int | Tensor, s: Number) -> Tensor:
    """Compute s sqrt(log n)."""
    n, s = _per_head(num_keys, s)
    return s * n.log().sqrt()


def polylog_factor(num_keys: int | Tensor, beta: Number, gamma: Number) -> Tensor:
    """Compute 1 + beta (log n)^gamma, 1 at n = 1 whatever gamma is."""
    n, beta, gamma = _per_head(num_keys, beta, gamma)
    grown = n > 1
    power = torch.where(grown, n.log(), 1.0) ** gamma
    return 1.0 + beta * torch.where(grown, power, 0.0)


def check_num_keys(num_keys: int | Tensor) -> None:
    """Raise on an n below 1, where its values can be read."""
    if isinstance(num_keys, Tensor) and not (can_read_without_sync(num_keys) and num_keys.numel()):
        return
    if not isinstance(num_keys, Tensor | Real | torch.SymInt):
        raise UsageError(
            f"num_keys must be a number or a tensor, got {type(num_keys).__name__}; "
            "write torch.tensor(...) for several"
        )
    smallest = num_keys.min().item() if isinstance(num_keys, Tensor) else num_keys
    largest = num_keys.max().item() if isinstance(num_keys, Tensor) else num_keys
    if not 1 <= smallest <= largest < math.inf:
        wrong = largest if smallest >= 1 else smallest
        raise UsageError(
            f"num_keys must be at least 1 (log n is taken) and finite, got {wrong:g}; "
            "a query that sees nothing has n = 1"
        )


def check_finite(name: str, value: Number) -> None:
    """Raise on NaN and infinity, where the value can be read."""
    if isinstance(value, Tensor):
        values = value.flatten().tolist() if can_read_without_sync(value) else []
    else:
        values = [value]
    if not all(map(math.isfinite, values)):
        wrong = next(value for value in values if not math.isfinite(value))
        found = "NaN" if math.isnan(wrong) else f"{wrong:g}"
        raise UsageError(f"{name} holds {found}; the training that made it has diverged")


def _per_head(num_keys: int | Tensor, *values: Number) -> tuple[Tensor, ...]:
    """Shape n and the values per head for a product, float32 or wider."""
    tensors = [value for value in (num_keys, *values) if isinstance(value, Tensor)]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    n, *rest = (
        value.to(dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
        for value in (num_keys, *values)
    )
    if n.dim() and any(value.dim() == 1 for value in rest):
        n = n.unsqueeze(-2)
        rest = [value.unsqueeze(-1) if value.dim() == 1 else value for value in rest]
    return n, *rest
