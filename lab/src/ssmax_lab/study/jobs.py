"""What a job does. Each leaves its result on disk, and resumes where it was stopped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.data.haystack import PAPERS_NEEDLE, Needle
from ssmax_lab.data.preparation import prepare
from ssmax_lab.records import (
    POSITION_LOSS,
    RESULTS,
    RUN_CONFIG,
    SAME_THETA_LOSS,
    finetuned_folder,
    pretrained_folder,
)
from ssmax_lab.study.measurement import Measurement
from ssmax_lab.study.plan import Job
from ssmax_lab.study.presets import Study
from ssmax_lab.train.checkpoint import branch, drop_checkpoints
from ssmax_lab.train.dist import init_distributed
from ssmax_lab.train.finetuning import finetune
from ssmax_lab.train.loop import Outcome
from ssmax_lab.train.pretraining import pretrain
from ssmax_lab.train.recipes import configured


class Stopped(Exception):
    """A signal ended a job early; what it had done is saved."""


def run_job(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    """Do a job, or what is left of it."""
    {"data": _prepare, "pretrain": _pretrain, "finetune": _finetune}.get(job.kind, _measure)(
        study, folder, job, data=data, device=device
    )


def _prepare(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    prepare(
        study.source,
        data,
        tokenizer=study.tokenizer,
        validation_fraction=study.validation_fraction,
    )


def _pretrain(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    # One seed for the weights and the order: all configurations of a seed see the same batches.
    config = configured(study.pretraining, job.configuration).with_overrides(
        {"data.folder": str(data), "run.seed": job.seed, "data.seed": job.seed}
    )
    run = pretrained_folder(folder, job.run)
    resume = _is_begun(run)
    with init_distributed(device) as ranks:
        if job.configuration == "f" and not resume:
            # (f) is (a) until its switch: where (a) was trained, (f) resumes from there.
            softmax = pretrained_folder(folder, f"a-{job.seed}")
            resume = ranks.on_rank0(lambda: branch(softmax, _switch_step(study), run))
        kept = _kept_step(study, job)
        _check(pretrain(config, run, ranks=ranks, resume=resume, keep_step=kept))


def _switch_step(study: Study) -> int:
    return configured(study.pretraining, "f").switch_step


def _kept_step(study: Study, job: Job) -> int | None:
    """Return the step whose checkpoint stays for another pretraining: (f) begins in (a)."""
    return _switch_step(study) if job.configuration == "a" else None


def tidy(study: Study, folder: Path, job: Job) -> None:
    """Drop checkpoints: of a done training others need the model alone, but for (f), begun in (a).

    Three seeds of a small study's checkpoints would take 60 GB.
    """
    if job.kind == "finetune":
        drop_checkpoints(finetuned_folder(folder, job.run))
    elif job.kind == "pretrain":
        drop_checkpoints(pretrained_folder(folder, job.run), keep_step=_kept_step(study, job))
        if job.configuration == "f":
            drop_checkpoints(pretrained_folder(folder, f"a-{job.seed}"))


def _finetune(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    run = finetuned_folder(folder, job.run)
    resume, one = _is_begun(run), CONFIGURATIONS[job.configuration]
    with init_distributed(device) as ranks:
        outcome = finetune(
            pretrained_folder(folder, job.of_pretrained),
            run,
            ranks=ranks,
            questions=study.questions,
            rule=one.rule if one.base and not resume else None,
            overrides={} if resume else dict(study.finetuning),
            resume=resume,
        )
    _check(outcome)


def _measure(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    one = CONFIGURATIONS[job.configuration]
    is_pretrained = job.kind == "loss" or study.teaches_needles
    if is_pretrained:
        run = pretrained_folder(folder, job.of_pretrained)
    else:
        run = finetuned_folder(folder, job.of_finetuned)
    # What is fine-tuned under its own rule needs no other one.
    is_replaced = bool(one.base) and (is_pretrained or not one.is_finetuned)
    s_of: dict[str, float | Literal["kept"] | None] = {
        "initial": None,
        "base": "kept",
        "constant": study.test_constant,
    }

    def measurement(theta: float | None, length: int | None = None) -> Measurement:
        return Measurement.of_run(
            run,
            data=data,
            theta=theta,
            rule=one.rule if is_replaced else None,
            s=s_of[one.s] if is_replaced else None,
            length=length,
            results=folder / RESULTS / job.run,
            device=device,
        )

    if job.kind == "needle" and study.teaches_needles:
        # Rules that know a training length are told the one that retrieval was taught at.
        _measure_grid(study, measurement(None, study.retrieval_lengths[0]), job.seed)
        return
    here = measurement(study.theta)
    if is_pretrained:
        unchanged = measurement(study.pretraining.model.theta)
        _measure_losses(study, {POSITION_LOSS: here, SAME_THETA_LOSS: unchanged})
    else:
        _measure_needles(study, here, job.seed)


def _measure_losses(study: Study, by_file: Mapping[str, Measurement]) -> None:
    by_file[POSITION_LOSS].sharpness(length=study.loss_length, documents=study.sharpness_documents)
    for file, here in by_file.items():
        here.position_loss(
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


def _is_begun(run: Path) -> bool:
    return (run / RUN_CONFIG).exists()


def _check(outcome: Outcome) -> None:
    if outcome.stopped_by is not None:
        raise Stopped(f"stopped by {outcome.stopped_by} after step {outcome.step:,}")
