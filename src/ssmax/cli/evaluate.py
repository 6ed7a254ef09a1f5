"""Measures of a run from the command line: load, measure, append a record, say what came out."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssmax.data.haystack import long_rows
from ssmax.data.shards import ShardSet
from ssmax.data.tasks import VALIDATION
from ssmax.eval import (
    measure_fading,
    measure_needle_scores,
    measure_position_loss,
    measure_retrieval,
)
from ssmax.eval.needle_score import top_heads
from ssmax.eval.position_loss import bin_edges
from ssmax.eval.retrieval import accuracy
from ssmax.records import Provenance, to_json_line
from ssmax.train import load_run_model, load_run_tokenizer, read_run_config
from ssmax.train.config import TrainConfig
from ssmax.train.world import device_of

POSITION_LOSS, NEEDLE = "position_loss.jsonl", "needle.jsonl"
NEEDLE_SCORE, FADING = "needle_score.jsonl", "fading.jsonl"


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

    def write(self, name: str, *records: Any) -> Path:
        """Append records to a file of the results."""
        self.results.mkdir(parents=True, exist_ok=True)
        path = self.results / name
        with path.open("a") as file:
            file.write("".join(to_json_line(record) for record in records))
        return path


def _text_of(config: TrainConfig) -> Path:
    """What a run was trained on; a fine-tuned one, what its base was."""
    if config.data.base:
        return _text_of(read_run_config(Path(config.data.base)))
    return Path(config.data.folder)


def position_loss(here: Measurement, *, length: int, documents: int, batch: int) -> None:
    """Figure 5's numbers of one run."""
    rows = long_rows(here.shards(), length=length, count=documents)
    with here.precision():
        record = measure_position_loss(
            here.model,
            rows,
            run=here.run,
            provenance=here.provenance(length=length, documents=documents),
            batch=batch,
            device=here.device,
        )
    path = here.write(POSITION_LOSS, record)
    edges = bin_edges(length)
    for start, stop, column in zip(
        edges, edges[1:], zip(*record.binned, strict=True), strict=False
    ):
        print(f"positions {start:6,} to {stop:6,}  loss {sum(column) / len(column):.4f}")
    print(f"{record.count} documents; {path}")


def needle(
    here: Measurement,
    *,
    lengths: list[int] | None,
    depths: int,
    trials: int,
    digits: int,
    batch: int,
    seed: int,
) -> None:
    """Figure 6's numbers of one run."""
    trained = here.config.model.train_length
    lengths = lengths or [trained * factor for factor in (1, 2, 4)]
    places = [0.5] if depths == 1 else np.linspace(0, 1, max(depths, 0)).round(4).tolist()
    path = here.results / NEEDLE
    with here.precision():
        found = measure_retrieval(
            here.model,
            here.tokenizer,
            here.text(),
            run=here.run,
            lengths=lengths,
            depths=places,
            trials=trials,
            seed=seed,
            out=path,
            provenance=here.provenance(seed=seed, digits=digits),
            batch=batch,
            digits=digits,
            on_cell=lambda done, total: print(f"cell {done}/{total}", flush=True),
        )
    for length in lengths:
        cells = [trial for trial in found if trial.length == length]
        first = sum(trial.first_digit for trial in cells) / len(cells)
        print(f"context {length:6,}  whole number {accuracy(cells):.3f}  first digit {first:.3f}")
    print(path)


def needle_score(
    here: Measurement,
    *,
    length: int | None,
    trials: int,
    depth: float | None,
    digits: int,
    seed: int,
) -> None:
    """Figures 7 and 8's numbers of one run."""
    length = length or 2 * here.config.model.train_length
    with here.precision():
        scores = measure_needle_scores(
            here.model,
            here.tokenizer,
            here.text(),
            run=here.run,
            length=length,
            trials=trials,
            seed=seed,
            provenance=here.provenance(seed=seed, digits=digits),
            depth=depth,
            digits=digits,
            device=here.device,
        )
    path = here.write(NEEDLE_SCORE, *scores)
    mean = np.mean([score.number_scores for score in scores], axis=0).tolist()
    for layer, head, score in top_heads(mean, 5):
        print(f"layer {layer:2} head {head:2}  mean needle score {score:.4f}")
    print(f"{sum(score.is_whole for score in scores)} of {trials} numbers found; {path}")


def fading(here: Measurement, *, length: int, documents: int) -> None:
    """Figure 1 in the wild, of one run."""
    rows = long_rows(here.shards(), length=length, count=documents)
    with here.precision():
        record = measure_fading(
            here.model,
            rows,
            run=here.run,
            provenance=here.provenance(length=length, documents=documents),
            device=here.device,
        )
    path = here.write(FADING, record)
    for index, keys in enumerate(record.num_keys):
        largest = np.mean([head[index] for layer in record.largest for head in layer])
        entropy = np.mean([head[index] for layer in record.entropy for head in layer])
        print(f"n {keys:6,}  largest weight {largest:.4f}  entropy {entropy:.3f}")
    print(path)
