"""Studies with a name: which configurations, how often, how long, and what is measured of them."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssmax.errors import UsageError
from ssmax_lab.analysis.formulas import rope_limit_of
from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.data.qa import digits_taught
from ssmax_lab.data.sources import EMBEDDED, HUB, TOKENS
from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.recipes import DEFAULT_TEXT, PRETRAINING


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Everything that decides a reproduction's numbers, but for the text."""

    preset: str
    pretraining: TrainConfig
    """Of every configuration, but for its rule and seed."""
    source: str
    """The text, as `ssmax-lab data prepare` takes it."""
    tokenizer: str
    validation_fraction: float
    """Share of the documents that no run sees; everything is measured on them."""
    questions: str
    """What is asked in fine-tuning: a file, "invented" or "hidden"."""
    finetuning: Mapping[str, Any]
    """Laid over table 3."""
    seeds: Mapping[str, int]
    """How many of each configuration."""
    theta_factor: float
    """Times the training's theta, in every measurement."""
    loss_length: int
    """Tokens of a document whose loss is measured at every position."""
    loss_documents: int
    needle_lengths: tuple[int, ...]
    """Context sizes of the grid."""
    digits: int
    score_length: int
    """Context size of the needle scores."""
    batch: int
    """Prompts or documents at a time."""
    seconds: Mapping[str, float]
    """What a job of each kind took where the preset was measured, for the plan."""
    measured_on: str
    """That machine, in words."""
    workers_per_core: bool
    """One job a core and one thread a job, rather than one job with all of the machine."""
    needle_depths: int = 11
    needle_trials: int = 10
    """Of a cell."""
    score_trials: int = 100
    papers_needle_trials: int = 10
    """Haystacks for the paper's own needle, at half the depth."""
    sharpness_documents: int = 8
    base_factors: tuple[float, ...] = (1.0, 4.0, 8.0, 16.0, 50.0)
    """Times the training's theta, where retrieval was taught in pretraining."""
    cells: tuple[tuple[float, int], ...] = ()
    """Of these bases and lengths, those at which retrieval is compared, known before a run; ()
    leaves that to a pilot seed, which is not counted."""

    def __post_init__(self) -> None:
        longest = min(self.loss_length, max(self.needle_lengths))
        if longest <= self.train_length:
            raise UsageError(
                f"a study measures beyond the training length, but model.train_length is "
                f"{self.train_length} and contexts end at {longest}; leave it as it is"
            )

    @property
    def theta(self) -> float:
        """At test time."""
        return self.pretraining.model.theta * self.theta_factor

    @property
    def train_length(self) -> int:
        """Of pretraining and fine-tuning alike."""
        return self.pretraining.model.train_length

    @property
    def teaches_needles(self) -> bool:
        """Whether retrieval is taught in pretraining; then nothing is fine-tuned."""
        return self.pretraining.data.needle_length > 0

    @property
    def has_pilot(self) -> bool:
        """Whether a seed tells at which bases and lengths retrieval is compared."""
        return self.teaches_needles and not self.cells

    @property
    def retrieval_lengths(self) -> tuple[int, ...]:
        """From where retrieval was taught, over T, to 10T or the longest of the grid."""
        taught, length = self.pretraining.data.needle_length, self.train_length
        within = [taught * 2**power for power in range(16) if taught * 2**power < length]
        every = (*within, length, 2 * length, 4 * length, 10 * length)
        return tuple(one for one in every if one <= max(self.needle_lengths))

    @property
    def tokens_trained(self) -> int:
        """By one pretraining."""
        return self.pretraining.run.steps * self.pretraining.tokens_per_step

    @property
    def test_constant(self) -> float:
        """YaRN's temperature for positions stretched to the RoPE limit of the test's theta.

        (0.1 log stretch + 1)^2, one number for the whole context: nothing about it is our choice.
        """
        model = self.pretraining.model
        limit = rope_limit_of(self.train_length, model.theta, model.rotary, self.theta_factor)
        # Where nothing bounds positions, as far as anything is measured.
        stretch = min(limit, self.loss_length) / self.train_length
        return (0.1 * math.log(stretch) + 1.0) ** 2

    def with_settings(self, overrides: Mapping[str, Any]) -> "Study":
        """Change settings of pretraining, and the plan by the tokens that it then sees."""
        changed = dataclasses.replace(self, pretraining=self.pretraining.with_overrides(overrides))
        tokens = changed.tokens_trained / self.tokens_trained
        seconds = {**self.seconds, "pretrain": self.seconds["pretrain"] * tokens}
        return dataclasses.replace(changed, seconds=seconds)

    def with_questions(self, questions: str) -> "Study":
        """Change the questions; numbers are as long in the test as those that are hidden there."""
        digits = digits_taught(questions) or self.digits
        return dataclasses.replace(self, questions=questions, digits=digits)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Study":
        """Read what `to_dict` wrote, from a file."""
        return cls(**{
            **values,
            "pretraining": TrainConfig.from_dict(values["pretraining"]),
            "needle_lengths": tuple(values["needle_lengths"]),
            "base_factors": tuple(values["base_factors"]),
            "cells": tuple(map(tuple, values["cells"])),
        })  # fmt: skip


def _of_preset(name: str) -> dict[str, Any]:
    """Collect what a preset shares with the recipe of its name, and with the table."""
    source, tokenizer = DEFAULT_TEXT[name]
    return {
        "preset": name,
        "pretraining": PRETRAINING[name](),
        "source": source,
        "tokenizer": tokenizer,
        "seeds": {key: one.seeds.get(name, 0) for key, one in CONFIGURATIONS.items()},
    }


def _decaying(steps: int) -> dict[str, Any]:
    return {"schedule.kind": "warmup-stable-decay", "schedule.decay_steps": steps}


def quick() -> Study:
    """Show the mechanism on two idle CPU cores, with text that every Python has, in 15 minutes.

    Retrieval is taught in 64 tokens and asked for in up to 1,024; text trains 256 positions.
    """
    preset = _of_preset("quick")
    pretraining = preset.pop("pretraining").with_overrides(
        {
            "model.train_length": 256,
            "data.needle_length": 64,
            "data.needles_per_row": 8,
            "data.validation_windows": 0,
            "run.batch_size": 4,
            "run.micro_batch": 4,
            "run.steps": 900,
            **_decaying(200),
        }
    )
    length = pretraining.model.train_length
    return Study(
        **preset,
        pretraining=pretraining,
        validation_fraction=0.05,
        questions="hidden",
        finetuning={},
        theta_factor=16.0,
        loss_length=8 * length,
        loss_documents=48,
        needle_lengths=(128, 256, 512, 1024),
        needle_depths=5,
        needle_trials=8,
        base_factors=(1.0, 2.0, 4.0, 8.0),
        cells=((1.0, 128), (1.0, 256)),
        digits=4,
        score_length=4 * length,
        batch=20,
        seconds={"data": 16, "pretrain": 135, "finetune": 96, "loss": 15, "needle": 20},
        measured_on="two idle cores of a server CPU",
        workers_per_core=True,
    )


def gpu() -> Study:
    """Train the paper's model on one GPU with 250 M tokens, far fewer than the paper's.

    What it adds to the paper's recipe so that numbers are looked up at all after so few tokens:
    digits that are tokens of their own, smaller and so more steps, and fine-tuning on numbers
    hidden in the training's text.
    """
    return Study(
        **_of_preset("gpu"),
        validation_fraction=0.02,
        questions="hidden:7",
        finetuning={
            "optim.lr": 3e-4,
            "run.batch_size": 16,
            "run.micro_batch": 16,
            "run.steps": 1500,
            "schedule.warmup_steps": 100,
        },
        theta_factor=50.0,
        loss_length=20_480,
        loss_documents=256,
        needle_lengths=(512, 1024, 2048, 3072, 4096, 6144, 8192, 10_240, 15_360, 20_480),
        needle_trials=20,
        digits=7,
        score_length=8000,
        batch=16,
        # Of three runs, two jobs side by side: pretraining at 558 k tokens/s, alone.
        seconds={"data": 60, "pretrain": 506, "finetune": 127, "loss": 37, "needle": 94},
        measured_on="one H200",
        workers_per_core=False,
    )


def million() -> Study:
    """Test retrieval where it can fail: taught in 256 bytes, asked for in up to 10,240, on one GPU.

    The first of seven seeds is a pilot that is not counted.
    """
    return Study(
        **_of_preset("million"),
        validation_fraction=0.05,
        questions="hidden",
        finetuning={},
        # The largest that widths of 32 bear; it sets the constant that is applied at test time.
        theta_factor=8.0,
        loss_length=10_240,
        loss_documents=64,
        needle_lengths=(512, 1024, 2048, 4096, 10_240),
        digits=4,
        score_length=1024,
        batch=55,
        seconds={"data": 20, "pretrain": 136, "finetune": 1, "loss": 20, "needle": 33},
        measured_on="one H200, thirteen jobs at a time",
        workers_per_core=False,
    )


def small() -> Study:
    """Train three seeds of a smaller model on one GPU, measured at half of the paper's lengths.

    Its training length is half of the paper's: nothing about where it is measured is our choice.
    """
    large = gpu()
    return dataclasses.replace(
        large,
        **_of_preset("small"),
        questions="hidden:4",
        finetuning={
            **large.finetuning,
            "optim.lr": 1e-3,
            "run.batch_size": 32,
            "run.micro_batch": 32,
        },
        loss_length=large.loss_length // 2,
        loss_documents=128,
        needle_lengths=tuple(length // 2 for length in large.needle_lengths),
        needle_trials=10,
        digits=4,
        score_length=large.score_length // 2,
        seconds={"data": 60, "pretrain": 280, "finetune": 114, "loss": 12, "needle": 21},
        measured_on="one H200, eight jobs at a time",
    )


def paper() -> Study:
    """Follow tables 1 to 3 at the paper's size, on several GPUs."""
    return dataclasses.replace(
        gpu(),
        **_of_preset("paper"),
        validation_fraction=0.005,
        questions="invented",
        finetuning={},
        # 200,000 steps at eight times the speed of one H200, whose first 27 took 3.67 s each.
        seconds={"data": 200_000, "pretrain": 92_000, "finetune": 600, "loss": 60, "needle": 300},
        measured_on="eight H200, from the speed of one",
    )


PRESETS = {"quick": quick, "million": million, "small": small, "gpu": gpu, "paper": paper}


def _variants(preset: str, **sizes: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Change one thing of a preset that the paper leaves open: position code, windows, size.

    `sizes` are layers and heads; their head size is the preset's.
    """
    model = PRESETS[preset]().pretraining.model
    head = model.hidden_size // model.num_heads
    return {
        "theta-1k": {"model.theta": 1_000.0},
        "theta-100k": {"model.theta": 100_000.0},
        "half-rotary": {"model.rotary_dim": head // 2},
        "no-rotary": {"model.rotary_dim": 0},
        "windows": {"model.window": model.train_length // 4, "model.full_every": 2},
        **{
            name: {
                "model.num_layers": layers,
                "model.num_heads": heads,
                "model.hidden_size": heads * head,
                # 8/3 of it, in sixteens.
                "model.intermediate_size": 16 * math.ceil(heads * head / 6),
            }
            for name, (layers, heads) in sizes.items()
        },
    }


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "quick": _variants("quick", smaller=(2, 3), larger=(4, 6)),
    "small": {
        **_variants("small", smaller=(4, 4), larger=(8, 8)),
        # As many tokens a step as the preset.
        "length-1k": {"model.train_length": 1024, "run.batch_size": 32, "run.micro_batch": 32},
        # The preset's text in smaller steps, and as many tokens of needles as of text.
        "needles": {
            "data.needle_length": 128,
            "data.validation_windows": 0,
            "run.batch_size": 48,
            "run.micro_batch": 48,
            **_decaying(400),
        },
        # For initial logit scales and the rates of s and b: fewer tokens, more seeds.
        "scales": {"run.steps": 1300},
    },
    "gpu": {
        "needles": {"data.needle_length": 256, "data.validation_windows": 0, **_decaying(800)},
    },
}


def study_named(name: str) -> Study:
    """Make a preset, or one of its VARIANTS, as `small:half-rotary`."""
    preset, _, variant = name.partition(":")
    known = [*PRESETS, *(f"{base}:{varied}" for base in VARIANTS for varied in VARIANTS[base])]
    if name not in known:
        raise UsageError(f"--preset must be one of {', '.join(known)}, got {name!r}")
    study = PRESETS[preset]()
    if not variant:
        return study
    return dataclasses.replace(study.with_settings(VARIANTS[preset][variant]), preset=name)


def check_text_is_given(study: Study) -> None:
    """Refuse a larger preset without a text: it would read the embedded one many times."""
    if study.source == EMBEDDED and study.preset.partition(":")[0] != "quick":
        raise UsageError(
            f"the {study.preset} preset wants a text: --text FOLDER (files of .txt, .jsonl or "
            f".parquet), --text {HUB}NAME (a dataset of Hugging Face), or --data FOLDER (what "
            f"ssmax-lab data prepare wrote); --text {EMBEDDED} takes Python's standard library, "
            "which it reads over and over"
        )


def check_source(source: str) -> str:
    """Return the source as `ssmax-lab data prepare` takes it, a path in full."""
    if source == EMBEDDED or source.startswith(HUB):
        return source
    kind = TOKENS if source.startswith(TOKENS) else ""
    path = Path(source.removeprefix(kind))
    if not path.exists():
        raise UsageError(
            f"--text takes a file or folder, {EMBEDDED!r} or '{HUB}NAME', and there is no {path}"
        )
    return f"{kind}{path.resolve()}"
