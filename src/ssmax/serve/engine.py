"""Continuous batching: requests join and leave a running batch between two tokens.

Rows stand left-padded side by side, so that all end in the same column; n and positions are counted
from the mask. A prompt is read alone, in chunks, before its row joins: what a request is told does
not depend on who else is there, but for rounding.
"""

# B batch, S cached tokens, V vocabulary

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.lm import sampling
from ssmax.serve.decoders import Decoder
from ssmax.serve.language import Language, Speech
from ssmax.serve.past import Past

CHUNK = 256
"""Tokens of a prompt that are read between two tokens of the others."""

Finish = Literal["stop", "length", "cancelled", "error"]


class Busy(Exception):
    """No more requests are taken at the moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Text to hand on; the last piece of an answer says why it is the last."""

    text: str = ""
    finish: Finish | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt and how to continue it."""

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    seed: int | None = None
    """Of the draws; None: another one each time."""
    stops: Sequence[str] = ()
    """Text that ends the answer and is no part of it."""


@dataclass(kw_only=True, slots=True)
class Totals:
    """What an engine has done so far."""

    finished: Counter[str] = field(default_factory=Counter)
    """Requests, by the reason of their end."""
    refused: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    """Of decoding, each of which gives every row of the batch a token."""
    first_token_seconds: float = 0.0
    """From a request's arrival to its first token, in all."""
    first_tokens: int = 0


class Job:
    """A request on its way. `deliver` is called by the engine's thread and must not raise."""

    def __init__(
        self,
        request: Request,
        language: Language,
        totals: Totals,
        deliver: Callable[[Piece], None],
    ) -> None:
        self.request = request
        self.tokens: list[int] = []
        """The new ones, without the one that ends the answer."""
        self.finish: Finish | None = None
        self.submitted: float = time.monotonic()
        self._is_cancelled = False
        self._deliver, self._totals, self._ends = deliver, totals, language.ends
        self._speech = Speech(language.decode, request.stops)
        generator = torch.Generator()
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed)
        self._choose = sampling.chooser(request.temperature, None, request.top_p, generator)

    def cancel(self) -> None:
        """From any thread: nobody listens any more."""
        self._is_cancelled = True

    @property
    def is_cancelled(self) -> bool:
        """True where it has yet to be taken out."""
        return self._is_cancelled and self.finish is None

    def go_on(self, logits_V: Tensor) -> None:
        """Choose the next token and say what can be said."""
        token = int(self._choose(logits_V.unsqueeze(0)))
        if token in self._ends:
            return self.end("stop", self._speech.rest())
        self.tokens.append(token)
        self._totals.new_tokens += 1
        text = self._speech.add(token)
        if self._speech.is_stopped:
            self.end("stop", text)
        elif len(self.tokens) == self.request.max_new_tokens:
            text += self._speech.rest()
            self.end("stop" if self._speech.is_stopped else "length", text)
        elif text:
            self._deliver(Piece(text=text))

    def end(self, finish: Finish, text: str = "") -> None:
        """The last piece."""
        self.finish = finish
        self._totals.finished[finish] += 1
        self._deliver(Piece(text=text, finish=finish))


@dataclass(slots=True)
class _Reading:
    """A prompt that is being read."""

    job: Job
    past: Past
    done: int = 0


class Engine:
    """One thread that decodes for all; `with engine:` starts and stops it."""

    def __init__(
        self,
        decoder: Decoder,
        language: Language,
        *,
        max_batch: int = 16,
        max_waiting: int = 256,
        report: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("max_waiting", max_waiting)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        self.language = language
        self.totals: Totals = Totals()
        self._decoder, self._report = decoder, report
        self._max_batch = max_batch
        self.max_waiting: int = max_waiting
        self._device = decoder.empty_past()[0].device
        self._changed = threading.Condition()
        self._is_open = False
        self._begin()
        self._thread = threading.Thread(target=self._serve, name="ssmax-engine", daemon=True)

    def __enter__(self) -> "Engine":
        self._is_open = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """True where requests are taken."""
        return self._is_open and self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Requests that are being read or continued."""
        rows, reading = self._rows, self._reading
        return len(rows) + (reading is not None and reading.job not in rows)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def submit(
        self, requests: Sequence[Request], deliver: Callable[[int, Piece], None]
    ) -> list[Job]:
        """Take all of them or none; pieces come with the place of their request."""

        def to(index: int) -> Callable[[Piece], None]:
            return lambda piece: deliver(index, piece)

        jobs = [
            Job(request, self.language, self.totals, to(index))
            for index, request in enumerate(requests)
        ]
        with self._changed:
            if not self.is_running:
                raise Busy("the server is shutting down")
            if len(self._waiting) + len(jobs) > self.max_waiting:
                self.totals.refused += len(jobs)
                raise Busy(
                    f"{len(self._waiting)} requests are waiting, {len(jobs)} more came, and "
                    f"{self.max_waiting} may wait; try again later"
                )
            self._waiting.extend(jobs)
            self._changed.notify()
        return jobs

    @torch.no_grad()
    def _serve(self) -> None:
        while self._has_work():
            try:
                self._drop_cancelled()
                self._read()
                self._step()
            except Exception as error:
                # As where a cache does not fit beside its copy without the rows that leave.
                with self._changed:
                    self._fail(self._all(), error)
                    self._begin()
        for job in self._all():
            job.cancel()
        self._drop_cancelled()

    def _begin(self) -> None:
        """With nobody here."""
        self._waiting: deque[Job] = deque()
        self._reading: _Reading | None = None
        self._rows: list[Job] = []
        self._past = Past(self._decoder.empty_past())
        self._keep_BS = torch.zeros(0, 0, dtype=torch.long, device=self._device)

    def _has_work(self) -> bool:
        """Wait for work; False once the engine closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._all() or not self._is_open)
            return self._is_open

    def _all(self) -> list[Job]:
        reading = [] if self._reading is None else [self._reading.job]
        with self._changed:
            return [*self._waiting, *reading, *self._rows]

    def _drop_cancelled(self) -> None:
        for job in self._all():
            if job.is_cancelled:
                job.end("cancelled")
        with self._changed:
            self._waiting = deque(job for job in self._waiting if job.finish is None)
        if self._reading is not None and self._reading.job.finish is not None:
            self._reading = None
        self._leave()

    def _read(self) -> None:
        """Read a chunk of the prompt whose turn it is; one that is read through joins the rows."""
        if self._reading is None:
            with self._changed:
                if not self._waiting or len(self._rows) == self._max_batch:
                    return
                # Into its next place before it leaves the last: at no moment is it nowhere.
                self._reading = _Reading(self._waiting[0], Past(self._decoder.empty_past()))
                self._waiting.popleft()
        reading, job = self._reading, self._reading.job
        chunk = job.request.prompt[reading.done : reading.done + CHUNK]
        reading.done += len(chunk)
        try:
            tokens = torch.tensor([chunk], device=self._device)
            mask = torch.ones(1, reading.done, dtype=torch.long, device=self._device)
            logits_BV = self._decoder.last(tokens, mask, reading.past)
            self.totals.prompt_tokens += len(chunk)
            if reading.done < len(job.request.prompt):
                return
            self.totals.first_token_seconds += time.monotonic() - job.submitted
            self.totals.first_tokens += 1
            job.go_on(logits_BV[0].float().cpu())
            if job.finish is None:
                self._join(job, reading.past, mask)
        except Exception as error:
            self._fail([job], error)
        self._reading = None

    def _step(self) -> None:
        """One token for every row."""
        if not self._rows:
            return
        try:
            tokens = torch.tensor([[job.tokens[-1]] for job in self._rows], device=self._device)
            self._keep_BS = F.pad(self._keep_BS, (0, 1), value=1)
            logits_BV = self._decoder.last(tokens, self._keep_BS, self._past).float().cpu()
            self.totals.steps += 1
        except Exception as error:
            self._fail(self._rows, error)
        else:
            for job, logits_V in zip(self._rows, logits_BV, strict=True):
                try:
                    job.go_on(logits_V)
                except Exception as error:
                    self._fail([job], error)
        self._leave()

    def _join(self, job: Job, past: Past, keep_1S: Tensor) -> None:
        """Side by side, padded on the left to the longest."""
        if self._rows:
            past = self._past.joined(past)
            keeps = [F.pad(keep, (past.length - keep.shape[1], 0))
                     for keep in (self._keep_BS, keep_1S)]  # fmt: skip
            keep_1S = torch.cat(keeps)
        self._rows, self._past, self._keep_BS = [*self._rows, job], past, keep_1S

    def _leave(self) -> None:
        """Without the rows that have ended, and without columns that hold padding alone."""
        staying = [place for place, job in enumerate(self._rows) if job.finish is None]
        if len(staying) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in staying]
        keep_BS = self._keep_BS[staying]
        first = int(keep_BS.any(0).int().argmax()) if staying else keep_BS.shape[1]
        self._keep_BS = keep_BS[:, first:]
        self._past = self._past.kept(staying, first)

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        self._report(error)
        for job in jobs:
            if job.finish is None:
                job.end("error")
