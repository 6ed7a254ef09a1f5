"""What a job does. Each leaves its result on disk, and resumes where it was stopped."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ssmax._progress import log_progress
from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.data.haystack import PAPERS_NEEDLE, Needle
from ssmax_lab.data.preparation import prepare
from ssmax_lab.eval.protocols import OnProgress
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

logger = logging.getLogger(__name__)


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


class Count:
    """Says how much of a job's measuring is done, in tokens that are read."""

    def __init__(self, **parts: Sequence[int]) -> None:
        """Take the tokens of every item of every part, in the order in which they are read."""
        self.ends: dict[str, list[int]] = {}
        self.total = 0
        for name, tokens in parts.items():
            self.ends[name] = [self.total + end for end in itertools.accumulate(tokens)]
            self.total += sum(tokens)

    def part(self, name: str) -> OnProgress:
        """Count the items of a part; there may be fewer of them than were asked for."""
        ends = self.ends[name]

        def count(what: str, done: int, total: int) -> None:
            log_progress(logger, "token", ends[len(ends) * done // total - 1], self.total)

        return count


def _measure_losses(study: Study, by_file: Mapping[str, Measurement]) -> None:
    documents = {file: [study.loss_length] * study.loss_documents for file in by_file}
    count = Count(sharpness=[study.loss_length] * study.sharpness_documents, **documents)
    by_file[POSITION_LOSS].sharpness(
        length=study.loss_length,
        documents=study.sharpness_documents,
        on_progress=count.part("sharpness"),
    )
    for file, here in by_file.items():
        here.position_loss(
            length=study.loss_length,
            documents=study.loss_documents,
            batch=study.batch if here.device.type == "cuda" else 1,
            file=file,
            on_progress=count.part(file),
        )


def _measure_grid(study: Study, here: Measurement, seed: int) -> None:
    here.retrieval_grid(
        base_factors=study.base_factors,
        lengths=study.retrieval_lengths,
        depths=np.linspace(0.0, 1.0, study.needle_depths).round(4).tolist(),
        trials=study.needle_trials,
        weighed=2,
        digits=study.pretraining.data.needle_digits,
        batch=study.batch,
        seed=seed,
        on_progress=lambda what, done, total: log_progress(logger, what, done, total),
    )


def _measure_needles(study: Study, here: Measurement, seed: int) -> None:
    city, number = PAPERS_NEEDLE
    options: dict[str, Any] = {"digits": study.digits, "seed": seed, "batch": study.batch}
    # A prompt is read for its weights, and for its answer.
    score, depths = 2 * study.score_length, study.needle_depths
    count = Count(
        papers=[score] * study.papers_needle_trials,
        scores=[score] * study.score_trials,
        cells=[n * study.needle_trials for n in study.needle_lengths for _ in range(depths)],
    )
    here.needle_scores(
        length=study.score_length,
        trials=study.papers_needle_trials,
        depth=0.5,
        needle=Needle(city=city, number=number[: study.digits]),
        on_progress=count.part("papers"),
        **options,
    )
    here.needle_scores(
        length=study.score_length,
        trials=study.score_trials,
        depth=None,
        on_progress=count.part("scores"),
        **options,
    )
    here.needle(
        lengths=study.needle_lengths,
        depths=np.linspace(0.0, 1.0, depths).round(4).tolist(),
        trials=study.needle_trials,
        on_progress=count.part("cells"),
        **options,
    )


def _is_begun(run: Path) -> bool:
    return (run / RUN_CONFIG).exists()


def _check(outcome: Outcome) -> None:
    if outcome.stopped_by is not None:
        raise Stopped(f"stopped by {outcome.stopped_by} after step {outcome.step:,}")
