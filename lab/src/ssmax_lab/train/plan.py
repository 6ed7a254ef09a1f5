"""Estimate what a pretraining takes: tokens, memory for the sequence, hours and a price."""

from ssmax_lab.model.saving import lm_of_shapes
from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.metrics import PEAK_TFLOPS, flops_per_token, short_number

GPU, DOLLARS_AN_HOUR = "H200", 3.0
WEIGHTS_OF_PEAK = 0.45
"""Share of the peak that training with short sequences reached: 558 k tokens/s of the paper's
model."""
ATTENTION_OF_PEAK = 0.228
"""Share that a rank's attention reached: 131,072 tokens on 8 GPUs, 12 heads of 64 channels
(benchmarks/results.csv)."""


def plan_words(config: TrainConfig, name: str) -> str:
    """Say in four lines what a run would be and what it would cost."""
    model, run = config.model, config.run
    tokens = run.steps * config.tokens_per_step
    heads = model.num_heads * model.head
    attention = 12.0 * model.num_layers * heads * (model.train_length + 1) / 2
    weights = flops_per_token(model) - attention
    peak = PEAK_TFLOPS[GPU] * 1e12
    seconds = tokens * (weights / WEIGHTS_OF_PEAK + attention / ATTENTION_OF_PEAK) / peak
    hours, ranks = seconds / 3600, run.context_parallel
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
