"""From tokens to runs: one loop, on one machine or many, that nothing interrupts for good."""

from ssmax.train.config import TrainConfig
from ssmax.train.converted import finetune_converted
from ssmax.train.finetuning import finetune
from ssmax.train.loop import NonfiniteError, Outcome, train
from ssmax.train.pretraining import pretrain
from ssmax.train.recipes import PRETRAINING, configured
from ssmax.train.run import load_run_model, load_run_tokenizer, read_run_config
from ssmax.train.world import joined_world

__all__ = [
    "PRETRAINING",
    "NonfiniteError",
    "Outcome",
    "TrainConfig",
    "configured",
    "finetune",
    "finetune_converted",
    "joined_world",
    "load_run_model",
    "load_run_tokenizer",
    "pretrain",
    "read_run_config",
    "train",
]
