"""Train runs from tokens: one loop, on one machine or many, that nothing interrupts for good.

Names are loaded on first use.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax_lab.train.config import TrainConfig as TrainConfig
    from ssmax_lab.train.converted import finetune_converted as finetune_converted
    from ssmax_lab.train.dist import init_distributed as init_distributed
    from ssmax_lab.train.finetuning import finetune as finetune
    from ssmax_lab.train.loop import Outcome as Outcome
    from ssmax_lab.train.loop import train as train
    from ssmax_lab.train.pretraining import pretrain as pretrain
    from ssmax_lab.train.recipes import PRETRAINING as PRETRAINING
    from ssmax_lab.train.recipes import configured as configured
    from ssmax_lab.train.run import load_run_model as load_run_model
    from ssmax_lab.train.run import load_run_tokenizer as load_run_tokenizer
    from ssmax_lab.train.run import read_run_config as read_run_config

_HOME_OF = {
    "Outcome": "loop",
    "PRETRAINING": "recipes",
    "TrainConfig": "config",
    "configured": "recipes",
    "finetune": "finetuning",
    "finetune_converted": "converted",
    "init_distributed": "dist",
    "load_run_model": "run",
    "load_run_tokenizer": "run",
    "pretrain": "pretraining",
    "read_run_config": "run",
    "train": "loop",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = door(__name__, _HOME_OF)
    __all__ = sorted(_HOME_OF)
