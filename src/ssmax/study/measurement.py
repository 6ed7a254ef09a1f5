"""A run as it is measured: its model under a rule and a theta, its text, and where records go."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssmax._files import write_whole
from ssmax.data.haystack import Needle, long_rows
from ssmax.data.shards import ShardSet
from ssmax.data.tasks import VALIDATION
from ssmax.eval import (
    measure_fading,
    measure_needle_scores,
    measure_position_loss,
    measure_retrieval,
)
from ssmax.records import (
    Fading,
    NeedleScore,
    NeedleTrial,
    PositionLoss,
    Provenance,
    read_jsonl,
    to_json_line,
)
from ssmax.train import load_run_model, load_run_tokenizer, read_run_config
from ssmax.train.config import TrainConfig
from ssmax.train.world import device_of

POSITION_LOSS, NEEDLE = "position_loss.jsonl", "needle.jsonl"
NEEDLE_SCORE, PAPERS_NEEDLE_SCORE = "needle_score.jsonl", "papers_needle.jsonl"
FADING = "fading.jsonl"


OnProgress = Callable[[str, int, int], None]
"""What is counted, how many are done, of how many."""


def silent(what: str, done: int, total: int) -> None:
    """Say nothing."""


class Measurement:
    """A run's model as it is to be measured, its text, and where results go."""

    def __init__(
        self,
        folder: Path,
        *,
        data: Path | None,
        theta: float | None,
        rule: str | None,
        results: Path,
        device: str | None,
    ) -> None:
        self.config = read_run_config(folder)
        self.tokenizer = load_run_tokenizer(folder)
        self.device = device_of(device)
        model = load_run_model(folder, device=self.device)
        self.model = (model if rule is None else model.with_rule(rule)).eval()
        self.model.theta = self.model.theta if theta is None else theta
        # What is measured is named by all that makes it what it is.
        self.run = folder.name + (f"+{rule}" if rule else "") + (f"@{theta:g}" if theta else "")
        self.results = results
        self.data = data if data is not None else _text_of(self.config)

    def shards(self) -> ShardSet:
        """The validation text, which no run has seen."""
        for folder in (self.data / VALIDATION, self.data):
            if folder.is_dir():
                return ShardSet.open(folder)
        raise ValueError(f"there are no prepared tokens in {self.data}; give --data")

    def provenance(self, **options: Any) -> Provenance:
        """Where a number of this measurement comes from."""
        config = {
            "run": self.config.to_dict(),
            "model": self.model.config.to_dict(),
            "theta": self.model.theta,
            "text": self.shards().fingerprint,
            **options,
        }
        return Provenance.here(
            config=config, device=str(self.device), seed=int(options.get("seed", 0))
        )

    def precision(self):
        """As the run was trained, on a GPU."""
        is_narrow = self.device.type == "cuda" and self.config.run.precision == "bfloat16"
        return torch.autocast("cuda", dtype=torch.bfloat16) if is_narrow else nullcontext()

    def text(self) -> np.ndarray:
        """The haystack: validation text as it runs on, without ends of documents."""
        shards = self.shards()
        tokens = shards.slice(0, min(shards.num_tokens, 4_000_000))
        return tokens[tokens != shards.vocabulary.end_of_document]

    def position_loss(
        self, *, length: int, documents: int, batch: int = 1, on_progress: OnProgress = silent
    ) -> PositionLoss:
        """Figure 5's numbers."""
        rows = long_rows(self.shards(), length=length, count=documents)
        with self.precision():
            record = measure_position_loss(
                self.model,
                rows,
                run=self.run,
                provenance=self.provenance(length=length, documents=documents),
                batch=batch,
                device=self.device,
                on_document=lambda done, total: on_progress("document", done, total),
            )
        self._write(POSITION_LOSS, [record])
        return record

    def needle(
        self,
        *,
        lengths: Sequence[int],
        depths: Sequence[float],
        trials: int,
        digits: int,
        batch: int,
        seed: int,
        on_progress: OnProgress = silent,
    ) -> list[NeedleTrial]:
        """Figure 6's numbers; a grid that was stopped goes on."""
        with self.precision():
            return measure_retrieval(
                self.model,
                self.tokenizer,
                self.text(),
                run=self.run,
                lengths=lengths,
                depths=depths,
                trials=trials,
                seed=seed,
                out=self.results / NEEDLE,
                provenance=self.provenance(seed=seed, digits=digits),
                batch=batch,
                digits=digits,
                on_cell=lambda done, total: on_progress("cell", done, total),
            )

    def needle_scores(
        self,
        *,
        length: int,
        trials: int,
        depth: float | None,
        digits: int,
        seed: int,
        needle: Needle | None = None,
        on_progress: OnProgress = silent,
    ) -> list[NeedleScore]:
        """Figure 8's numbers, or figure 7's where all trials hide one needle."""
        with self.precision():
            scores = measure_needle_scores(
                self.model,
                self.tokenizer,
                self.text(),
                run=self.run,
                length=length,
                trials=trials,
                seed=seed,
                provenance=self.provenance(seed=seed, digits=digits, trials=trials, depth=depth),
                depth=depth,
                digits=digits,
                needle=needle,
                device=self.device,
                on_trial=lambda done, total: on_progress("trial", done, total),
            )
        self._write(NEEDLE_SCORE if needle is None else PAPERS_NEEDLE_SCORE, scores)
        return scores

    def fading(self, *, length: int, documents: int, on_progress: OnProgress = silent) -> Fading:
        """Figure 1 in the wild."""
        rows = long_rows(self.shards(), length=length, count=documents)
        with self.precision():
            record = measure_fading(
                self.model,
                rows,
                run=self.run,
                provenance=self.provenance(length=length, documents=documents),
                device=self.device,
                on_document=lambda done, total: on_progress("document", done, total),
            )
        self._write(FADING, [record])
        return record

    def _write(self, name: str, records: Sequence[Any]) -> None:
        """Records take the place of those of the same measurement; others stay."""
        self.results.mkdir(parents=True, exist_ok=True)
        path = self.results / name
        old = read_jsonl(path, type(records[0])) if path.exists() else []
        mine = {(record.run, record.provenance.config_hash) for record in records}
        kept = [one for one in old if (one.run, one.provenance.config_hash) not in mine]
        write_whole(path, "".join(map(to_json_line, [*kept, *records])))


def _text_of(config: TrainConfig) -> Path:
    """What a run was trained on; a fine-tuned one, what its base was."""
    if config.data.base:
        return _text_of(read_run_config(Path(config.data.base)))
    return Path(config.data.folder)
