"""Runs with a name: the paper's tables 2 and 3, and what fits one GPU or a laptop.

A configuration of the paper, (a) to (f), is a rule laid over any of them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ssmax.errors import UsageError
from ssmax.nn.rules import RULES
from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.model.config import LMConfig
from ssmax_lab.train.config import (
    DataConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)


def configured(config: TrainConfig, name: str) -> TrainConfig:
    """Lay a configuration of the study over a run, or any rule by its name."""
    trained = {name: one for name, one in CONFIGURATIONS.items() if one.is_pretrained}
    if name not in trained and name not in RULES:
        if name in CONFIGURATIONS:
            base = CONFIGURATIONS[name].base
            raise UsageError(
                f"configuration {name} is not trained: it is a finished run of {base}, its rule "
                f"replaced afterwards; train {base}"
            )
        raise UsageError(
            f"config must be one of {', '.join(trained)} or a rule's name, got {name!r}"
        )
    rule = trained[name].rule if name in trained else name
    is_late = name in trained and trained[name].applied == "last steps"
    # The old switch may go to this very rule: both change at once.
    changed = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, rule="softmax" if is_late else rule),
        switch=dataclasses.replace(config.switch, rule=rule if is_late else ""),
    )
    return changed.with_overrides(trained[name].settings if name in trained else {})


def paper() -> TrainConfig:
    """Configure table 2: 2,097,152 tokens a step. The number of steps is ours."""
    return TrainConfig()


def gpu() -> TrainConfig:
    """Configure the paper's model for one GPU: 250 M tokens, a thirty-second of the batch a step.

    Heads that copy form by steps, not by tokens: so the steps are small and the rate the paper's.
    """
    return TrainConfig(
        schedule=ScheduleConfig(warmup_steps=200),
        run=RunConfig(
            recipe="gpu",
            steps=3815,
            batch_size=64,
            checkpoint_every=1000,
            validate_every=500,
            scale_every=20,
        ),
    )


def quick() -> TrainConfig:
    """Configure the smallest model that learns to look numbers up: minutes on two CPU cores."""
    return TrainConfig(
        model=LMConfig(
            num_layers=3,
            num_heads=4,
            hidden_size=64,
            intermediate_size=176,
            vocab_size=768,
            train_length=64,
        ),
        optim=OptimConfig(lr=2e-3),
        schedule=ScheduleConfig(warmup_steps=50),
        run=RunConfig(
            recipe="quick",
            steps=1000,
            batch_size=32,
            micro_batch=32,
            precision="float32",
            compile=False,
            checkpoint_every=200,
            validate_every=200,
            scale_every=20,
        ),
    )


def million() -> TrainConfig:
    """Configure a million parameters that read bytes, and are taught retrieval in short documents.

    All positions to 1,024 are trained by text; numbers are looked up in 256 bytes alone.
    """
    return TrainConfig(
        model=LMConfig(
            num_layers=4,
            num_heads=4,
            hidden_size=128,
            intermediate_size=352,
            vocab_size=257,
            train_length=1024,
        ),
        data=DataConfig(needle_length=256, validation_windows=0),
        optim=OptimConfig(lr=2e-3),
        schedule=ScheduleConfig(kind="warmup-stable-decay", warmup_steps=100, decay_steps=360),
        run=RunConfig(
            recipe="million",
            steps=1800,
            batch_size=16,
            micro_batch=16,
            checkpoint_every=1800,
            scale_every=50,
        ),
    )


def small() -> TrainConfig:
    """Configure 49 M parameters, 39 M of them its two tables of tokens: a minute on one GPU."""
    return TrainConfig(
        model=LMConfig(
            num_layers=6, num_heads=6, hidden_size=384, intermediate_size=1024, train_length=512
        ),
        optim=OptimConfig(lr=1e-3),
        schedule=ScheduleConfig(warmup_steps=100),
        run=RunConfig(
            recipe="small",
            steps=2000,
            batch_size=64,
            checkpoint_every=1000,
            validate_every=500,
            scale_every=50,
        ),
    )


def long() -> TrainConfig:
    """Configure the paper's model for 131,072 tokens, eight GPUs to a sequence: 5 G tokens.

    A step has the paper's number of tokens. The RoPE base is above the least that is needed for
    this length (arXiv 2405.14591).
    """
    return TrainConfig(
        model=LMConfig(train_length=131_072, theta=1e7),
        data=DataConfig(validation_windows=16),
        schedule=ScheduleConfig(kind="warmup-stable-decay", warmup_steps=200, decay_steps=240),
        run=RunConfig(
            recipe="long",
            steps=2400,
            batch_size=16,
            micro_batch=1,
            parallel="fsdp2",
            context_parallel=8,
            checkpoint_every=200,
            validate_every=200,
            scale_every=20,
        ),
    )


PRETRAINING = {
    "quick": quick,
    "million": million,
    "small": small,
    "gpu": gpu,
    "paper": paper,
    "long": long,
}

DEFAULT_TEXT = {
    "quick": ("embedded", "small"),
    "million": ("embedded", "bytes"),
    "small": ("embedded", "gpt2-digits"),
    "gpu": ("embedded", "gpt2-digits"),
    "paper": ("hf:cerebras/SlimPajama-627B", "gpt2"),
    "long": ("hf:cerebras/SlimPajama-627B", "gpt2"),
}
"""Source and tokenizer of a recipe that is given no text."""


def check_gpu(recipe: str, device: str | None) -> None:
    """Refuse a preset made for GPUs where there is none, unless the CPU was asked for."""
    if recipe == "quick" or device is not None:
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"the {recipe} preset is made for a GPU, and torch finds none here; take the quick "
            "preset, or --device cpu for the CPU all the same"
        )


def finetuning_of(base: TrainConfig, *, rows: int, overrides: Mapping[str, Any]) -> TrainConfig:
    """Lay table 3 over a pretrained run, or what suits a quick one, and the `overrides` over it.

    Its epochs, of so many rows, are counted in steps of the batch size that results.
    """
    is_quick = base.run.recipe == "quick"
    config = TrainConfig(
        model=base.model,
        data=DataConfig(seed=base.data.seed, tokenizer=base.data.tokenizer),
        optim=OptimConfig(lr=3e-3 if is_quick else 2e-5, beta2=0.999, weight_decay=0.0),
        schedule=ScheduleConfig(kind="cosine"),
        run=dataclasses.replace(base.run, batch_size=32 if is_quick else 128, context_parallel=1),
    )
    epoch = math.ceil(rows / config.with_overrides(overrides).run.batch_size)
    return config.with_overrides(
        {
            "schedule.warmup_steps": min(50, epoch) if is_quick else epoch,
            "run.steps": (5 if is_quick else 10) * epoch,
            "run.checkpoint_every": epoch,
            "run.validate_every": epoch,
            **overrides,
        }
    )
