"""The paper preset at a hundredth of its steps and width; takes FOLDER TOKENS RANKS."""

import dataclasses
import sys
from pathlib import Path

from ssmax_lab.study.presets import Study, paper
from ssmax_lab.study.reproduction import reproduce


def rehearsal() -> Study:
    """Keep the schedule, the ranks and every kind of job; divide what takes time."""
    study = paper()
    pretraining = study.pretraining.with_overrides(
        {
            "model.num_layers": 4,
            "model.hidden_size": 8,
            "model.num_heads": 4,
            "model.intermediate_size": 20,
            "model.vocab_size": 257,
            "model.train_length": 128,
            "run.steps": study.pretraining.run.steps // 100,
            "run.batch_size": study.pretraining.run.batch_size // 100,
            "run.compile": False,
            "schedule.warmup_steps": study.pretraining.schedule.warmup_steps // 100,
        }
    )
    return dataclasses.replace(
        study,
        pretraining=pretraining,
        tokenizer="bytes",
        # Table 3 but for its ten epochs of 128 rows a step.
        finetuning={"run.steps": 20, "schedule.warmup_steps": 5},
        loss_length=study.loss_length // 16,
        loss_documents=4,
        needle_lengths=tuple(length // 8 for length in study.needle_lengths[1:6]),
        needle_depths=2,
        needle_trials=1,
        digits=4,
        score_length=study.score_length // 8,
        score_trials=2,
        papers_needle_trials=2,
        sharpness_documents=1,
    )


if __name__ == "__main__":
    folder, tokens, ranks = sys.argv[1:]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = reproduce(
        rehearsal(),
        Path(folder),
        configurations=["b"],
        seeds=1,
        data=Path(tokens),
        device="cpu",
        launcher=[*launcher, f"--nproc-per-node={ranks}"] if int(ranks) > 1 else [],
    )
    print(done.failed or done.stopped_by or "whole")
    sys.exit(0 if done.is_whole else 1)
