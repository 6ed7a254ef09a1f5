"""Causal windows by a kernel that knows no windows: two plain triangles a block.

Tokens are cut into blocks as long as the window. In its own block a query sees the causal triangle.
In the block before it sees what its window still reaches, which is a causal triangle too when
queries and keys are read backwards. Both halves are attended to by cuDNN, whose triangles are the
fastest there are on Hopper, and merged by their log-sum-exp. With the merged output and log-sum-exp
the kernel's own backward gives each half its share of the gradient.
"""

# B batch, N blocks, H query heads, G key heads, W window, D head_dim

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.implementation import choose_impl
from ssmax.ops.visible import is_eager
from ssmax.ops.window import UNBOUNDED

SHORTEST = 512
"""Below it variable-length FlashAttention is over before the halves are merged."""
MOST_PADDING = 1.25
"""The last block is filled up; where that makes the row longer than so many times, it is not."""


def serves(inputs: AttentionInputs) -> bool:
    """True where the window is worth cutting, on a GPU whose cuDNN is fast."""
    spec, q = inputs.mask_spec, inputs.q_BHTD
    window = spec.window[0] + 1
    return (
        inputs.on_gpu
        # First: what follows would tie a compiled graph to its lengths.
        and is_eager(q)
        and spec.is_interval
        and spec.is_causal
        and spec.bounds_start
        and spec.window[0] != UNBOUNDED
        and spec.cu_seqlens is spec.positions is spec.stands_at is None
        and spec.num_queries == spec.num_keys
        and window >= SHORTEST
        and -(-spec.num_queries // window) * window <= MOST_PADDING * spec.num_queries
        and inputs.dropout_p == 0.0
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] == inputs.v_BGSD.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


def attend(inputs: AttentionInputs) -> Tensor:
    """Cut into blocks, attend, and put together."""
    tokens, window = inputs.mask_spec.num_queries, inputs.mask_spec.window[0] + 1
    filling = -tokens % window

    def blocks(x_BHTD: Tensor) -> Tensor:
        # What fills the last block comes after every query, which hides it.
        x_BHTD = F.pad(x_BHTD, (0, 0, 0, filling)) if filling else x_BHTD
        return x_BHTD.unflatten(2, (-1, window)).transpose(1, 2)

    heads = (blocks(x) for x in (inputs.q_BHTD, inputs.k_BGSD, inputs.v_BGSD))
    out: Any = _Windowed.apply(*heads, inputs.scale)
    out_BHTD = out.transpose(1, 2).flatten(2, 3)
    return out_BHTD[:, :, :tokens] if filling else out_BHTD


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        batch = q.shape[0]
        out, lse, *extras = _causal(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale)
        far_out, far_lse, *far_extras = _causal(_late(q), _early(k), _early(v), scale)
        out, lse = (x.unflatten(0, (batch, -1)) for x in (out, lse))
        far_out, far_lse = (x.unflatten(0, (batch, -1)) for x in (far_out, far_lse))
        by_kernel = choose_impl("auto", out.device) == "triton"
        merge = _kernels().merge if by_kernel else merge_reference
        merge(out, lse, far_out, far_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.extras, ctx.far_extras = scale, extras, far_extras
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        dout = gradients[0]
        if dout.stride() != out.stride():
            # cuDNN keeps its plan by the layout of q, k and v alone: that of dout must not vary.
            dout = torch.empty_like(out).copy_(dout)
        near = (x.flatten(0, 1) for x in (dout, q, k, v, out, lse))
        far = (_late(dout), _late(q), _early(k), _early(v), _late(out), _late(lse))
        grads = [
            x.unflatten(0, q.shape[:2]) for x in _causal_backward(*near, ctx.scale, ctx.extras)
        ]
        far_grads = [
            x.unflatten(0, (q.shape[0], -1)).flip(-2)
            for x in _causal_backward(*far, ctx.scale, ctx.far_extras)
        ]
        grads[0][:, 1:, :, :-1] += far_grads[0]
        for grad, far_grad in zip(grads[1:], far_grads[1:], strict=True):
            grad[:, :-1, :, 1:] += far_grad
        return *grads, None


def merge_reference(out: Tensor, lse: Tensor, far_out: Tensor, far_lse: Tensor) -> None:
    """Merge the halves into `out` (B, N, H, W, D) and `lse` (B, N, H, W, 1) in place."""
    near_out, near_lse = out[:, 1:, :, :-1], lse[:, 1:, :, :-1]
    far_out, far_lse = far_out.flip(-2), far_lse.flip(-2)
    far_share = torch.sigmoid(far_lse - near_lse)
    near_out.copy_(near_out * (1 - far_share) + far_out * far_share)
    near_lse.copy_(torch.logaddexp(near_lse, far_lse))


def _late(x_BNHWD: Tensor) -> Tensor:
    """Queries that see keys of the block before, backwards: all but the last of each block."""
    return x_BNHWD[:, 1:, :, :-1].flip(-2).flatten(0, 1)


def _early(x_BNGWD: Tensor) -> Tensor:
    """Keys that queries of the next block see, backwards: all but the first of each block."""
    return x_BNGWD[:, :-1, :, 1:].flip(-2).flatten(0, 1)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Any, ...]:
    """Attend causally; also the log-sum-exp (..., T, 1), and what the backward asks for."""
    aten = torch.ops.aten
    if q.is_cuda:
        out, lse, *extras = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, scale=scale
        )
        return out, lse.reshape(*q.shape[:3], 1), *extras[:6]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, lse.contiguous().unsqueeze(-1)


def _causal_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, scale, extras = inputs
    aten = torch.ops.aten
    if tensors[0].is_cuda:
        cu_queries, cu_keys, max_queries, max_keys, *philox = extras
        return aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, *philox, None, cu_queries, cu_keys, max_queries, max_keys, 0.0, True,
            scale=scale,
        )  # fmt: skip
    *heads, lse = tensors
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads, lse.squeeze(-1), 0.0, True, scale=scale
    )


@functools.cache
def _kernels() -> Any:
    """Import the kernel, and with it Triton."""
    from ssmax.ops.backends.windowed import kernels

    return kernels
