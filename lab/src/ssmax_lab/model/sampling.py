"""Prompts in, tokens out: padding, and the choice of the next token."""

# B batch, T tokens, V vocabulary

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.ops.dtypes import autocast_dtype
from ssmax_lab.model.config import check_sampling

COLDEST = 1e-20
"""Below it logits divided by the temperature overflow; long before, the largest takes all."""


def chooser(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Callable[[Tensor], Tensor]:
    """The function that chooses tokens (B,) from logits (B, V)."""
    check_sampling(temperature, top_k, top_p)

    def greedy(logits_BV: Tensor) -> Tensor:
        return logits_BV.argmax(-1)

    def sample(logits_BV: Tensor) -> Tensor:
        logits_BV = keep_likeliest(logits_BV / temperature, top_k, top_p)
        return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(-1)

    return sample if temperature > COLDEST else greedy


def keep_likeliest(logits_BV: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """-inf for all but the k likeliest and all beyond the likeliest that reach probability p."""
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ordered_BV, order_BV = logits_BV.sort(-1, descending=True)
        weights_BV = ordered_BV.softmax(-1)
        # A token goes if those before it reach p already; the first always stays.
        beyond_BV = weights_BV.cumsum(-1) - weights_BV >= top_p
        logits_BV = logits_BV.masked_fill(
            torch.zeros_like(beyond_BV).scatter(-1, order_BV, beyond_BV), -torch.inf
        )
    return logits_BV


def left_padded(
    prompts: Sequence[Sequence[int]] | Tensor, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Prompts of unequal length as one batch (B, T), and where it holds tokens (B, T)."""
    rows = [torch.as_tensor(prompt) for prompt in prompts]
    if not rows:
        raise UsageError("prompts must hold at least one prompt, got none")
    for number, row in enumerate(rows):
        if row.dim() != 1 or row.numel() == 0:
            came = f"has shape {tuple(row.shape)}" if row.numel() else "is empty"
            raise UsageError(
                f"every prompt must be a list of at least one token; prompt {number} {came}"
            )
        if row.is_floating_point() or row.dtype == torch.bool:
            raise UsageError(f"tokens must be integers; prompt {number} holds {row.dtype}")
        # Tokens on disk are uint16, of which torch knows no least.
        row = rows[number] = row.long()
        if not (int(row.min()) >= 0 and int(row.max()) < vocab_size):
            raise UsageError(
                f"tokens must lie in 0..{vocab_size - 1}; prompt {number} holds "
                f"{int(row.min())}..{int(row.max())}. Is it another tokenizer's?"
            )
    longest = max(row.numel() for row in rows)
    tokens_BT = torch.stack([torch.nn.functional.pad(r, (longest - r.numel(), 0)) for r in rows])
    pads_B1 = torch.tensor([[longest - row.numel()] for row in rows])
    keep_BT = torch.arange(longest) >= pads_B1
    return tokens_BT.to(device), keep_BT.to(device)


def cache_dtype(weight: Tensor) -> torch.dtype:
    """What projections give: the weights' dtype, or autocast's."""
    return autocast_dtype(weight.device, weight.dtype) or weight.dtype
