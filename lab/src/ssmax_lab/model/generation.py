"""Generate one token after the other, for prompts of unequal length."""

# B batch, T tokens, V vocabulary

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.nn import KVCache
from ssmax.ops.dtypes import autocast_dtype
from ssmax_lab.model.config import check_sampling

if TYPE_CHECKING:
    from ssmax_lab.model.model import LM

COLDEST = 1e-20
"""Below it logits divided by the temperature overflow; long before, the largest takes all."""


def chooser(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Callable[[Tensor], Tensor]:
    """Make the function that chooses tokens (B,) from logits (B, V)."""
    check_sampling(temperature, top_k, top_p)

    def greedy(logits_BV: Tensor) -> Tensor:
        return logits_BV.argmax(-1)

    def sample(logits_BV: Tensor) -> Tensor:
        logits_BV = keep_likeliest(logits_BV / temperature, top_k, top_p)
        return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(-1)

    return sample if temperature > COLDEST else greedy


def keep_likeliest(logits_BV: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Set to -inf all but the k likeliest, and all beyond the likeliest that reach p."""
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
    """Pad prompts to one batch (B, T); give where it holds tokens (B, T)."""
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
    """Return what projections give: the weights' dtype, or autocast's."""
    return autocast_dtype(weight.device, weight.dtype) or weight.dtype


class Decoder:
    """`start` reads the prompts, `step` takes everybody's next token; both give logits (B, V).

    Rows are padded on the left.
    """

    def __init__(self, model: "LM", *, batch: int, max_keys: int) -> None:
        config, weight = model.config, model.embedding.weight
        self.model: LM = model
        self.cache: KVCache = KVCache.preallocated(
            config.num_layers,
            batch=batch,
            num_kv_heads=config.kv_heads,
            max_keys=max_keys,
            head_dim=config.head,
            dtype=cache_dtype(weight),
            device=weight.device,
        )

    @torch.no_grad()
    def start(self, tokens_BT: Tensor, keep_BT: Tensor) -> Tensor:
        """Read the prompts; keep_BT is False on their padding."""
        self.keep_BT = None if bool(keep_BT.all()) else keep_BT
        return self._after(tokens_BT)

    @torch.no_grad()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Add a token to every row."""
        if self.keep_BT is not None:
            self.keep_BT = F.pad(self.keep_BT, (0, 1), value=True)
        return self._after(tokens_B.unsqueeze(-1))

    def _after(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTC = self.model.hidden(tokens_BT, cache=self.cache, key_padding_mask=self.keep_BT)
        return self.model.head(hidden_BTC[:, -1])


def decode(
    model: "LM",
    tokens_BT: Tensor,
    keep_BT: Tensor,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    stop_tokens: frozenset[int],
) -> Iterator[list[int | None]]:
    """Yield each step's token for every prompt, None for one that has stopped."""
    if not max_new_tokens:
        return
    batch, longest = tokens_BT.shape
    decoder = Decoder(model, batch=batch, max_keys=longest + max_new_tokens)
    running = [True] * batch
    logits_BV = decoder.start(tokens_BT, keep_BT)
    for left in reversed(range(max_new_tokens)):
        chosen_B = choose(logits_BV.float())
        step: list[int | None] = []
        for row, token in enumerate(chosen_B.tolist()):
            running[row] = running[row] and token not in stop_tokens
            step.append(token if running[row] else None)
        if not any(running):
            return
        yield step
        if left:
            logits_BV = decoder.step(chosen_B)
