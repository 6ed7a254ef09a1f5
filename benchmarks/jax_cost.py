"""What SSMax costs in JAX: time of `ssmax_attention` over that of `dot_product_attention`, both
under jit, on whatever device JAX finds.

    python benchmarks/jax_cost.py [--tokens 1024] [--heads 8] [--dtype bfloat16] [--cudnn]

Runs alternate, so that what else the machine does falls on both; of each the median counts.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from ssmax.jax import ssmax_attention


def timed(function, arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def ratio(pair, arguments, repeats: int) -> float:
    """Median time of the second over that of the first."""
    for function in pair:
        timed(function, arguments)
    times = [[timed(function, arguments) for function in pair] for _ in range(repeats)]
    softmax, ssmax = (statistics.median(column) for column in zip(*times, strict=True))
    return ssmax / softmax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cudnn", action="store_true", help="the kernels of cuDNN instead of XLA")
    given = parser.parse_args()
    implementation = "cudnn" if given.cudnn else "xla"
    heads = (given.heads, given.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (
        jax.random.normal(key, (given.batch, given.tokens, *heads), given.dtype) for key in keys[:2]
    )
    s = jnp.full(given.heads, 0.43)

    def softmax(q, k, v, s):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    def ssmax(q, k, v, s):
        return ssmax_attention(q, k, v, s, is_causal=True, implementation=implementation)

    def training(attention):
        def loss(*arguments):
            return attention(*arguments).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))

    (device,) = {device.device_kind for device in jax.devices()}
    print(f"{device}, jax {jax.__version__}, {implementation}, {given.dtype}, causal, {k.shape}")
    forward = (jax.jit(softmax), jax.jit(ssmax))
    both = (training(softmax), training(ssmax))
    for name, queries, pair in (
        ("forward", given.tokens, forward),
        ("forward and backward", given.tokens, both),
        ("decode, one query", 1, forward),
    ):
        q = jax.random.normal(keys[2], (given.batch, queries, *heads), given.dtype)
        if queries == 1:  # one query sees all: dot_product_attention's triangle is top-left
            pair = (jax.jit(lambda q, k, v, s: jax.nn.dot_product_attention(q, k, v)), pair[1])
        print(f"{name:<22} {ratio(pair, (q, k, v, s), given.repeats):.3f}")


if __name__ == "__main__":
    main()
