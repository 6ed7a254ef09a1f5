"""scaled_dot_product_attention: every kernel of PyTorch's own, with a mask only where needed."""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssmax.errors import UsageError
from ssmax.ops.backends import padded
from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.visible import (
    ROWS_PER_BLOCK,
    MaskSpec,
    Span,
    can_read_without_sync,
    row_blocks,
)

SDPA_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# cuDNN is the fastest on Hopper, and SDPA's own order would take flash before it.
FASTEST_FIRST = [SDPA_KERNELS[name] for name in ("cudnn", "flash", "efficient", "math")]
# For every new number of keys cuDNN makes a plan, which takes 40 ms and more (LOG.md), and a
# decoder has a new one for every token.
WITHOUT_PLANS_FIRST = [SDPA_KERNELS[name] for name in ("flash", "efficient", "cudnn", "math")]
# As torch._C takes them: numbers, and all that there are.
_FASTEST_FIRST, _WITHOUT_PLANS_FIRST = (
    [kernel.value for kernel in (*order, SDPBackend.OVERRIDEABLE)]
    for order in (FASTEST_FIRST, WITHOUT_PLANS_FIRST)
)

# On a GPU larger blocks fill the chip; the mask over one stays below 512 MiB.
CUDA_MASK_ELEMENTS = 1 << 28


def plain_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, mask_spec: MaskSpec, scale: float | None, dropout_p: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return SDPA with its options for calls that need no mask; None for others."""
    needs_mask = not (mask_spec.sees_all or mask_spec.is_plain_causal)
    if needs_mask or 0 in (q_BHTD.numel(), k_BGSD.numel()):
        return None
    return functools.partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout_p,
        is_causal=mask_spec.is_plain_causal,
        scale=scale,
        enable_gqa=q_BHTD.shape[1] != k_BGSD.shape[1],
    )


def attend(inputs: AttentionInputs, kernel: str | None) -> Tensor:
    """Call SDPA with the named kernel, or with the fastest that takes the call."""
    mask_spec = inputs.mask_spec
    if not inputs.needs_mask and (inputs.on_gpu or _is_fused_on_cpu(inputs)):
        return _run(inputs, kernel, is_causal=mask_spec.is_plain_causal)
    if kernel is None and (padding := padded.padding_of(inputs)) is not None:
        return padded.attend(inputs, padding, lambda plain: attend(plain, None))
    if mask_spec.cu_seqlens is not None and (lengths := _document_lengths(inputs)) is not None:
        documents = _split_documents(inputs, lengths)
        return torch.cat([attend(document, kernel) for document in documents], dim=2)
    blocks = [_run_rows(inputs, kernel, rows) for rows in _row_blocks(inputs)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _run_rows(inputs: AttentionInputs, kernel: str | None, rows: Span) -> Tensor:
    """Attend from some of the queries, with an explicit mask over the keys they may see."""
    keys = inputs.mask_spec.key_span(rows)
    block = replace(
        inputs,
        q_BHTD=inputs.q_BHTD[:, :, rows[0] : rows[1]],
        k_BGSD=inputs.k_BGSD[:, :, keys[0] : keys[1]],
        v_BGSD=inputs.v_BGSD[:, :, keys[0] : keys[1]],
    )
    if inputs.mask_spec.sees_all:
        return _run(block, kernel)
    visible = inputs.mask_spec.visible_mask(rows, keys)
    hidden = None
    if inputs.mask_spec.may_hide_all:
        # A fully masked row is shown everything and zeroed afterwards: no kernel meets it.
        hidden = ~visible.any(-1, keepdim=True)
        visible = visible | hidden
    mask = visible
    if (bias := inputs.mask_spec.bias_block(rows, keys)) is not None:
        mask = torch.where(visible, bias.masked_fill(bias == -torch.inf, 0.0), -torch.inf)
        if inputs.adds_wider_bias:
            # A float32 bias on half-precision heads is exact only where logits are explicit.
            mask, kernel = mask.float(), "math" if inputs.on_gpu else kernel
        else:
            mask = mask.to(inputs.q_BHTD.dtype)
    out = _run(block, kernel, attn_mask=mask)
    return out if hidden is None else out.masked_fill(hidden, 0.0)


def _run(
    inputs: AttentionInputs,
    kernel: str | None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    q, k, v, enable_gqa = inputs.q_BHTD, inputs.k_BGSD, inputs.v_BGSD, inputs.is_grouped
    if not inputs.on_gpu:
        # Elsewhere than in the last dimension strides are free; there the fused kernel declines.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if enable_gqa and not _groups_heads(inputs, kernel, attn_mask):
        (k, v), enable_gqa = inputs.repeated_heads(), False

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            dropout_p=inputs.dropout_p,
            is_causal=is_causal,
            scale=inputs.scale,
            enable_gqa=enable_gqa,
        )

    if kernel is None and not inputs.on_gpu:
        return run(q, k, v)
    if kernel is None and not torch.compiler.is_compiling():
        return in_best_order(run, q, k, v)
    if kernel is None:
        with sdpa_kernel(FASTEST_FIRST, set_priority=True):
            return run(q, k, v)
    with sdpa_kernel(SDPA_KERNELS[kernel]):
        if torch.compiler.is_compiling():
            return run(q, k, v)
        try:
            with warnings.catch_warnings():
                # PyTorch warns of every kernel that was ruled out; the error says it once.
                warnings.simplefilter("ignore", UserWarning)
                return run(q, k, v)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise UsageError(
                f"backend={kernel!r} cannot serve this call: PyTorch has no such kernel for "
                f"{inputs.q_BHTD.dtype}, head_dim {inputs.q_BHTD.shape[-1]}, values of width "
                f"{v.shape[-1]}, {'a' if attn_mask is not None else 'no'} mask and dropout "
                f"{inputs.dropout_p:g} on {inputs.q_BHTD.device}; pass backend='auto' or another"
            ) from None


def in_best_order(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Call what calls SDPA, with the fastest kernel first.

    As `sdpa_kernel` does with `set_priority`, which takes 12 us where this takes 0.3 us, and
    without enabling what the caller has disabled. torch has no public way that is as short.
    """
    order = _WITHOUT_PLANS_FIRST if q.shape[2] == 1 else _FASTEST_FIRST
    before = torch._C._get_sdp_priority_order()  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._set_sdp_priority_order(order)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return attention(q, k, v)
    finally:
        torch._C._set_sdp_priority_order(before)  # pyright: ignore[reportAttributeAccessIssue]


def _groups_heads(inputs: AttentionInputs, kernel: str | None, attn_mask: Tensor | None) -> bool:
    """True where the kernel reads shared key heads itself; `efficient` cannot."""
    if not inputs.on_gpu:
        return True
    return attn_mask is None if kernel is None else kernel != "efficient"


def _is_fused_on_cpu(inputs: AttentionInputs) -> bool:
    """True where PyTorch's fused CPU kernel serves; elsewhere it makes queries x keys logits."""
    return inputs.dropout_p == 0.0 and inputs.v_BGSD.shape[-1] == inputs.q_BHTD.shape[-1]


def _row_blocks(inputs: AttentionInputs) -> Iterator[Span]:
    """Split the queries into blocks whose mask stays small."""
    if not inputs.on_gpu:
        return row_blocks(inputs.mask_spec.num_queries)
    elements = inputs.q_BHTD.shape[0] * inputs.mask_spec.num_keys
    return row_blocks(
        inputs.mask_spec.num_queries, max(ROWS_PER_BLOCK, CUDA_MASK_ELEMENTS // elements)
    )


def _document_lengths(inputs: AttentionInputs) -> list[int] | None:
    """Read the lengths of packed documents, unless something else cuts across."""
    mask_spec = inputs.mask_spec
    assert mask_spec.cu_seqlens is not None
    square = mask_spec.num_queries == mask_spec.num_keys
    if not (square and mask_spec.is_interval and mask_spec.positions is None):
        return None
    if not can_read_without_sync(mask_spec.cu_seqlens):
        return None
    return [length for length in mask_spec.cu_seqlens.diff().tolist() if length]


def _split_documents(inputs: AttentionInputs, lengths: list[int]) -> Iterator[AttentionInputs]:
    # Not slices: the gradient of each would be a tensor as long as the row.
    parts = (x.split(lengths, dim=2) for x in (inputs.q_BHTD, inputs.k_BGSD, inputs.v_BGSD))
    for length, q, k, v in zip(lengths, *parts, strict=True):
        spec = MaskSpec(
            num_queries=length,
            num_keys=length,
            is_causal=inputs.mask_spec.is_causal,
            window=inputs.mask_spec.window,
            device=inputs.mask_spec.device,
        )
        yield replace(inputs, q_BHTD=q, k_BGSD=k, v_BGSD=v, mask_spec=spec)


def unsupported_reason(inputs: AttentionInputs, kernel: str) -> str | None:
    """Say why this kernel cannot serve the call, as far as it is known beforehand."""
    if kernel in ("cudnn", "efficient") and not inputs.on_gpu:
        return f"it needs CUDA tensors, got {inputs.q_BHTD.device}"
    if kernel in ("cudnn", "efficient") and inputs.adds_wider_bias:
        return f"it takes an additive mask of q's dtype, {inputs.q_BHTD.dtype}"
    if kernel == "flash" and inputs.on_gpu and inputs.needs_mask:
        return "flash attention in SDPA takes no mask; 'varlen' does windows and packing"
    return None
