"""What training costs: operations, how much of a device they use, and a run's hours and price."""

import torch

from ssmax_lab.model.config import LMConfig
from ssmax_lab.model.model import lm_of_shapes
from ssmax_lab.train.config import TrainConfig

PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L40": 181, "4090": 165}
"""Dense bfloat16 products a second, by a part of the device's name, as the makers state them."""
GPU, DOLLARS_AN_HOUR = "H200", 3.0
WEIGHTS_OF_PEAK, ATTENTION_OF_PEAK = 0.45, 0.228
"""Shares that training reached on it: with short sequences 558 k tokens/s of the paper's model; a
rank's attention over 131,072 tokens on 8 GPUs, 12 heads of 64 (benchmarks/results.csv)."""


def flops_per_token(config: LMConfig) -> tuple[float, float]:
    """Count the operations of a training step: six a weight, and causal attention's products."""
    heads = config.num_heads * config.head
    attention = config.hidden_size * (2 * heads + 2 * config.kv_heads * config.head)
    block = attention + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * block + config.hidden_size * config.vocab_size
    visible = (config.train_length + 1) / 2
    return 6.0 * weights, 12.0 * config.num_layers * heads * visible


def speed_words(config: LMConfig, tokens_per_second: float, device: torch.device, size: int) -> str:
    """Say how fast training is, and the share of the devices' peak where that is known."""
    words = f"{short_number(tokens_per_second)} tokens/s"
    if device.type != "cuda":
        return words
    name = torch.cuda.get_device_name(device)
    peak = next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)
    if peak is None:
        return words
    return (
        f"{words}  {sum(flops_per_token(config)) * tokens_per_second / (peak * size):.0%} of peak"
    )


def plan_words(config: TrainConfig, name: str) -> str:
    """Say in four lines what a run would be and what it would cost."""
    model, run = config.model, config.run
    tokens, ranks = run.steps * config.tokens_per_step, run.context_parallel
    weights, attention = flops_per_token(model)
    flops = tokens * (weights / WEIGHTS_OF_PEAK + attention / ATTENTION_OF_PEAK)
    hours = flops / (PEAK_TFLOPS[GPU] * 1e12) / 3600
    gathered = 4 * model.train_length * model.kv_heads * model.head * run.micro_batch / 2**20
    return "\n".join(
        (
            f"{name}: {lm_of_shapes(model).num_parameters:,} parameters, {run.steps:,} steps of "
            f"{run.batch_size:,} sequences of {model.train_length:,} tokens, "
            f"{short_number(tokens)} tokens in all",
            f"each sequence on {ranks} GPU{'s' * (ranks > 1)}: {model.train_length // ranks:,} "
            f"tokens of a sequence on each"
            + (f", {gathered:,.0f} MiB of gathered keys and values a layer" if ranks > 1 else ""),
            f"about {hours:,.1f} {GPU}-hours, {hours / ranks:,.1f} hours on {ranks}, by the speed "
            "measured on one",
            f"about {hours * DOLLARS_AN_HOUR:,.0f} dollars at {DOLLARS_AN_HOUR:g} dollars an hour",
        )
    )


def short_number(number: float) -> str:
    """Round a number to the unit that it has a few of: 15.0 k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f}"
