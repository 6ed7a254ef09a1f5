"""What a job does, in a process of its own: `python -m ssmax_lab.study.jobs FOLDER JOB`.

Each leaves its result on disk, and resumes where it was stopped.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ssmax._files import make_folder, write_whole
from ssmax._progress import logging_to_terminal
from ssmax.errors import MachineError, NonfiniteError, UsageError
from ssmax_lab.analysis.findings import read_study_file
from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.data.haystack import PAPERS_NEEDLE, Needle
from ssmax_lab.data.preparation import prepare
from ssmax_lab.records import (
    DONE,
    POSITION_LOSS,
    RESULTS,
    RUN_CONFIG,
    RUNS,
    SAME_THETA_LOSS,
)
from ssmax_lab.study.measurement import Measurement
from ssmax_lab.study.plan import Job, done_mark
from ssmax_lab.study.presets import Study
from ssmax_lab.train.checkpoint import branch, drop_checkpoints
from ssmax_lab.train.dist import init_distributed
from ssmax_lab.train.finetuning import finetune
from ssmax_lab.train.loop import Outcome
from ssmax_lab.train.pretraining import pretrain
from ssmax_lab.train.recipes import configured

PARENT_DEATH_SIGNAL = 1
"""Linux: prctl's PR_SET_PDEATHSIG."""


def main() -> int:
    """Do a job of the study in a folder; 0 done, 1 failed, 2 refused, 130 stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("job", type=Job.named)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device")
    given, started = parser.parse_args(), time.monotonic()
    if sys.platform == "linux":
        # Stop when the scheduler is gone, however it went: nobody else would.
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    try:
        study = Study.from_dict(read_study_file(given.folder)["study"])
        with logging_to_terminal():
            outcome = run_job(study, given.folder, given.job, data=given.data, device=given.device)
    except UsageError as error:
        print(error)
        return 2
    except (MachineError, NonfiniteError) as error:
        print(error)
        return 1
    if outcome is not None and outcome.stopped_by is not None:
        print(f"stopped by {outcome.stopped_by} after step {outcome.step:,}")
        return 130
    if os.environ.get("RANK", "0") == "0":
        seconds = round(time.monotonic() - started, 1)
        make_folder(given.folder / DONE)
        write_whole(done_mark(given.folder, given.job), json.dumps({"seconds": seconds}))
        tidy(study, given.folder, given.job)
    return 0


def run_job(
    study: Study, folder: Path, job: Job, *, data: Path, device: str | None
) -> Outcome | None:
    """Do a job, or what is left of it; tell how a training ended."""
    if job.kind == "pretrain":
        return _pretrain(study, folder, job, data=data, device=device)
    if job.kind == "finetune":
        return _finetune(study, folder, job, device=device)
    if job.kind == "data":
        fraction = study.validation_fraction
        prepare(study.source, data, tokenizer=study.tokenizer, validation_fraction=fraction)
    else:
        _measure(study, folder, job, data=data, device=device)
    return None


def _pretrain(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> Outcome:
    # One seed for the weights and the order: all configurations of a seed see the same batches.
    config = configured(study.pretraining, job.configuration).with_overrides(
        {"data.folder": str(data), "run.seed": job.seed, "data.seed": job.seed}
    )
    run = folder / RUNS / job.run
    resume = (run / RUN_CONFIG).exists()
    with init_distributed(device) as ranks:
        if job.configuration == "f" and not resume:
            # (f) is (a) until its switch: where (a) was trained, (f) resumes from there.
            softmax = folder / RUNS / f"a-{job.seed}"
            resume = ranks.on_rank0(lambda: branch(softmax, _switch_step(study), run))
        return pretrain(config, run, ranks=ranks, resume=resume, keep_step=_kept_step(study, job))


def _switch_step(study: Study) -> int:
    return configured(study.pretraining, "f").switch_step


def _kept_step(study: Study, job: Job) -> int | None:
    """Return the step whose checkpoint stays for another pretraining: (f) begins in (a)."""
    return _switch_step(study) if job.configuration == "a" else None


def tidy(study: Study, folder: Path, job: Job) -> None:
    """Drop checkpoints: of a done training others need the model alone, but for (f), begun in (a).

    Three seeds of a small study's checkpoints would take 60 GB.
    """
    runs = folder / RUNS
    if job.kind == "finetune":
        drop_checkpoints(runs / job.of_finetuned)
    elif job.kind == "pretrain":
        drop_checkpoints(runs / job.run, keep_step=_kept_step(study, job))
        if job.configuration == "f":
            drop_checkpoints(runs / f"a-{job.seed}")


def _finetune(study: Study, folder: Path, job: Job, *, device: str | None) -> Outcome:
    run, one = folder / RUNS / job.of_finetuned, CONFIGURATIONS[job.configuration]
    resume = (run / RUN_CONFIG).exists()
    with init_distributed(device) as ranks:
        return finetune(
            folder / RUNS / job.of_pretrained,
            run,
            ranks=ranks,
            questions=study.questions,
            rule=one.rule if one.base and not resume else None,
            overrides={} if resume else dict(study.finetuning),
            resume=resume,
        )


def _measure(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    one = CONFIGURATIONS[job.configuration]
    is_pretrained = job.kind == "loss" or study.teaches_needles
    # What is fine-tuned under its own rule needs no other one.
    is_replaced = bool(one.base) and (is_pretrained or not one.is_finetuned)
    s_of: dict[str, float | Literal["kept"] | None] = {
        "initial": None,
        "base": "kept",
        "constant": study.test_constant,
    }

    def measurement(theta: float | None, length: int | None = None) -> Measurement:
        return Measurement.of_run(
            folder / RUNS / (job.of_pretrained if is_pretrained else job.of_finetuned),
            data=data,
            theta=theta,
            rule=one.rule if is_replaced else None,
            s=s_of[one.s] if is_replaced else None,
            length=length,
            results=folder / RESULTS / job.run,
            device=device,
        )

    if job.kind == "loss":
        _measure_losses(study, measurement(study.theta), measurement(study.pretraining.model.theta))
    elif study.teaches_needles:
        # Rules that know a training length are told the one that retrieval was taught at.
        _measure_grid(study, measurement(None, study.retrieval_lengths[0]), job.seed)
    else:
        _measure_needles(study, measurement(study.theta), job.seed)


def _measure_losses(study: Study, here: Measurement, unchanged: Measurement) -> None:
    here.sharpness(length=study.loss_length, documents=study.sharpness_documents)
    for measured, file in ((here, POSITION_LOSS), (unchanged, SAME_THETA_LOSS)):
        measured.position_loss(
            length=study.loss_length,
            documents=study.loss_documents,
            batch=study.batch if here.device.type == "cuda" else 1,
            file=file,
        )


def _depths(study: Study) -> list[float]:
    return np.linspace(0.0, 1.0, study.needle_depths).round(4).tolist()


def _measure_grid(study: Study, here: Measurement, seed: int) -> None:
    here.retrieval_grid(
        base_factors=study.base_factors,
        lengths=study.retrieval_lengths,
        depths=_depths(study),
        trials=study.needle_trials,
        weighed=2,
        digits=study.pretraining.data.needle_digits,
        batch=study.batch,
        seed=seed,
    )


def _measure_needles(study: Study, here: Measurement, seed: int) -> None:
    city, number = PAPERS_NEEDLE
    options: dict[str, Any] = {"digits": study.digits, "seed": seed, "batch": study.batch}
    here.needle_scores(
        length=study.score_length,
        trials=study.papers_needle_trials,
        depth=0.5,
        needle=Needle(city=city, number=number[: study.digits]),
        **options,
    )
    here.needle_scores(length=study.score_length, trials=study.score_trials, depth=None, **options)
    here.needle(
        lengths=study.needle_lengths, depths=_depths(study), trials=study.needle_trials, **options
    )


if __name__ == "__main__":
    sys.exit(main())
