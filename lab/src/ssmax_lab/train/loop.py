"""The one loop: a run from its configuration to its last checkpoint, whatever interrupts it."""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from ssmax.errors import MachineError, NonfiniteError, UsageError
from ssmax_lab.data.qa import IGNORE
from ssmax_lab.data.stream import Prefetch
from ssmax_lab.model import LMConfig
from ssmax_lab.model.model import is_of_the_rule
from ssmax_lab.records import METRICS, Provenance, read_journal
from ssmax_lab.train import checkpoint
from ssmax_lab.train.checkpoint import CheckpointWriter, TrainState
from ssmax_lab.train.config import RunConfig, TrainConfig
from ssmax_lab.train.interrupt import Interrupts, graceful_shutdown
from ssmax_lab.train.journal import EVENTS, Journal, JournalMark
from ssmax_lab.train.optimizer import learning_rate, set_learning_rate, start_state
from ssmax_lab.train.parallel import clip_gradients, no_sync, reshard, whole
from ssmax_lab.train.recorded import RecordedGradients
from ssmax_lab.train.run import OpenRun
from ssmax_lab.train.run_config import MODEL
from ssmax_lab.train.samples import Batch, Samples, micro_batches
from ssmax_lab.train.trainee import LMTask, TrainTask
from ssmax_lab.train.watch import Watch
from ssmax_lab.train.world import DistContext


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    """Steps that are done."""
    stopped_by: str | None
    """The signal that ended it early, or None."""
    loss: float
    """Of the last step that was computed here; NaN if none was."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run as its parts need it."""

    config: TrainConfig
    folder: Path
    trainee: TrainTask
    samples: Samples
    validation: Samples | None
    world: DistContext
    watch: Watch
    started: Callable[[], None]
    """To be called when the first model is built."""
    journal: Journal | None
    """Of the first rank."""
    events: Journal | None
    """Likewise: what clocks and people decided."""
    writer: CheckpointWriter
    interrupts: Interrupts


def train(
    config: TrainConfig,
    folder: Path,
    samples: Samples,
    *,
    world: DistContext,
    opened: OpenRun,
    validation: Samples | None = None,
    trainee: TrainTask | None = None,
    resume: bool = False,
    keep_step: int | None = None,
) -> Outcome:
    """Train in a run's folder, from its newest whole checkpoint where `resume` says so.

    What is trained is the paper's model from its first weights, or the `trainee`. The checkpoint
    of `keep_step` is written and stays.
    """
    if config.run.batch_size % world.size:
        raise UsageError(
            f"run.batch_size must be a multiple of the {world.size} ranks, "
            f"got {config.run.batch_size}"
        )
    watch = opened.watch
    found = None
    if resume:
        found = world.on_rank0(lambda: checkpoint.newest_checkpoint(folder, watch.say))
        if found is None:
            world.on_rank0(lambda: _refuse_to_lose(folder, config))
            watch.say(f"{folder} has no whole checkpoint: it starts again")
    state = checkpoint.read_state(found) if found else _fresh_state(config, samples)
    if state.step > config.run.steps:
        raise UsageError(
            f"{folder} has done {state.step} steps already; run.steps must be at least that, "
            f"got {config.run.steps}"
        )
    if state.data_fingerprint != samples.fingerprint:
        raise UsageError(
            f"{folder} was trained on other samples than these; give the data of its config.json"
        )
    journal = events = None

    def open_journals() -> None:
        nonlocal journal, events
        journal = Journal(folder / METRICS, mark=state.journal)
        events = Journal(folder / EVENTS)

    world.on_rank0(open_journals)
    with (
        graceful_shutdown() as interrupts,
        CheckpointWriter(
            folder, world, keep=config.run.keep_checkpoints, keep_step=keep_step
        ) as writer,
    ):
        job = Job(
            config=config,
            folder=folder,
            trainee=trainee or LMTask(),
            samples=samples,
            validation=validation,
            world=world,
            watch=watch,
            started=opened.started,
            journal=journal,
            events=events,
            writer=writer,
            interrupts=interrupts,
        )
        here = Provenance.here(
            config=config.to_dict(), device=str(world.device), seed=config.run.seed
        )
        _event(job, "start", step=state.step, ranks=world.size, commit=here.commit)
        watch.say(
            f"{folder}: {config.run.steps:,} steps of {config.tokens_per_step:,} tokens on "
            f"{world.device}" + (f", from step {state.step:,}" if state.step else "")
        )
        if validation is None and config.data.validation_windows:
            watch.say("there is no text to validate with, or too little")
        try:
            return _all_phases(job, state, found)
        except OSError as error:
            raise MachineError(
                f"{folder} cannot be written: {error}; what was saved is intact, mend that and "
                "go on with --resume"
            ) from error
        finally:
            for file in (journal, events):
                if file is not None:
                    file.close()


def _refuse_to_lose(folder: Path, config: TrainConfig) -> None:
    """A run begins anew only where it cannot have had a checkpoint."""
    journal = folder / METRICS
    steps = [line["step"] for line in read_journal(journal, "step")] if journal.is_file() else []
    done = max(steps, default=0)
    # The first is whole before the second is begun.
    if (folder / MODEL).exists() or done >= 2 * config.run.checkpoint_every:
        raise UsageError(
            f"{folder} has done {done:,} steps and holds no whole checkpoint to go on from; bring "
            "one back, or give another name to begin anew"
        )


def _fresh_state(config: TrainConfig, samples: Samples) -> TrainState:
    return TrainState(
        step=0,
        rule=config.model.rule,
        journal=JournalMark(),
        skipped=0,
        data_fingerprint=samples.fingerprint,
    )


def _all_phases(job: Job, state: TrainState, found: Path | None) -> Outcome:
    """One phase for each rule: a switch is a checkpoint of the old model, read by the new one."""
    outcome = Outcome(step=state.step, stopped_by=None, loss=math.nan)
    for model_config, last_step in _phases(job.config):
        if state.step < last_step or (state.step == last_step == job.config.run.steps):
            outcome, state = _one_phase(job, model_config, state, found, last_step)
            found = checkpoint.checkpoint_folder(job.folder, state.step)
        if outcome.stopped_by is not None:
            break
    return outcome


def _one_phase(
    job: Job,
    model_config: LMConfig,
    state: TrainState,
    found: Path | None,
    last_step: int,
) -> tuple[Outcome, TrainState]:
    """In a function of its own: the old model is gone before the new one is built."""
    phase = _Phase(job, model_config, state, found)
    job.started()
    return phase.run(last_step), phase.state


def _phases(config: TrainConfig) -> Iterator[tuple[LMConfig, int]]:
    """Each model with the step that it is trained to."""
    yield config.model, config.switch_step
    if config.switch.rule:
        yield dataclasses.replace(config.model, rule=config.switch.rule), config.run.steps


class _Phase:
    """The steps that are done with one model."""

    def __init__(
        self, job: Job, model_config: LMConfig, state: TrainState, found: Path | None
    ) -> None:
        self.job, self.config, self.rule = job, job.config, model_config.rule
        if self.config.run.compile:
            # Models of all phases and runs share code, of which only so many versions are kept.
            torch.compiler.reset()
        torch.manual_seed(self.config.run.seed)
        self.model = job.trainee.make(model_config, is_resumed=found is not None)
        self.loss = job.trainee.spread(self.model, self.config.run, job.world)
        self.gradients = gradients_of(self.loss, self.config.run, job.world)
        self.optimizer = job.trainee.optimizer(self.model, self.config.optim, job.world.device)
        start_state(self.optimizer)
        if found is not None:
            self._load(found, state)
            job.writer.last_step = state.step
        self.state = dataclasses.replace(state, rule=self.rule)
        self._waiting: list[tuple[int, float, Tensor, Tensor]] = []
        self._last_loss = math.nan
        self._shown = (time.monotonic(), self.state.step)
        self._warned_below_zero = False

    def run(self, last_step: int) -> Outcome:
        """Train to a step, or until somebody asks to stop."""
        config, job = self.config.run, self.job
        per_rank = config.batch_size // job.world.size

        def batches(step: int) -> list[Batch]:
            first = step * config.batch_size + job.world.rank * per_rank
            parts = micro_batches(job.samples, first=first, count=per_rank, size=config.micro_batch)
            return [part.pinned() if job.world.device.type == "cuda" else part for part in parts]

        stopped_by = None
        if self.state.step < last_step and job.world.is_first:
            # What an earlier, shorter run was finished with is not this run's model.
            shutil.rmtree(job.folder / MODEL, ignore_errors=True)
        with Prefetch(batches, self.state.step) as prefetched:
            while self.state.step < last_step and stopped_by is None:
                self._step(next(prefetched))
                stopped_by = self._after_step(last_step)
        self._flush()
        self._checkpoint(wait=True)
        if stopped_by is None and self.state.step == self.config.run.steps:
            job.trainee.write(self.model, job.folder, job.world)
        return Outcome(step=self.state.step, stopped_by=stopped_by, loss=self._last_loss)

    def _step(self, batches: list[Batch]) -> None:
        """One step of the optimizer."""
        config, world = self.config, self.job.world
        step = self.state.step
        # By its number, so that a resumed run drops what the other would have dropped.
        torch.manual_seed(hash((config.run.seed, step, world.rank)))
        rate = learning_rate(step, config.schedule, peak=config.optim.lr, steps=config.run.steps)
        set_learning_rate(self.optimizer, rate)
        # To be shown: of the first group that learns, which is s and b where all else is frozen.
        rate = next(group["lr"] for group in self.optimizer.param_groups if group["params"])
        loss = self.gradients(batches)
        norm = clip_gradients(self.model, config.optim.max_grad_norm)
        is_skipped = config.run.on_nonfinite == "skip" and not math.isfinite((loss + norm).item())
        if not is_skipped:
            self.optimizer.step()
        self.job.trainee.after_step(self.model, step + 1, config.run.steps)
        self.optimizer.zero_grad(set_to_none=True)
        self.state = dataclasses.replace(
            self.state, step=step + 1, skipped=self.state.skipped + is_skipped
        )
        self._waiting.append((step + 1, rate, loss, norm))

    def _after_step(self, last_step: int) -> str | None:
        """Journal, validation and checkpoint where they are due; the signal that asks to stop."""
        config, step = self.config.run, self.state.step
        is_last = step == last_step
        # Only a device that computes by itself would have to be waited for.
        if step % config.journal_every == 0 or is_last or self.job.world.device.type == "cpu":
            self._flush()
        if step % config.scale_every == 0 or is_last:
            self._record_scale()
        if self.job.validation is not None and (step % config.validate_every == 0 or is_last):
            self._validate()
        is_due = step % config.checkpoint_every == 0 or step == self.job.writer.keep_step
        if is_due and not is_last:
            self._flush()
            self._checkpoint(wait=False)
        # Signals and full disks need not reach all ranks; they stop together.
        writer, interrupts = self.job.writer, self.job.interrupts
        worst = self.job.world.largest(2 if writer.has_failed else int(interrupts.asked))
        if worst == 2:
            writer.finish()
            raise MachineError("another rank could not write its checkpoint")
        return (interrupts.name or "a signal to another rank") if worst == 1 else None

    def _flush(self) -> None:
        """Bring the waiting steps into the journal; a value that is not finite ends the run."""
        if not self._waiting:
            return
        values = torch.stack([torch.stack((loss, norm)) for _, _, loss, norm in self._waiting])
        for (step, rate, _, _), (loss, norm) in zip(self._waiting, values.tolist(), strict=True):
            is_finite = math.isfinite(loss + norm)
            self._line(
                "step" if is_finite else "nonfinite", step=step, loss=loss, lr=rate, grad_norm=norm
            )
            if not is_finite:
                self.job.watch.say(f"step {step}: loss {loss}, norm of the gradients {norm}")
                if self.config.run.on_nonfinite == "stop":
                    self._stop_at_nonfinite(step)
            else:
                self._last_loss = loss
        rate = self._waiting[-1][1]
        self._waiting.clear()
        if self.job.journal is not None:
            self.job.journal.flush()
        self._show(rate)

    def _stop_at_nonfinite(self, step: int) -> None:
        self._waiting.clear()
        self.job.writer.finish()
        kept = checkpoint.newest_checkpoint(self.job.folder, lambda _: None)
        raise NonfiniteError(
            f"the loss or its gradient was not finite at step {step}; "
            + (f"the last good checkpoint is {kept}; " if kept else "there is no checkpoint yet; ")
            + "resume with --on-nonfinite skip (in a study --set run.on_nonfinite=skip), or start "
            "again with a lower learning rate"
        )

    def _show(self, rate: float) -> None:
        """Progress, with the speed since it was shown last."""
        before, from_step = self._shown
        seconds = time.monotonic() - before
        done = self.state.step - from_step
        if done < self.config.run.journal_every and self.state.step < self.config.run.steps:
            return
        self._shown = (before + seconds, self.state.step)
        speed = done * self.config.tokens_per_step / max(seconds, 1e-9)
        _event(self.job, "speed", step=self.state.step, tokens_per_second=round(speed, 1))
        self.job.watch.step(
            step=self.state.step,
            steps=self.config.run.steps,
            loss=self._last_loss,
            rate=rate,
            tokens_per_second=speed,
            seconds_left=(self.config.run.steps - self.state.step) * seconds / max(done, 1),
        )

    def _record_scale(self) -> None:
        """Every head's s and b, the probe's table; an s below 0 is said aloud."""
        learned = {
            name: whole(parameter.detach()).tolist()
            for name, parameter in self.model.named_parameters()
            if is_of_the_rule(name)
        }
        if not learned:
            return
        # Lines are in the order of the steps, wherever the run was interrupted.
        self._flush()
        self._line("scale", step=self.state.step, values=learned)
        s = [value for name, row in learned.items() if name.endswith(".s") for value in row]
        if not s:
            return
        self.job.watch.scale(mean=sum(s) / len(s), least=min(s), largest=max(s))
        if min(s) < 0 and not self._warned_below_zero:
            self._warn_below_zero(learned)

    def _warn_below_zero(self, learned: dict[str, list[float]]) -> None:
        """Once, of a head that would look away from what fits best; a bias may make up for s."""
        log_n = math.log(self.config.model.train_length)
        for name, row in learned.items():
            if not name.endswith(".s"):
                continue
            biases = learned.get(name.removesuffix("s") + "bias", [0.0] * len(row))
            for head, (s, bias) in enumerate(zip(row, biases, strict=True)):
                if s < 0 and s * log_n + bias < 0:
                    self._warned_below_zero = True
                    where = f"{s:.4f} in head {head} of {name}"
                    self.job.watch.say(f"step {self.state.step}: an s is below 0: {where}")
                    return

    def _validate(self) -> None:
        self._flush()
        assert self.job.validation is not None
        loss = validation_loss(self.loss, self.job.validation, self.config, self.job.world)
        self._line("validation", step=self.state.step, loss=loss)
        self.job.watch.validation(step=self.state.step, loss=loss)

    def _checkpoint(self, *, wait: bool) -> None:
        """Write the run as it is now, unless it is there already."""
        job = self.job
        if job.writer.last_step != self.state.step:
            mark = job.world.on_rank0(lambda: job.journal.sync() if job.journal else JournalMark())
            state = dataclasses.replace(self.state, journal=mark)
            job.writer.save(checkpoint.training_tensors(self.model, self.optimizer), state)
            _event(job, "checkpoint", step=self.state.step)
        if wait:
            job.writer.finish()
            # The first rank is done last; whoever reads the checkpoint waits for it.
            job.world.wait()

    def _load(self, found: Path, state: TrainState) -> None:
        tensors = checkpoint.training_tensors(self.model, self.optimizer)
        if state.rule != self.rule:
            # A switch: the new rule's own parameters start as they are, all others go on.
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                # Behind "model." or "optimizer.".
                if not is_of_the_rule(name.partition(".")[2])
            }
            self.job.watch.say(f"step {state.step}: {state.rule} -> {self.rule}")
        checkpoint.load_tensors(found, tensors, self.job.world)

    def _line(self, kind: str, **values: object) -> None:
        if self.job.journal is not None:
            self.job.journal.append(kind=kind, **values)
            self.job.watch.curve(kind, values)


def gradients_of(
    loss: nn.Module, config: RunConfig, world: DistContext
) -> Callable[[list[Batch]], Tensor]:
    """What a step calls for its gradients and loss: `accumulate_gradients`, or a record of it."""

    def compute(batches: list[Batch]) -> Tensor:
        return accumulate_gradients(loss, batches, world, config.precision)

    is_alone = world.device.type == "cuda" and world.size == 1
    return RecordedGradients(loss, compute) if config.record and is_alone else compute


def accumulate_gradients(
    loss: nn.Module, batches: list[Batch], world: DistContext, precision: str
) -> Tensor:
    """Add up the gradients of the mean loss of a step; the mean loss, over all ranks."""
    batches = [batch.to(world.device) for batch in batches]
    counted = sum((batch.targets_BT != IGNORE).sum() for batch in batches)
    assert isinstance(counted, Tensor)
    total = world.sum(counted).clamp_min(1)
    summed = torch.zeros((), device=world.device)
    for index, batch in enumerate(batches):
        with no_sync(loss, until_last=index < len(batches) - 1):
            with _precision(precision, world):
                part = loss(batch.inputs_BT, batch.targets_BT, batch.cu_seqlens)
            # Ranks average their gradients; the loss is a mean over the tokens of all of them.
            (part * (world.size / total)).backward()
        summed += part.detach()
    return world.sum(summed) / total


@torch.no_grad()
def validation_loss(
    loss: nn.Module, samples: Samples, config: TrainConfig, world: DistContext
) -> float:
    """The mean over the validation windows, in their fixed order; ranks share the work."""
    windows = config.data.validation_windows
    per_rank = math.ceil(windows / world.size)
    sums = torch.zeros(2, device=world.device, dtype=torch.float64)
    window = world.rank * per_rank
    loss.eval()
    for batch in micro_batches(samples, first=window, count=per_rank, size=config.run.micro_batch):
        # Ranks make equally many passes, the last ones perhaps over windows that do not count.
        targets_of_windows = batch.targets_BT.view(-1, config.model.train_length)
        targets_of_windows[max(0, windows - window) :] = IGNORE
        window += targets_of_windows.shape[0]
        batch = batch.to(world.device)
        with _precision(config.run.precision, world):
            part = loss(batch.inputs_BT, batch.targets_BT, batch.cu_seqlens)
        sums += torch.stack((part.double(), (batch.targets_BT != IGNORE).sum().double()))
    loss.train()
    reshard(loss)
    total, count = world.sum(sums).tolist()
    return total / max(count, 1.0)


def _precision(precision: str, world: DistContext):
    if precision == "float32":
        return nullcontext()
    return torch.autocast(world.device.type, dtype=torch.bfloat16)


def _event(job: Job, kind: str, **values: object) -> None:
    if job.events is not None:
        job.events.append(kind=kind, time=round(time.time(), 3), **values)
        job.events.flush()
