"""Train a run from its configuration to its last checkpoint, whatever interrupts it."""

import dataclasses
import logging
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from ssmax._files import whole_folder
from ssmax._progress import clock, log_progress
from ssmax.errors import MachineError, NonfiniteError, UsageError
from ssmax_lab.data.stream import prefetched
from ssmax_lab.model import LM, LMConfig, save_lm
from ssmax_lab.model.model import is_of_the_rule, lm_of_shapes
from ssmax_lab.records import METRICS, Provenance, read_metrics
from ssmax_lab.train import checkpoint
from ssmax_lab.train.checkpoint import TrainState, save_checkpoint
from ssmax_lab.train.config import TrainConfig
from ssmax_lab.train.cost import speed_words
from ssmax_lab.train.dist import DistContext, clip_gradients, full_tensor, with_context_parallel
from ssmax_lab.train.run import EVENTS, MODEL, MetricsMark, MetricsWriter, open_run
from ssmax_lab.train.step import (
    Batch,
    Samples,
    accumulate_gradients,
    learning_rate,
    make_optimizer,
    micro_batches,
    parallel_loss,
    set_learning_rate,
    validation_loss,
)

logger = logging.getLogger(__name__)


class Interrupts:
    """Remembers the first request to stop; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.name: str | None = None

    @property
    def asked(self) -> bool:
        """Tell whether somebody wants the run to stop."""
        return self.name is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


@contextmanager
def graceful_shutdown() -> Iterator[Interrupts]:
    """Take SIGINT, SIGTERM and SIGHUP for requests: the step is finished and saved."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        # Signals are the main thread's alone; a run in another is stopped by whoever started it.
        yield interrupts
        return
    heeded = [signal.SIGINT, signal.SIGTERM]
    # Under nohup it is ignored, and stays so.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        heeded.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupts._handle) for number in heeded}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    """Steps that are done."""
    stopped_by: str | None
    """The signal that ended it early, or None."""
    loss: float
    """Of the last step that was computed here; NaN if none was."""


def train(
    config: TrainConfig,
    folder: Path,
    samples: Samples,
    *,
    ranks: DistContext,
    tokenizer_from: Path,
    validation: Samples | None = None,
    first_weights: LM | None = None,
    resume: bool = False,
    keep_step: int | None = None,
) -> Outcome:
    """Train in a run's folder, from its newest whole checkpoint where `resume` says so.

    `first_weights` are those of a model; None: drawn. The checkpoint of `keep_step` is written and
    stays.
    """
    ranks = with_context_parallel(ranks, config)
    if config.run.batch_size % ranks.data_size:
        raise UsageError(
            f"run.batch_size must be a multiple of the {ranks.data_size} ranks that read other "
            f"sequences, got {config.run.batch_size}"
        )
    with (
        open_run(
            folder, config, tokenizer_from=tokenizer_from, ranks=ranks, resume=resume
        ) as write_config,
        graceful_shutdown() as interrupts,
    ):
        found, state = _start(config, folder, samples, ranks, resume=resume)
        training = Training(
            config, folder, samples, validation, ranks, interrupts, state, keep_step
        )
        with closing(training):
            try:
                return training.run(found, first_weights, write_config)
            except OSError as error:
                raise MachineError(
                    f"{folder} cannot be written: {error}; what was saved is intact, fix that and "
                    "resume with --resume"
                ) from error


def _start(
    config: TrainConfig, folder: Path, samples: Samples, ranks: DistContext, *, resume: bool
) -> tuple[Path | None, TrainState]:
    """Find the checkpoint to resume from, if any, and the state that it was written in."""
    found = None
    if resume:
        found, faults = ranks.on_rank0(lambda: checkpoint.newest_checkpoint(folder))
        for fault in faults:
            logger.warning(fault)
        if found is None:
            ranks.on_rank0(lambda: _check_nothing_is_lost(folder, config))
            logger.warning(f"{folder} has no whole checkpoint: it starts again")
    if found is None:
        state = TrainState(
            step=0,
            rule=config.model.rule,
            metrics=MetricsMark(),
            skipped=0,
            data_fingerprint=samples.fingerprint,
        )
        return None, state
    state = checkpoint.read_state(found)
    if state.step > config.run.steps:
        raise UsageError(
            f"{folder} has done {state.step} steps already; run.steps must be at least that, "
            f"got {config.run.steps}"
        )
    if state.data_fingerprint != samples.fingerprint:
        raise UsageError(
            f"{folder} was trained on other samples than these; give the data of its config.json"
        )
    return found, state


def _check_nothing_is_lost(folder: Path, config: TrainConfig) -> None:
    """Refuse to start again where there must have been a checkpoint."""
    metrics = folder / METRICS
    steps = [line["step"] for line in read_metrics(metrics, "step")] if metrics.is_file() else []
    done = max(steps, default=0)
    # The first is whole before the second is begun.
    if (folder / MODEL).exists() or done >= 2 * config.run.checkpoint_every:
        raise UsageError(
            f"{folder} has done {done:,} steps and holds no whole checkpoint to resume from; bring "
            "one back, or give another name to start anew"
        )


class Training:
    """A run in progress: its model and optimizer, its files, and how far it is."""

    model: LM
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        samples: Samples,
        validation: Samples | None,
        ranks: DistContext,
        interrupts: Interrupts,
        state: TrainState,
        keep_step: int | None,
    ) -> None:
        self.config, self.folder, self.ranks, self.interrupts = config, folder, ranks, interrupts
        self.samples, self.validation = samples, validation
        self.state, self.keep_step = state, keep_step
        self.loss: torch.nn.Module | None = None
        self.metrics: MetricsWriter | None = None
        self.events: MetricsWriter | None = None
        """What clocks and people decided; both are the first rank's alone."""
        self._saved_step = -1
        self._waiting: list[tuple[int, float, Tensor, Tensor]] = []
        self._last_loss = math.nan
        self._s_words = ""
        ranks.on_rank0(self._open_files)

    def _open_files(self) -> None:
        self.metrics = MetricsWriter(self.folder / METRICS, mark=self.state.metrics)
        self.events = MetricsWriter(self.folder / EVENTS)

    def close(self) -> None:
        """Close the files; what they hold outlives this process."""
        for file in (self.metrics, self.events):
            if file is not None:
                file.close()

    def run(
        self, found: Path | None, first_weights: LM | None, write_config: Callable[[], None]
    ) -> Outcome:
        """Train a phase for each rule: a switch is a checkpoint of the old model, read by the new.

        The configuration is written when the first model is built: nothing is refused after that.
        """
        config, stopped_by = self.config, None
        here = Provenance.here(
            config=config.to_dict(), device=str(self.ranks.device), seed=config.run.seed
        )
        self._event("start", step=self.state.step, ranks=self.ranks.size, commit=here.commit)
        logger.info(
            f"{self.folder}: {config.run.steps:,} steps of {config.tokens_per_step:,} tokens on "
            f"{self.ranks.device}" + (f", from step {self.state.step:,}" if self.state.step else "")
        )
        if self.validation is None and config.data.validation_windows:
            logger.info("there is no text to validate with, or too little")
        phases = [(config.model, config.switch_step)]
        if config.switch.rule:
            switched = dataclasses.replace(config.model, rule=config.switch.rule)
            phases.append((switched, config.run.steps))
        for model_config, last_step in phases:
            if self.state.step < last_step or self.state.step == last_step == config.run.steps:
                self._build(model_config, found, first_weights)
                write_config()
                stopped_by = self._steps(last_step)
                found = checkpoint.checkpoint_folder(self.folder, self.state.step)
            if stopped_by is not None:
                break
        else:
            self._save_model()
        return Outcome(step=self.state.step, stopped_by=stopped_by, loss=self._last_loss)

    def _build(self, config: LMConfig, found: Path | None, first_weights: LM | None) -> None:
        """Make the model of a phase and its optimizer; load them where there is a checkpoint."""
        if self.loss is not None:
            # The old model is gone before the new one is built.
            self.loss = None
            del self.model, self.optimizer
        if self.config.run.compile:
            # Models of all phases and runs share code, of which only so many versions are kept.
            torch.compiler.reset()
        torch.manual_seed(self.config.run.seed)
        self.model = LM(config)
        if first_weights is not None and found is None:
            self.model.load_state_dict(first_weights.state_dict())
        self.loss = parallel_loss(self.model, self.config.run, self.ranks)
        self.optimizer = make_optimizer(self.model, self.config.optim, self.ranks.device)
        if found is not None:
            tensors = checkpoint.training_tensors(self.model, self.optimizer)
            if self.state.rule != config.rule:
                # The new rule's own parameters start as they are, all others continue.
                tensors = {
                    name: tensor
                    for name, tensor in tensors.items()
                    # Behind "model." or "optimizer.".
                    if not is_of_the_rule(name.partition(".")[2])
                }
                logger.info(f"step {self.state.step}: {self.state.rule} -> {config.rule}")
            checkpoint.load_tensors(found, tensors, self.ranks)
            self._saved_step = self.state.step
        self.state = dataclasses.replace(self.state, rule=config.rule)
        self._shown = (time.monotonic(), self.state.step)

    def _steps(self, last_step: int) -> str | None:
        """Train to a step, or until somebody asks to stop; return the signal."""
        config, ranks = self.config.run, self.ranks
        per_rank = config.batch_size // ranks.data_size
        tokens = ranks.tokens(self.config.model.train_length)

        def batches(step: int) -> list[Batch]:
            first = step * config.batch_size + ranks.data_rank * per_rank
            parts = micro_batches(
                self.samples, first=first, count=per_rank, size=config.micro_batch
            )
            parts = [part.share(tokens) for part in parts]
            return [part.pinned() if ranks.device.type == "cuda" else part for part in parts]

        stopped_by = None
        if self.state.step < last_step and ranks.is_first:
            # What an earlier, shorter run was finished with is not this run's model.
            shutil.rmtree(self.folder / MODEL, ignore_errors=True)
        with closing(prefetched(batches, self.state.step)) as made:
            while self.state.step < last_step and stopped_by is None:
                self._step(next(made))
                stopped_by = self._after_step(last_step)
        self._flush()
        self._checkpoint()
        return stopped_by

    def _step(self, batches: list[Batch]) -> None:
        """Take one step of the optimizer."""
        config, step = self.config, self.state.step
        assert self.loss is not None
        # By its number, so that a resumed run drops what the other would have dropped.
        torch.manual_seed(hash((config.run.seed, step, self.ranks.rank)))
        rate = learning_rate(step, config.schedule, peak=config.optim.lr, steps=config.run.steps)
        set_learning_rate(self.optimizer, rate)
        loss = accumulate_gradients(self.loss, batches, self.ranks, config.run.precision)
        norm = clip_gradients(self.model, config.optim.max_grad_norm)
        is_skipped = config.run.on_nonfinite == "skip" and not math.isfinite((loss + norm).item())
        if not is_skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state = dataclasses.replace(
            self.state, step=step + 1, skipped=self.state.skipped + is_skipped
        )
        self._waiting.append((step + 1, rate, loss, norm))

    def _after_step(self, last_step: int) -> str | None:
        """Write, validate and save where it is due; return the signal that asks to stop."""
        config, step = self.config.run, self.state.step
        is_last = step == last_step
        # Only a device that computes by itself would have to be waited for.
        if step % config.metrics_every == 0 or is_last or self.ranks.device.type == "cpu":
            self._flush()
        if step % config.scale_every == 0 or is_last:
            self._record_scale()
        if self.validation is not None and (step % config.validate_every == 0 or is_last):
            self._validate(self.validation)
        if (step % config.checkpoint_every == 0 or step == self.keep_step) and not is_last:
            self._flush()
            self._checkpoint()
        # Signals need not reach all ranks; they stop together.
        if self.ranks.largest(int(self.interrupts.asked)):
            return self.interrupts.name or "a signal to another rank"
        return None

    def _flush(self) -> None:
        """Write the waiting steps to metrics.jsonl; a value that is not finite ends the run."""
        if not self._waiting:
            return
        values = torch.stack([torch.stack((loss, norm)) for _, _, loss, norm in self._waiting])
        for (step, rate, _, _), (loss, norm) in zip(self._waiting, values.tolist(), strict=True):
            is_finite = math.isfinite(loss + norm)
            self._line(
                "step" if is_finite else "nonfinite", step=step, loss=loss, lr=rate, grad_norm=norm
            )
            if is_finite:
                self._last_loss = loss
                continue
            logger.warning(f"step {step}: loss {loss}, norm of the gradients {norm}")
            if self.config.run.on_nonfinite == "stop":
                kept, _ = checkpoint.newest_checkpoint(self.folder)
                raise NonfiniteError(
                    f"the loss or its gradient was not finite at step {step}; "
                    f"the last good checkpoint is {kept or 'not yet written'}; resume with "
                    "--set run.on_nonfinite=skip, or start again with a lower learning rate"
                )
        rate = self._waiting[-1][1]
        self._waiting.clear()
        if self.metrics is not None:
            self.metrics.flush()
        self._show(rate)

    def _show(self, rate: float) -> None:
        """Log progress, with the speed since it was logged last."""
        (before, from_step), now = self._shown, time.monotonic()
        step, steps = self.state.step, self.config.run.steps
        done, seconds = step - from_step, max(now - before, 1e-9)
        if done < self.config.run.metrics_every and step < steps:
            return
        self._shown = (now, step)
        speed = done * self.config.tokens_per_step / seconds
        self._event("speed", step=step, tokens_per_second=round(speed, 1))
        fast = speed_words(self.config.model, speed, self.ranks.device, self.ranks.size)
        left = clock((steps - step) * seconds / max(done, 1))
        log_progress(
            logger,
            "step",
            step,
            steps,
            f"loss {self._last_loss:.4f}  lr {rate:.2e}  {fast}  {left} left{self._s_words}",
        )

    def _record_scale(self) -> None:
        """Record every head's s and b, or the probe's table."""
        learned = {
            name: full_tensor(parameter.detach()).tolist()
            for name, parameter in self.model.named_parameters()
            if is_of_the_rule(name)
        }
        if not learned:
            return
        # Lines are in the order of the steps, wherever the run was interrupted.
        self._flush()
        self._line("scale", step=self.state.step, values=learned)
        s = [value for name, row in learned.items() if name.endswith(".s") for value in row]
        if s:
            self._s_words = f"  s {sum(s) / len(s):.3f} ({min(s):.3f} to {max(s):.3f})"

    def _validate(self, validation: Samples) -> None:
        self._flush()
        assert self.loss is not None
        loss = validation_loss(self.loss, validation, self.config, self.ranks)
        self._line("validation", step=self.state.step, loss=loss)
        logger.info(f"step {self.state.step:,}  validation loss {loss:.4f}")

    def _checkpoint(self) -> None:
        """Write the run as it is now, unless it is there already."""
        if self._saved_step == self.state.step:
            return
        mark = self.ranks.on_rank0(lambda: self.metrics.sync() if self.metrics else MetricsMark())
        save_checkpoint(
            self.folder,
            checkpoint.training_tensors(self.model, self.optimizer),
            dataclasses.replace(self.state, metrics=mark),
            self.ranks,
            keep=self.config.run.keep_checkpoints,
            keep_step=self.keep_step,
        )
        self._saved_step = self.state.step
        self._event("checkpoint", step=self.state.step)

    def _save_model(self) -> None:
        """Gather the weights and write the finished model; every rank has to call."""
        weights = {name: full_tensor(one).cpu() for name, one in self.model.state_dict().items()}
        if self.ranks.is_first:
            plain = lm_of_shapes(self.model.config)
            plain.load_state_dict(weights, assign=True)
            with whole_folder(self.folder / MODEL, replace=True) as writing:
                save_lm(plain, writing)

    def _line(self, kind: str, **values: object) -> None:
        if self.metrics is not None:
            self.metrics.append(kind, **values)

    def _event(self, kind: str, **values: object) -> None:
        if self.events is not None:
            self.events.append(kind, time=round(time.time(), 3), **values)
            self.events.flush()
