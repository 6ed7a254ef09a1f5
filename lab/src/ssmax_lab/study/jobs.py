"""What a job does. Each leaves its result on disk, and goes on where it was stopped."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from ssmax._progress import ProgressLine
from ssmax_lab.data.haystack import PAPERS_NEEDLE, Needle
from ssmax_lab.data.preparation import prepare
from ssmax_lab.records import RUN_CONFIG
from ssmax_lab.report.findings import RESULTS, RUNS, SAME_THETA_LOSS
from ssmax_lab.study.measurement import Measurement
from ssmax_lab.study.plan import Job
from ssmax_lab.study.presets import NOT_TRAINED, REPLACED, Replacement, Study
from ssmax_lab.train import configured, finetune, joined_world, pretrain
from ssmax_lab.train.checkpoint import branch, drop_checkpoints
from ssmax_lab.train.loop import Outcome


class Stopped(Exception):
    """A signal ended a job early; what it had done is saved."""


def run_job(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    """Do a job, or what is left of it."""
    {"data": _prepare, "pretrain": _pretrain, "finetune": _finetune}.get(job.kind, _measure)(
        study, folder, job, data=data, device=device
    )


def _prepare(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    line = ProgressLine()
    prepare(
        study.source,
        data,
        tokenizer=study.tokenizer,
        validation_fraction=study.validation_fraction,
        on_progress=lambda done, total: line.show(f"part {done:,}/{total:,}"),
    )


def _pretrain(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    # One seed for the weights and the order: all configurations of a seed see the same batches.
    config = configured(study.pretraining, job.configuration).replaced(
        {"data.folder": str(data), "run.seed": job.seed, "data.seed": job.seed}
    )
    runs = folder / RUNS
    run, softmax = runs / job.run, runs / f"a-{job.seed}"
    resume = _is_begun(run)
    with joined_world(device) as world:
        if job.configuration == "f" and not resume:
            # (f) is (a) until its switch: where (a) was trained, (f) goes on from there.
            resume = world.on_rank0(lambda: branch(softmax, _switch_step(study), run))
        kept = _kept_step(study, job)
        _check(pretrain(config, run, world=world, resume=resume, keep_step=kept))


def _switch_step(study: Study) -> int:
    return configured(study.pretraining, "f").switch_step


def _kept_step(study: Study, job: Job) -> int | None:
    """The step of a pretraining whose checkpoint stays for another: (f) begins in (a)."""
    return _switch_step(study) if job.configuration == "a" else None


def tidy(study: Study, folder: Path, job: Job) -> None:
    """Once a training is done its model is all that others need, but for (f), which begins in (a).

    Three seeds of a small study's checkpoints would take 60 GB.
    """
    runs = folder / RUNS
    if job.kind == "finetune":
        drop_checkpoints(runs / f"{job.run}-qa")
    elif job.kind == "pretrain":
        drop_checkpoints(runs / job.run, keep_step=_kept_step(study, job))
        if job.configuration == "f":
            drop_checkpoints(runs / f"a-{job.seed}")


def _finetune(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    runs = folder / RUNS
    base = runs / (f"a-{job.seed}" if job.configuration == "e" else job.run)
    run = runs / f"{job.run}-qa"
    resume = _is_begun(run)
    with joined_world(device) as world:
        outcome = finetune(
            base,
            run,
            world=world,
            questions=study.questions,
            rule="ssmax" if job.configuration == "e" and not resume else None,
            changes={} if resume else dict(study.finetuning),
            resume=resume,
        )
    _check(outcome)


def _measure(study: Study, folder: Path, job: Job, *, data: Path, device: str | None) -> None:
    is_pretrained = job.kind == "loss"
    # (e) is fine-tuned under its own rule; the others replace that of a fine-tuned model too.
    is_replaced = job.configuration in (REPLACED if is_pretrained else NOT_TRAINED)
    replacement = REPLACED[job.configuration] if is_replaced else None
    name = f"{replacement.base}-{job.seed}" if replacement else job.run

    def measurement(theta: float) -> Measurement:
        return Measurement.of_run(
            folder / RUNS / (name if is_pretrained else f"{name}-qa"),
            data=data,
            theta=theta,
            rule=replacement.rule if replacement else None,
            s=_s_of(study, replacement),
            results=folder / RESULTS / job.run,
            device=device,
        )

    here = measurement(study.theta)
    if is_pretrained:
        here.fading(length=study.loss_length, documents=study.fading_documents)
        _measure_loss(study, here)
        _measure_loss(study, measurement(study.pretraining.model.theta), file=SAME_THETA_LOSS)
    else:
        _measure_needle(study, here, job.seed)


def _s_of(study: Study, replacement: Replacement | None) -> float | Literal["kept"] | None:
    if replacement is None or replacement.s == "first":
        return None
    return study.test_constant if replacement.s == "constant" else "kept"


def _measure_loss(study: Study, here: Measurement, **where: str) -> None:
    here.position_loss(
        length=study.loss_length,
        documents=study.loss_documents,
        batch=study.batch if here.device.type == "cuda" else 1,
        on_progress=_count,
        **where,
    )


def _measure_needle(study: Study, here: Measurement, seed: int) -> None:
    city, number = PAPERS_NEEDLE
    scores: dict[str, Any] = {
        "length": study.score_length,
        "digits": study.digits,
        "seed": seed,
        "batch": study.batch,
        "on_progress": _count,
    }
    here.needle_scores(
        trials=study.papers_needle_trials,
        depth=0.5,
        needle=Needle(city=city, number=number[: study.digits]),
        **scores,
    )
    here.needle_scores(trials=study.score_trials, depth=None, **scores)
    here.needle(
        lengths=study.needle_lengths,
        depths=np.linspace(0.0, 1.0, study.needle_depths).round(4).tolist(),
        trials=study.needle_trials,
        digits=study.digits,
        batch=study.batch,
        seed=seed,
        on_progress=_count,
    )


def _count(what: str, done: int, total: int) -> None:
    print(f"{what} {done:,}/{total:,}", flush=True)


def _is_begun(run: Path) -> bool:
    return (run / RUN_CONFIG).exists()


def _check(outcome: Outcome) -> None:
    if outcome.stopped_by is not None:
        raise Stopped(f"stopped by {outcome.stopped_by} after step {outcome.step:,}")
