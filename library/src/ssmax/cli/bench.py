"""`ssmax bench`: time what SSMax costs on this machine, for a shape of one's own."""

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ssmax._device import check_device, select_device
from ssmax.cli.options import Device, Json
from ssmax.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TURNS = 15
COPIES, KEY_COPIES = 5, 4
"""Tensors at a time with the query's heads (q, scaled q, output, two gradients) and the keys'."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number, by the name of its dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Times of one direction, in milliseconds, and their ratio."""

    mode: str
    softmax_ms: float
    ssmax_ms: float
    ratio: float


def bench(
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per row.")] = 2048,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 12,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key heads; by default as many as query heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Channels per head.")] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default the device's.")
    ] = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Time SSMax against softmax on this machine, for your shape."""
    check_device(device)
    if dtype is not None and dtype not in BYTES:
        raise UsageError(f"--dtype must be one of {', '.join(BYTES)}, got {dtype!r}")
    groups = heads if kv_heads is None else kv_heads
    sizes = {
        "batch": batch,
        "tokens": tokens,
        "heads": heads,
        "kv_heads": groups,
        "head_dim": head_dim,
    }
    for key, value in sizes.items():
        if value < 1:
            raise UsageError(f"--{key.replace('_', '-')} must be at least 1, got {value}")
    if heads % groups:
        raise UsageError(f"--heads must be a multiple of --kv-heads, got {heads} and {groups}")
    here = select_device(device)
    import torch

    name = dtype or ("bfloat16" if here.type == "cuda" else "float32")
    needed = batch * tokens * head_dim * BYTES[name] * (COPIES * heads + KEY_COPIES * groups)
    check_memory(needed, here)
    costs = measure(batch, tokens, heads, groups, head_dim, getattr(torch, name), here)
    where = torch.cuda.get_device_name(here) if here.type == "cuda" else "CPU"
    if json_:
        rows = [dataclasses.asdict(cost) for cost in costs]
        print(json.dumps({"device": where, "dtype": name, **sizes, "costs": rows}, indent=2))
        return
    print(f"{where}, {name}, B{batch} T{tokens} H{heads}/{groups} D{head_dim}, s and b learnable")
    for cost in costs:
        print(
            f"{cost.mode:17} softmax {cost.softmax_ms:9.3f} ms   SSMax {cost.ssmax_ms:9.3f} ms   "
            f"x {cost.ratio:.3f}"
        )


def check_memory(needed: int, device: "torch.device") -> None:
    """Refuse a shape that the device has no memory for, rather than let an allocator fail."""
    if device.type == "cuda":
        import torch

        there, where = torch.cuda.mem_get_info(device)[0], "free on the GPU"
    else:
        there, where = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "in this machine"
    if needed > there:
        raise UsageError(
            f"this shape needs about {needed / 2**30:,.0f} GiB, and there are "
            f"{there / 2**30:,.0f} GiB {where}; give fewer --tokens, a smaller --batch or fewer "
            "--heads"
        )


def measure(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: "torch.dtype",
    device: "torch.device",
) -> list[Cost]:
    """Take medians of turns that alternate, so that what drifts drifts for both."""
    import torch
    import torch.nn.functional as F

    from ssmax.ops.attention import ssmax_attention

    def make(count: int) -> "Tensor":
        x = torch.randn(batch, count, tokens, head_dim, device=device, dtype=dtype)
        return x.requires_grad_()

    q, k, v = make(heads), make(kv_heads), make(kv_heads)
    s = torch.full((heads,), 0.17, device=device, requires_grad=True)
    b = torch.zeros(heads, device=device, requires_grad=True)
    grouped = heads != kv_heads

    def softmax() -> "Tensor":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def ssmax() -> "Tensor":
        return ssmax_attention(q, k, v, s, bias=b, is_causal=True, enable_gqa=grouped)

    gradient = torch.randn_like(q)

    def backward(attention: "Callable[[], Tensor]", *learned: "Tensor") -> None:
        torch.autograd.grad(attention(), learned, gradient)

    costs = []
    for mode, first, second in (
        ("forward", torch.no_grad()(softmax), torch.no_grad()(ssmax)),
        (
            "forward+backward",
            lambda: backward(softmax, q, k, v),
            lambda: backward(ssmax, q, k, v, s, b),
        ),
    ):
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(TURNS + 3):
            for taken, run in zip(times, (first, second), strict=True):
                milliseconds = _once(run, device)
                if turn >= 3:
                    taken.append(milliseconds)
        plain, ours = (statistics.median(taken) for taken in times)
        costs.append(
            Cost(
                mode=mode,
                softmax_ms=round(plain, 4),
                ssmax_ms=round(ours, 4),
                ratio=round(ours / plain, 4),
            )
        )
    return costs


def _once(run: Callable[[], object], device: "torch.device") -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3
