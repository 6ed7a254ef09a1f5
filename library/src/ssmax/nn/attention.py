"""Causal self-attention with rotary positions and any rule of the family."""

# B batch, T new tokens, S keys, C hidden size, H query heads, G key heads, D head_dim

import functools
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from ssmax.distributed import SequenceShard
from ssmax.errors import UsageError
from ssmax.nn.cache import KVCache
from ssmax.nn.norm import RMSNorm
from ssmax.nn.rotary import RotaryEmbedding
from ssmax.nn.rules import RULES
from ssmax.nn.scale import ProbeTable, SSMaxScale
from ssmax.ops import visible
from ssmax.ops.backends import Backend, attend
from ssmax.ops.backends.eager import attention_weights
from ssmax.ops.implementation import choose_impl
from ssmax.ops.rope import rope_tables
from ssmax.ops.rope_scale.api import rope_scale, rope_scale_by_kernel, rope_ssmax
from ssmax.ops.visible import MaskSpec, is_eager
from ssmax.ops.window import Window, window_pair


class SelfAttention(nn.Module):
    """Grouped heads, optional QK-norm, rotary positions, and a query scaled by its n.

    >>> attention = SelfAttention(768, 12, train_length=1024)
    >>> y_BTC = attention(x_BTC)

    `num_kv_heads` below `num_heads` groups queries; `head_dim` is hidden_size / num_heads unless it
    is given. `rule`, `train_length`, `beta`, `floor_length` and `table` are those of `SSMaxScale`;
    a `table` that layers share has to be a module of the model too, which trains and saves it.
    `theta` and `rotary_dim` are the rotary base and the channels of a head that turn, all by
    default and 0 for none. `window` and `is_causal` are as in `ssmax_attention`, as is `backend`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: Window
    is_causal: bool
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    rotary: RotaryEmbedding
    ssmax: SSMaxScale

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rule: str = "ssmax",
        train_length: int | None = None,
        theta: float = 10_000.0,
        rotary_dim: int | None = None,
        qk_norm: bool = False,
        window: Window = None,
        is_causal: bool = True,
        bias: bool = False,
        dropout_p: float = 0.0,
        backend: Backend = "auto",
        beta: float | None = None,
        floor_length: int | None = None,
        table: ProbeTable | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise UsageError(
                f"query heads must be a multiple of key heads, got {num_heads} and {num_kv_heads}"
            )
        if head_dim is None:
            if hidden_size % num_heads:
                raise UsageError(
                    f"hidden_size must be a multiple of num_heads, got {hidden_size} and "
                    f"{num_heads}; or pass head_dim"
                )
            head_dim = hidden_size // num_heads
        if rotary_dim is not None and rotary_dim > head_dim:
            raise UsageError(f"rotary_dim must be at most head_dim, {head_dim}, got {rotary_dim}")
        window_pair(window)  # raises on a window that is none
        if backend not in get_args(Backend):
            raise UsageError(
                f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}"
            )
        if not 0.0 <= dropout_p < 1.0:
            raise UsageError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window, self.is_causal = window, is_causal
        self.dropout_p = dropout_p
        self.backend: Backend = backend
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.q_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.rotary = RotaryEmbedding(head_dim if rotary_dim is None else rotary_dim, theta)
        self.ssmax = SSMaxScale(
            num_heads, rule, train_length, beta=beta, floor_length=floor_length, table=table
        )

    def forward(
        self,
        x_BTC: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        mask_spec: MaskSpec | None = None,
        num_keys: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        shard: SequenceShard | None = None,
    ) -> Tensor:
        """Attend from the new tokens to all keys; a cache is written, not advanced.

        `key_padding_mask` (B, S) and `cu_seqlens` cover the cached keys too; `positions` restart
        with each packed document. A model computes `mask_spec`, `num_keys` and `rotary` once for
        all its layers and hands them in, in place of the above and of the layer's own window;
        alone, the layer makes them itself. With a `shard` x holds this rank's tokens of a sequence
        that is split over ranks; positions and documents are the shard's.
        """
        if x_BTC.dim() != 3:
            raise UsageError(f"x must be (batch, tokens, hidden size), got {tuple(x_BTC.shape)}")
        if shard is not None:
            given = (key_padding_mask, positions, cu_seqlens, cache, mask_spec)
            if any(one is not None for one in given):
                raise UsageError(
                    "a shard has its positions and documents, and takes no padding and no cache; "
                    "pass nothing else of that kind with it"
                )
            return self._split(x_BTC, shard, num_keys, rotary)
        num_new = x_BTC.shape[1]
        past = 0 if cache is None else cache.length
        given = (key_padding_mask, positions, cu_seqlens, mask_spec, num_keys, rotary)
        log_n = None
        if all(one is None for one in given) and self._may_remember(x_BTC):
            mask_spec, num_keys, log_n, rotary = _by_position(
                past, num_new, self.is_causal, self.window, self.rotary.width, self.rotary.theta,
                x_BTC.device,
            )  # fmt: skip
        elif mask_spec is not None:
            _check_mask_spec(mask_spec, num_new, past + num_new, key_padding_mask, cu_seqlens)
        else:
            mask_spec = visible.mask_spec(
                num_new,
                past + num_new,
                is_causal=self.is_causal,
                window=self.window,
                cu_seqlens=cu_seqlens,
                key_padding_mask=key_padding_mask,
                positions=positions,
                batch=x_BTC.shape[0],
                device=x_BTC.device,
            )
        if num_keys is None:
            num_keys = mask_spec.num_visible()
        if rotary is None:
            if positions is None:
                positions = torch.arange(past, past + num_new, device=x_BTC.device)
            rotary = self.rotary(positions)
        assert num_keys is not None and rotary is not None
        cos, sin = rotary
        q_BHTD, k_BGTD = self._query_and_key(x_BTC, num_keys, cos, sin, log_n)
        v_BGTD = self._heads(self.v_proj(x_BTC))
        if cache is not None:
            k_BGTD, v_BGTD = cache.write(layer, k_BGTD, v_BGTD)
        out_BHTD = attend(
            q_BHTD,
            k_BGTD,
            v_BGTD,
            mask_spec,
            dropout_p=self.dropout_p if self.training else 0.0,
            backend=self.backend,
        )
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(-2))

    def _split(
        self,
        x_BTC: Tensor,
        shard: SequenceShard,
        num_keys: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Attend from this rank's tokens to those of all ranks."""
        if not self.is_causal or (self.training and self.dropout_p):
            raise UsageError(
                "attention over a split sequence is causal and has no dropout, got "
                f"is_causal={self.is_causal} and dropout_p={self.dropout_p}"
            )
        num_keys = shard.num_keys(self.window) if num_keys is None else num_keys
        cos, sin = self.rotary(shard.positions) if rotary is None else rotary
        q_BHTD, k_BGTD = self._query_and_key(x_BTC, num_keys, cos, sin)
        v_BGTD = self._heads(self.v_proj(x_BTC))
        # The query is scaled already.
        out_BHTD = shard.attention(
            q_BHTD, k_BGTD, v_BGTD, 0.0, bias=1.0, window=self.window, backend=self.backend
        )
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(-2))

    def rows(
        self,
        x_BTC: Tensor,
        rows: Sequence[int] | Tensor,
        *,
        mask_spec: MaskSpec,
        num_keys: Tensor,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Compute the attention weights of chosen queries, (B, H, rows, S), in float32 or wider."""
        q_BHTD, k_BGTD = self._query_and_key(x_BTC, num_keys, *rotary)
        rows = torch.arange(x_BTC.shape[1], device=x_BTC.device)[torch.as_tensor(rows)]
        return attention_weights(q_BHTD[:, :, rows], k_BGTD, mask_spec.at(rows))

    def joined_heads(
        self, qkv_BTE: Tensor, num_keys: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split the product with all three weights into query, key and value for attention."""
        widths = [heads * self.head_dim for heads in (self.num_heads, *2 * (self.num_kv_heads,))]
        q_BHTD, k_BGTD, v_BGTD = (self._heads(x) for x in qkv_BTE.split(widths, dim=-1))
        return *self._turned(q_BHTD, k_BGTD, num_keys, cos, sin), v_BGTD

    def _query_and_key(
        self,
        x_BTC: Tensor,
        num_keys: Tensor,
        cos: Tensor,
        sin: Tensor,
        log_n: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        q_BHTD, k_BGTD = self._heads(self.q_proj(x_BTC)), self._heads(self.k_proj(x_BTC))
        return self._turned(q_BHTD, k_BGTD, num_keys, cos, sin, log_n)

    def _turned(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        num_keys: Tensor,
        cos: Tensor,
        sin: Tensor,
        log_n: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Norm and rotate both, and scale the query."""
        q_BHTD, k_BGTD = self.q_norm(q_BHTD), self.k_norm(k_BGTD)
        # After the norm: an RMSNorm would divide the factor out again.
        rule = RULES[self.ssmax.rule]
        if rule.affine is not None and rule.learned:
            s, b = rule.affine(self.ssmax.of_this_rank())
            by_kernel = choose_impl("auto", q_BHTD.device) == "triton" and q_BHTD.shape[2] > 1
            if log_n is not None and isinstance(s, Tensor) and by_kernel:
                factor = s.unsqueeze(-1) * log_n
                if isinstance(b, Tensor):
                    factor = factor + b.unsqueeze(-1)
                return rope_scale_by_kernel(q_BHTD, k_BGTD, cos, sin, factor.unsqueeze(0))
            return rope_ssmax(q_BHTD, k_BGTD, cos, sin, num_keys, s, b)
        factor = self.ssmax(num_keys)
        if not rule.learned and factor.shape[-2] != q_BHTD.shape[1]:
            # Tensor parallelism has split the heads, and the rule is the same for all of them.
            factor = factor[..., :1, :]
        return rope_scale(q_BHTD, k_BGTD, cos, sin, factor)

    def _may_remember(self, x_BTC: Tensor) -> bool:
        """True in eager code with positions of its own; what a CUDA graph makes must stay in it."""
        return (
            type(self.rotary) is RotaryEmbedding
            and not isinstance(self.window, list)
            and is_eager(x_BTC)
            and not (x_BTC.is_cuda and torch.cuda.is_current_stream_capturing())
        )

    def extra_repr(self) -> str:
        """Describe it in the module's print-out."""
        window = "" if self.window is None else f", window={self.window}"
        return (
            f"{self.num_heads} heads of {self.head_dim}, {self.num_kv_heads} of keys"
            f"{window}, is_causal={self.is_causal}"
        )

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


@functools.lru_cache(maxsize=16)
def _by_position(
    past: int,
    num_new: int,
    is_causal: bool,
    window: Window,
    rotary_dim: int,
    theta: float,
    device: torch.device,
) -> tuple[MaskSpec, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Make all that layers of one kind share: mask spec, n, log n, cos and sin."""
    with torch.inference_mode(False), torch.no_grad():
        spec = visible.mask_spec(
            num_new, past + num_new, is_causal=is_causal, window=window, device=device
        )
        n = spec.num_visible()
        positions = torch.arange(past, past + num_new, device=device)
        return spec, n, n.float().log(), rope_tables(positions, rotary_dim, theta)


def _check_mask_spec(
    mask_spec: MaskSpec,
    num_new: int,
    num_keys: int,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    if key_padding_mask is not None or cu_seqlens is not None:
        raise UsageError(
            "mask_spec says what is visible; pass no key_padding_mask or cu_seqlens too"
        )
    if (mask_spec.num_queries, mask_spec.num_keys) != (num_new, num_keys):
        raise UsageError(
            f"mask_spec must be of {num_new} queries and {num_keys} keys, "
            f"got {mask_spec.num_queries} and {mask_spec.num_keys}"
        )
