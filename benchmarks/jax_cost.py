"""What SSMax costs in JAX: time of `ssmax_attention` over that of `dot_product_attention`, both
under jit, on whatever device JAX finds.

    python benchmarks/jax_cost.py [--tokens 1024 4096] [--heads 8] [--dtype bfloat16] [--cudnn]

Runs alternate, so that what else the machine does falls on both; of each the median counts. First
the query lies there, then it comes out of a rotary embedding, as in a model.
"""

import argparse
import functools
import itertools
import statistics
import time

import jax
import jax.numpy as jnp

from ssmax.jax import ssmax_attention


def timed(function, arguments, calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def compare(name: str, pair, arguments, given) -> None:
    """Print the median time of the first, and that of the second over it."""
    for function in pair:
        timed(function, arguments)
    times = [
        [timed(function, arguments, given.calls) for function in pair] for _ in range(given.repeats)
    ]
    softmax, ssmax = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{name:<40} {1e3 * softmax:9.4f} ms  {ssmax / softmax:.3f}", flush=True)


def rotated(x):
    """Turn pairs of channels by their position, as a model does before attention."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1, help="of one timing, which is their mean")
    parser.add_argument("--cudnn", action="store_true", help="the kernels of cuDNN instead of XLA")
    given = parser.parse_args()
    implementation = "cudnn" if given.cudnn else "xla"
    heads = (given.heads, given.head_dim)
    s = jnp.full(given.heads, 0.43)

    def softmax(turn, q, k, v, s):
        # One query sees all: dot_product_attention's triangle is top-left.
        return jax.nn.dot_product_attention(
            turn(q), k, v, is_causal=q.shape[1] > 1, implementation=implementation
        )

    def ssmax(turn, q, k, v, s):
        return ssmax_attention(turn(q), k, v, s, is_causal=True, implementation=implementation)

    def forward(attention, turn):
        return jax.jit(functools.partial(attention, turn))

    def training(attention, turn):
        def loss(*arguments):
            return attention(turn, *arguments).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))

    (device,) = {device.device_kind for device in jax.devices()}
    print(f"{device}, jax {jax.__version__}, {implementation}, {given.dtype}, causal")
    for tokens, (what, turn) in itertools.product(
        given.tokens, (("", lambda x: x), (", rotated", rotated))
    ):
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (given.batch, tokens, *heads)
        k, v, q = (jax.random.normal(key, shape, given.dtype) for key in keys)
        for mode, make, queries in (
            ("forward", forward, q),
            ("forward and backward", training, q),
            ("decode, one query", forward, q[:, -1:]),
        ):
            pair = [make(attention, turn) for attention in (softmax, ssmax)]
            name = f"{given.batch} x {tokens:,}{what}: {mode}"
            try:
                compare(name, pair, (queries, k, v, s), given)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                print(f"{name:<40} not served: {str(error).splitlines()[0][:90]}", flush=True)


if __name__ == "__main__":
    main()
