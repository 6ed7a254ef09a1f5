"""`ssmax bench`: time what SSMax costs on this machine, for a shape of one's own."""

import json
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmax._device import check_device, select_device
from ssmax.cli.options import Device, Json
from ssmax.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TURNS, WARM_UP = 18, 3
DTYPES = ("float32", "bfloat16", "float16")


def bench(
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per row.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 12,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key heads; by default as many as query heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels per head.")] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default the device's.")
    ] = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Time SSMax against softmax on this machine, for your shape."""
    check_device(device)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    groups = kv_heads or heads
    if heads % groups:
        raise UsageError(f"--heads must be a multiple of --kv-heads, got {heads} and {groups}")
    here = select_device(device)
    import torch

    name = dtype or ("bfloat16" if here.type == "cuda" else "float32")
    costs = measure(batch, tokens, heads, groups, head_dim, getattr(torch, name), here)
    where = torch.cuda.get_device_name(here) if here.type == "cuda" else "CPU"
    if json_:
        shape = {"batch": batch, "tokens": tokens, "heads": heads, "kv_heads": groups,
                 "head_dim": head_dim}  # fmt: skip
        print(json.dumps({"device": where, "dtype": name, **shape, "costs": costs}, indent=2))
        return
    print(f"{where}, {name}, B{batch} T{tokens} H{heads}/{groups} D{head_dim}, s and b learnable")
    for cost in costs:
        print(
            f"{cost['mode']:17} softmax {cost['softmax_ms']:9.3f} ms   "
            f"SSMax {cost['ssmax_ms']:9.3f} ms   x {cost['ratio']:.3f}"
        )


def measure(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: "torch.dtype",
    device: "torch.device",
) -> list[dict[str, Any]]:
    """Take medians of turns that alternate, so that what drifts drifts for both."""
    import torch
    import torch.nn.functional as F

    from ssmax.ops.attention import ssmax_attention

    q, k, v = (
        torch.randn(batch, count, tokens, head_dim, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    s = torch.full((heads,), 0.17, device=device, requires_grad=True)
    b = torch.zeros(heads, device=device, requires_grad=True)
    gradient, grouped = torch.randn_like(q), heads != kv_heads

    def softmax() -> "Tensor":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def ssmax() -> "Tensor":
        return ssmax_attention(q, k, v, s, bias=b, is_causal=True, enable_gqa=grouped)

    pairs = {
        "forward": (torch.no_grad()(softmax), torch.no_grad()(ssmax)),
        "forward+backward": (
            lambda: torch.autograd.grad(softmax(), (q, k, v), gradient),
            lambda: torch.autograd.grad(ssmax(), (q, k, v, s, b), gradient),
        ),
    }
    costs = []
    for mode, pair in pairs.items():
        times = [[_once(run, device) for run in pair] for _ in range(TURNS)][WARM_UP:]
        plain, ours = (statistics.median(column) for column in zip(*times, strict=True))
        costs.append({"mode": mode, "softmax_ms": plain, "ssmax_ms": ours, "ratio": ours / plain})
    return costs


def _once(run: Callable[[], object], device: "torch.device") -> float:
    """Run it once and return the milliseconds."""
    import torch

    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - start) * 1e3
