"""A model as it is measured: a run's under a rule and a theta, or anyone's; and its text."""

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ssmax._device import select_device
from ssmax._files import in_turn, make_folder, write_whole
from ssmax._progress import log_progress
from ssmax.errors import UsageError
from ssmax.nn import SSMaxScale
from ssmax_lab.data.haystack import Needle, haystack_text, long_rows
from ssmax_lab.data.preparation import text_to_measure
from ssmax_lab.data.shards import ShardSet
from ssmax_lab.data.tokenizer import FILE as TOKENIZER
from ssmax_lab.data.tokenizer import Tokenizer
from ssmax_lab.eval.position_loss import measure_position_loss
from ssmax_lab.eval.protocols import EvalModel
from ssmax_lab.eval.retrieval import (
    measure_needle_scores,
    measure_retrieval,
    measure_retrieval_by_length,
)
from ssmax_lab.eval.sharpness import measure_sharpness
from ssmax_lab.model import LM
from ssmax_lab.records import (
    NEEDLE,
    NEEDLE_SCORE,
    PAPERS_NEEDLE_SCORE,
    POSITION_LOSS,
    RECORD_FILES,
    RETRIEVAL_GRID,
    SHARPNESS,
    NeedleScore,
    NeedleTrial,
    PositionLoss,
    Provenance,
    RetrievalGrid,
    Sharpness,
    config_hash,
    read_jsonl,
    to_jsonl,
)
from ssmax_lab.train.run import (
    load_run_model,
    load_run_tokenizer,
    read_run_config,
    text_of_run,
    with_name,
)

logger = logging.getLogger(__name__)
_tell = functools.partial(log_progress, logger)


@dataclass(kw_only=True)
class Measurement:
    """A model as it is to be measured, its text, and where results go."""

    model: EvalModel
    tokenizer: Tokenizer
    run: str
    """What the model is called in records."""
    identity: dict[str, Any]
    """All that decides what comes out, but for the measurement's own options and the text."""
    shards: ShardSet
    """The text."""
    results: Path
    device: torch.device
    usual_length: int
    """Contexts of needles are multiples of it, where nothing else is asked for."""
    is_narrow: bool = False
    """It was trained in bfloat16."""
    first: int | None = None
    """The token that begins a text."""
    model_hash: str
    """Tells models apart whose names are the same."""

    @classmethod
    def of_run(
        cls,
        folder: Path,
        *,
        data: Path | None,
        theta: float | None,
        rule: str | None,
        s: float | Literal["kept"] | None = None,
        length: int | None = None,
        results: Path,
        device: str | None,
    ) -> "Measurement":
        """Load a run's model, under another rule or theta where one is given.

        Under another rule s begins anew, unless it is given or to be kept, and the training length
        that it knows may be another.
        """
        config = read_run_config(folder)
        here = select_device(device)
        model = load_run_model(folder)
        weights = weights_hash(model)
        # Its own rule stays with what it has learned.
        rule = None if rule == model.config.rule else rule
        model = (model if rule is None else _under(model, rule, s, length)).to(here).eval()
        model.theta = model.theta if theta is None else theta
        measured = cls(
            model=model,
            tokenizer=load_run_tokenizer(folder),
            # What is measured is named by all that makes it what it is.
            run=with_name(folder).name
            + (f"+{rule}" if rule else "")
            + (f"={s:.4g}" if isinstance(s, float) else "")
            + (f"@{theta:g}" if theta else ""),
            identity={
                "run": config.to_dict(),
                "weights": weights,
                "model": model.config.to_dict(),
                "theta": model.theta,
                **({} if s is None else {"s": s}),
            },
            shards=ShardSet.open(
                text_to_measure(data or text_of_run(config), is_for_tests=data is not None)
            ),
            results=results,
            device=here,
            usual_length=config.model.train_length,
            is_narrow=here.type == "cuda" and config.run.precision == "bfloat16",
            model_hash=config_hash({"weights": weights}),
        )
        file = folder / TOKENIZER
        measured.check(str(file) if file.is_file() else config.data.tokenizer)
        return measured

    def check(self, tokenizer: str, *, otherwise: str = "") -> None:
        """Refuse another tokenizer's text, numbers of another model, and a folder not to write.

        `tokenizer` is what its own is called or where it is, `otherwise` what else could be done.
        """
        shards = self.shards
        if shards.vocabulary.hash != self.tokenizer.vocabulary.hash:
            raise UsageError(
                f"the tokens in {shards.folder} are those of {shards.vocabulary.name!r}, not of "
                "the model; make them with: "
                f"ssmax-lab data prepare SOURCE OUT --tokenizer {tokenizer}" + otherwise
            )
        shards.verify_small()
        for file, one in RECORD_FILES.items():
            path = self.results / file
            records: list[Any] = read_jsonl(path, one.kind) if path.is_file() else []
            known = {record.provenance.model for record in records if record.run == self.run}
            if known - {"", self.model_hash}:
                raise UsageError(
                    f"{path} has numbers of another model that is called {self.run!r}, or of "
                    "other weights; give --results another folder, or the model's folder another "
                    "name"
                )
        make_folder(self.results)

    def provenance(self, **options: Any) -> Provenance:
        """Record where a number of this measurement comes from."""
        config = {**self.identity, "text": self.shards.fingerprint, **options}
        return Provenance.here(
            config=config,
            device=str(self.device),
            seed=int(options.get("seed", 0)),
            model=self.model_hash,
        )

    def _precision(self) -> AbstractContextManager[Any]:
        """Compute as the model was trained, on a GPU."""
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.is_narrow else nullcontext()

    def _run(self, measure: Callable[..., Any], *inputs: Any, decide: Any, **more: Any) -> Any:
        """Measure; the options that `decide` what comes out are part of its provenance."""
        provenance = self.provenance(**decide)
        with self._precision():
            return measure(
                self.model, *inputs, run=self.run, provenance=provenance, on_progress=_tell, **more
            )

    def rows(self, length: int, count: int) -> np.ndarray:
        """Cut documents, each behind the token that begins a text."""
        rows = long_rows(self.shards, length=length, count=count)
        if self.first is not None:
            rows[:, 0] = self.first
        return rows

    def position_loss(
        self, *, length: int, documents: int, batch: int = 1, file: str = POSITION_LOSS
    ) -> PositionLoss:
        """Measure figure 5's numbers."""
        decide = {"length": length, "documents": documents}
        rows = self.rows(length, documents)
        record = self._run(
            measure_position_loss, rows, decide=decide, batch=batch, device=self.device
        )
        self._write(file, [record])
        return record

    def sharpness(self, *, length: int, documents: int) -> Sharpness:
        """Measure figure 1 in a model."""
        decide = {"length": length, "documents": documents}
        rows = self.rows(length, documents)
        record = self._run(measure_sharpness, rows, decide=decide, device=self.device)
        self._write(SHARPNESS, [record])
        return record

    def needle(
        self, *, lengths: Sequence[int], batch: int, begun: bool = False, **decide: Any
    ) -> list[NeedleTrial]:
        """Measure figure 6's numbers, of `depths`, `trials`, `digits` and `seed`.

        A grid that was stopped resumes. Other lengths go into the same grid, other depths would
        change what is a mean.
        """
        decide |= {"begun": True} if begun else {}
        return self._run(
            measure_retrieval,
            self.tokenizer,
            haystack_text(self.shards),
            decide=decide,
            lengths=lengths,
            batch=batch,
            out=self.results / NEEDLE,
            **decide,
        )

    def retrieval_grid(
        self,
        *,
        base_factors: Sequence[float],
        lengths: Sequence[int],
        depths: Sequence[float],
        trials: int,
        weighed: int,
        batch: int,
        **decide: Any,
    ) -> RetrievalGrid:
        """Measure retrieval at several RoPE bases, times the model's, by length."""
        assert isinstance(self.model, LM)
        own, text, rows = self.model.theta, haystack_text(self.shards), []
        for factor in base_factors:
            self.model.theta = own * factor
            with self._precision():
                rows.append(
                    measure_retrieval_by_length(
                        self.model, self.tokenizer, text, lengths=lengths, depths=depths,
                        trials=trials, weighed=weighed, batch=batch, device=self.device, **decide,
                    )
                )  # fmt: skip
            _tell("base", len(rows), len(base_factors))
        self.model.theta = own
        record = RetrievalGrid(
            run=self.run,
            taught_length=lengths[0],
            base_factors=list(base_factors),
            lengths=list(lengths),
            count=trials * len(depths),
            accuracy=[found for found, _ in rows],
            weights=[weights for _, weights in rows],
            provenance=self.provenance(
                lengths=lengths, base_factors=base_factors, depths=depths, trials=trials, **decide
            ),
        )
        self._write(RETRIEVAL_GRID, [record])
        return record

    def needle_scores(
        self, *, length: int, needle: Needle | None = None, batch: int = 1, **decide: Any
    ) -> list[NeedleScore]:
        """Measure figure 8's numbers, or figure 7's where all trials hide one needle.

        Of `trials`, `depth`, `digits` and `seed`.
        """
        scores = self._run(
            measure_needle_scores,
            self.tokenizer,
            haystack_text(self.shards),
            decide=decide,
            length=length,
            needle=needle,
            batch=batch,
            device=self.device,
            **decide,
        )
        self._write(NEEDLE_SCORE if needle is None else PAPERS_NEEDLE_SCORE, scores)
        return scores

    def _write(self, name: str, records: Sequence[Any]) -> None:
        """Put records in the place of those of the same measurement; others stay."""
        make_folder(self.results)
        path = self.results / name
        # Another process may measure another model into this folder.
        with in_turn(self.results):
            old = read_jsonl(path, type(records[0])) if path.exists() else []
            mine = set(map(_measured, records))
            kept = [one for one in old if _measured(one) not in mine]
            write_whole(path, to_jsonl([*kept, *records]))


@torch.no_grad()
def _under(model: LM, rule: str, s: float | Literal["kept"] | None, length: int | None) -> LM:
    """Copy a model under another rule; where s is kept, a rule that learns none has 1."""
    copy = model.with_rule(rule, train_length=length)
    if s is not None:
        for new, old in zip(_scales(copy), _scales(model), strict=True):
            kept = getattr(old, "s", torch.ones(()))
            new.s.copy_(kept if s == "kept" else torch.tensor(s))
    return copy


def _scales(model: LM) -> list[SSMaxScale]:
    blocks: Any = model.blocks
    return [block.attention.ssmax for block in blocks]


def weights_hash(model: nn.Module) -> str:
    """Hash the weights, which change when a run is trained on; its name and config do not."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _measured(record: Any) -> tuple[Any, ...]:
    """Tell what a record is a measurement of; needle scores have their context size besides."""
    return record.run, record.provenance.config_hash, getattr(record, "length", None)
