"""Softmax attention under any mask, by the fastest kernel that can serve the call.

The query arrives scaled, so nothing here knows of Scalable-Softmax: a backend only has to hide the
right keys. Each says in one sentence why it cannot serve a call, or None; a named backend raises
that sentence and never falls back to another.
"""

# B batch, H query heads, G key heads, T queries, S keys, D head_dim

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.ops.backends import eager, sdpa, varlen, windowed
from ssmax.ops.backends.inputs import AttentionInputs
from ssmax.ops.dtypes import autocast_dtype
from ssmax.ops.visible import MaskSpec

Backend = Literal["auto", "cudnn", "flash", "efficient", "math", "varlen", "eager"]


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask_spec: MaskSpec,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Compute softmax(q k^T scale) v over what each query sees; a fully masked row gives zeros."""
    if backend == "auto" and q_BHTD.is_cuda and not torch.compiler.is_compiling():
        # Eager calls that need no mask: nothing has to be asked or split.
        plain = sdpa.plain_attention(q_BHTD, k_BGSD, mask_spec, scale, dropout_p)
        if plain is not None and not torch.is_autocast_enabled("cuda"):
            return sdpa.in_best_order(plain, q_BHTD, k_BGSD, v_BGSD)
    if (dtype := autocast_dtype(q_BHTD.device, q_BHTD.dtype)) is not None:
        q_BHTD, k_BGSD, v_BGSD = q_BHTD.to(dtype), k_BGSD.to(dtype), v_BGSD.to(dtype)
    if q_BHTD.shape[-1] == 0:
        # Heads of width 0 have logits of 0, as have those of one channel of zeros.
        q_BHTD, k_BGSD = F.pad(q_BHTD, (0, 1)), F.pad(k_BGSD, (0, 1))
    inputs = AttentionInputs(q_BHTD, k_BGSD, v_BGSD, mask_spec, scale, dropout_p)
    chosen = choose_backend(backend, inputs)
    if q_BHTD.numel() == 0 or k_BGSD.numel() == 0:
        # Nothing to attend to: products over nothing are zeros and keep the graph whole.
        k_BHSD, v_BHSD = inputs.repeated_heads()
        return q_BHTD @ k_BHSD.transpose(-1, -2) @ v_BHSD
    if backend == "auto" and windowed.serves(inputs):
        return windowed.attend(inputs)
    if chosen == "varlen":
        return varlen.attend(inputs)
    if chosen == "eager":
        return eager.attend(inputs)
    return sdpa.attend(inputs, kernel=None if chosen == "auto" else chosen)


def choose_backend(backend: Backend, inputs: AttentionInputs) -> Backend:
    """Choose the backend that serves this call; `auto` is SDPA's fastest kernel."""
    if backend not in get_args(Backend):
        raise UsageError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    if backend == "auto":
        serves = inputs.needs_mask and varlen.unsupported_reason(inputs) is None
        return "varlen" if serves else "auto"
    if backend == "eager":
        return backend
    is_varlen = backend == "varlen"
    reason = (
        varlen.unsupported_reason(inputs) if is_varlen else sdpa.unsupported_reason(inputs, backend)
    )
    if reason is not None:
        raise UsageError(
            f"backend={backend!r} cannot serve this call: {reason}; "
            "pass backend='auto' or name another"
        )
    return backend
