"""What a measurement came to, as a person reads it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssmax._device import check_device
from ssmax._progress import ProgressLine
from ssmax.errors import UsageError
from ssmax.hf.sources import CONFIG as ADAPTER
from ssmax.hf.sources import check_source, check_typed
from ssmax.nn.rules import RULES
from ssmax_lab.cli.options import USUAL_DIGITS
from ssmax_lab.cli.prepare import default_text, text_of_shipped
from ssmax_lab.cli.runs import check_run
from ssmax_lab.data.preparation import text_to_measure
from ssmax_lab.records import NEEDLE, NEEDLE_SCORE, POSITION_LOSS, SHARPNESS, to_jsonl
from ssmax_lab.train.questions import digits_taught
from ssmax_lab.train.run_config import read_run_config

if TYPE_CHECKING:
    from ssmax_lab.study.measurement import Measurement


class Counter:
    """A live line that counts; silent where a script reads."""

    def __init__(self, *, is_shown: bool) -> None:
        self._line = ProgressLine(is_shown=is_shown)

    def __call__(self, what: str, done: int, total: int) -> None:
        """So many are done."""
        self._line.show(f"{what} {done:,}/{total:,}", is_last=done == total)
        if done == total:
            self._line.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """What is to be measured: a run, or models of Hugging Face side by side."""

    run: Path | None
    hf: Sequence[str]
    adapter: Path | None
    tokenizer: str | None
    data: Path | None
    theta: float | None
    rule: str | None
    results: Path
    device: str | None
    as_json: bool

    def __post_init__(self) -> None:
        if (self.run is None) == (not self.hf):
            raise UsageError("give one thing to measure: a run's folder, or --hf MODEL")
        if self.run is not None and (self.adapter or self.tokenizer):
            raise UsageError("--adapter and --tokenizer go with --hf; a run has its own")
        if self.run is not None:
            check_run(self.run, otherwise=f"; for a Hugging Face model: --hf {self.run}")
            read_run_config(self.run)
        check_device(self.device)
        if self.rule is not None and self.run is not None and self.rule not in RULES:
            raise UsageError(f"--rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.data is not None:
            text_to_measure(self.data, is_for_tests=True)
        for source in self.hf:
            check_source(
                source,
                of_an_adapter=f"name that model, and {source} as its adapter (--adapter {source})",
            )
            check_typed(source)
        if self.hf and self.rule is not None:
            raise UsageError(
                f"--rule is a run's; a Hugging Face model is given one by ssmax convert "
                f"{self.hf[0]} OUT --rule {self.rule}, and then measured as --hf OUT"
            )
        if self.hf and self.theta is not None:
            raise UsageError(
                "--theta is a run's; for a Hugging Face model copy its folder, set the rope_theta "
                f"in config.json of the copy to {self.theta:g} (one without rope_theta has no "
                "theta), and measure the copy with --hf"
            )
        if self.adapter is not None and len(self.hf) != 1:
            raise UsageError(f"--adapter goes with one --hf, got {len(self.hf)}")
        # Its base is measured first, which may take hours.
        if self.adapter is not None and not (self.adapter / ADAPTER).is_file():
            raise UsageError(
                f"{self.adapter} holds no adapter: ssmax convert MODEL {self.adapter} --adapter "
                "writes one"
            )

    def measurements(self) -> "Iterator[Measurement]":
        """One after the other, so that one model at a time is in memory.

        An adapter's base is measured without it first.
        """
        from ssmax_lab.study.measurement import Measurement

        if self.run is not None:
            data = self.data or text_of_shipped(self.run, is_shown=not self.as_json)
            yield Measurement.of_run(
                self.run, data=data, theta=self.theta, rule=self.rule, results=self.results,
                device=self.device,
            )  # fmt: skip
            return
        from ssmax.hf.adapter import check_base
        from ssmax_lab.model.hf_causal_lm import causal_config
        from ssmax_lab.study.hf_measurement import (
            check_same_tokens,
            hf_measurement,
            hf_name,
            hf_tokenizer,
        )

        models: list[tuple[str, Path | None]] = [(source, None) for source in self.hf]
        if self.adapter is not None:
            models.append((self.hf[0], self.adapter))
        short = [hf_name(source, adapter) for source, adapter in models]
        names = [
            _with_its_folder(source, name) if short.count(name) > 1 else name
            for (source, _), name in zip(models, short, strict=True)
        ]
        if len(set(names)) < len(names):
            raise UsageError(f"two models are called {max(short, key=short.count)!r}; rename one")
        # Before its tokenizer is missed, and before another is measured for hours.
        configs = [causal_config(source) for source in self.hf]
        if self.adapter is not None:
            check_base(self.adapter, self.hf[0], configs[0])
        tokenizer = self.tokenizer or hf_tokenizer(self.hf[0])
        for source in self.hf[1:]:
            check_same_tokens(source, tokenizer)
        data = self.data or default_text(tokenizer, is_shown=not self.as_json)
        for (source, adapter), name in zip(models, names, strict=True):
            yield hf_measurement(
                source,
                adapter=adapter,
                name=name,
                tokenizer=tokenizer,
                data=data,
                results=self.results,
                device=self.device,
            )

    def each(self, measure: "Callable[[Measurement], None]") -> None:
        """Measure them all; several are then shown beside each other."""
        measured = []
        for here in self.measurements():
            if self.hf and not self.as_json:
                print(here.run)
            measure(here)
            measured.append(here.run)
        if self.hf and not self.as_json:
            show_side_by_side(self.results, measured)


def _with_its_folder(source: str, name: str) -> str:
    """A folder's name behind that of the folder that it lies in; a name on the Hub as it is."""
    path = Path(source).resolve()
    # What finetune wrote is called by its run, the folder around the model's.
    own = next((one for one in (path, path.parent) if one.name == name), None)
    return name if own is None or not path.exists() else f"{own.parent.name}/{name}"


def show_side_by_side(results: Path, runs: Sequence[str]) -> None:
    """The table of these, and the page of all that a folder of results holds."""
    from ssmax_lab.report.side_by_side import SideBySide, text_table, write_side_by_side

    found, page = write_side_by_side(results)
    print("\n" + "\n".join(text_table(SideBySide(results, runs))))
    others = [run for run in found.runs if run not in runs]
    beside = f", with {', '.join(others)} from earlier commands" if others else ""
    print(f"\nthe page{beside}: {page.resolve()}")


def everything(
    here: "Measurement", *, length: int, documents: int, depths: int, trials: int, seed: int,
    digits: int | None, as_json: bool,
) -> None:  # fmt: skip
    """All four, at one length."""
    digits = digits_asked_for(here, digits, is_shown=not as_json)
    position_loss(here, length=length, documents=documents, batch=1, as_json=as_json)
    sharpness(here, length=length, documents=documents, as_json=as_json)
    needle(
        here, lengths=[length], depths=depths, trials=trials, digits=digits, batch=1, seed=seed,
        as_json=as_json,
    )  # fmt: skip
    needle_score(
        here, length=length, trials=trials, depth=None, digits=digits, batch=1, seed=seed,
        as_json=as_json,
    )  # fmt: skip


def position_loss(
    here: "Measurement", *, length: int, documents: int, batch: int, as_json: bool
) -> None:
    """Figure 5's numbers of one run."""
    record = here.position_loss(
        length=length, documents=documents, batch=batch, on_progress=Counter(is_shown=not as_json)
    )
    if as_json:
        return _print_lines([record])
    for (start, stop), column in zip(
        itertools.pairwise(record.edges), zip(*record.binned, strict=True), strict=True
    ):
        print(f"positions {start:6,} to {stop:6,}  loss {sum(column) / len(column):.4f}")
    fewer = f" ({documents} asked for: the text has no more)" if record.count < documents else ""
    print(f"{record.count} documents{fewer}; {here.results / POSITION_LOSS}")


def digits_asked_for(here: "Measurement", given: int | None, *, is_shown: bool) -> int:
    """As many as are given; else as many as a run was fine-tuned on, else the paper's."""
    if given is not None:
        return given
    learned = here.identity.get("run", {}).get("data", {}).get("questions", "")
    digits = digits_taught(learned)
    if is_shown:
        why = "" if digits is None else ", as the run was fine-tuned on"
        print(f"numbers of {digits or USUAL_DIGITS} digits{why}; --digits takes others")
    return digits or USUAL_DIGITS


def needle(
    here: "Measurement",
    *,
    lengths: list[int] | None,
    depths: int,
    trials: int,
    digits: int | None,
    batch: int,
    seed: int,
    as_json: bool,
) -> None:
    """Figure 6's numbers of one run."""
    import numpy as np

    from ssmax_lab.eval.retrieval import accuracy

    digits = digits_asked_for(here, digits, is_shown=not as_json)
    lengths = lengths or [here.usual_length * factor for factor in (1, 2, 4)]
    places = [0.5] if depths == 1 else np.linspace(0, 1, max(depths, 0)).round(4).tolist()
    found = here.needle(
        lengths=lengths,
        depths=places,
        trials=trials,
        digits=digits,
        batch=batch,
        seed=seed,
        on_progress=Counter(is_shown=not as_json),
    )
    if as_json:
        return _print_lines(found)
    for length in lengths:
        cells = [trial for trial in found if trial.length == length]
        first = sum(trial.first_digit for trial in cells) / len(cells)
        print(f"context {length:6,}  whole number {accuracy(cells):.3f}  first digit {first:.3f}")
    print(here.results / NEEDLE)


def needle_score(
    here: "Measurement",
    *,
    length: int | None,
    trials: int,
    depth: float | None,
    digits: int | None,
    batch: int,
    seed: int,
    as_json: bool,
) -> None:
    """Figure 8's numbers of one run."""
    digits = digits_asked_for(here, digits, is_shown=not as_json)
    scores = here.needle_scores(
        length=length or 2 * here.usual_length,
        trials=trials,
        depth=depth,
        digits=digits,
        batch=batch,
        seed=seed,
        on_progress=Counter(is_shown=not as_json),
    )
    if as_json:
        return _print_lines(scores)
    import numpy as np

    from ssmax_lab.eval.needle_score import top_heads

    mean = np.mean([score.number_scores for score in scores], axis=0).tolist()
    for layer, head, score in top_heads(mean, 5):
        print(f"layer {layer:2} head {head:2}  mean needle score {score:.4f}")
    found = sum(score.is_whole for score in scores)
    print(f"{found} of {trials} numbers found; {here.results / NEEDLE_SCORE}")


def sharpness(here: "Measurement", *, length: int, documents: int, as_json: bool) -> None:
    """Figure 1 in the wild, of one run."""
    record = here.sharpness(
        length=length, documents=documents, on_progress=Counter(is_shown=not as_json)
    )
    if as_json:
        return _print_lines([record])
    import numpy as np

    for index, keys in enumerate(record.num_keys):
        largest = np.mean([head[index] for layer in record.largest for head in layer])
        entropy = np.mean([head[index] for layer in record.entropy for head in layer])
        print(f"n {keys:6,}  largest weight {largest:.4f}  entropy {entropy:.3f}")
    print(here.results / SHARPNESS)


def _print_lines(records: Sequence[object]) -> None:
    """For a script: the records, a line each."""
    print(to_jsonl(records), end="")
