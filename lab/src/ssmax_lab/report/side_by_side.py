"""Models beside each other, from the records of a folder: a table, a drawing, a page."""

import base64
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ssmax._files import in_turn, write_whole
from ssmax.errors import UsageError
from ssmax_lab.records import (
    Fading,
    NeedleScore,
    NeedleTrial,
    PositionLoss,
    Provenance,
    read_jsonl,
)
from ssmax_lab.report.curves import by_position, top_score
from ssmax_lab.report.findings import FADING, NEEDLE, NEEDLE_SCORE, POSITION_LOSS
from ssmax_lab.report.page import asset, origin
from ssmax_lab.report.page_tables import table
from ssmax_lab.report.style import LOOKS, as_svg, new_figure

PAGE = "side-by-side.html"
FILES = {
    POSITION_LOSS: PositionLoss,
    NEEDLE: NeedleTrial,
    NEEDLE_SCORE: NeedleScore,
    FADING: Fading,
}

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number of every model; None where it was not measured."""

    what: str
    values: tuple[float | None, ...]


class SideBySide:
    """The newest measurement of every kind, by model, in the order in which they were made."""

    def __init__(self, folder: Path, runs: Sequence[str] | None = None) -> None:
        """Of all models, or of those in `runs`."""
        self.folder = folder
        found: dict[str, list[Any]] = {
            name: [
                record
                for record in read_jsonl(folder / name, kind)
                if runs is None or record.run in runs
            ]
            for name, kind in FILES.items()
            if (folder / name).is_file()
        }
        if not any(found.values()):
            raise UsageError(
                f"{folder} holds no results: {', '.join(FILES)} are what ssmax-lab evaluate writes"
            )
        every = [record for records in found.values() for record in records]
        self.runs: list[str] = list(dict.fromkeys(record.run for record in every))
        self.losses: dict[str, list[PositionLoss]] = _newest(found.get(POSITION_LOSS, []))
        self.trials: dict[str, list[NeedleTrial]] = _newest(found.get(NEEDLE, []), _of_length)
        self.scores: dict[str, list[NeedleScore]] = _newest(found.get(NEEDLE_SCORE, []), _of_length)
        self.fading: dict[str, list[Fading]] = _newest(found.get(FADING, []))

    def rows(self) -> list[Row]:
        """What there is to compare."""
        return [*self._loss_rows(), *self._needle_rows(), *self._fading_rows()]

    def _loss_rows(self) -> list[Row]:
        losses = {run: records[-1] for run, records in self.losses.items()}
        means = {
            run: dict(zip(itertools.pairwise(one.edges), np.mean(one.binned, 0), strict=True))
            for run, one in losses.items()
        }
        return [
            self._row(f"loss, positions {start:,} to {stop:,}", means, (start, stop))
            for start, stop in _keys(means)
        ]

    def _needle_rows(self) -> list[Row]:
        rows = []
        for what, is_right in (("whole number", "is_whole"), ("first digit", "first_digit")):
            shares = {
                run: {
                    length: np.mean([getattr(one, is_right) for one in trials])
                    for length, trials in _by_length(records).items()
                }
                for run, records in self.trials.items()
            }
            rows += [
                self._row(f"{what} found, context {length:,}", shares, length)
                for length in _keys(shares)
            ]
        tops = {
            run: {
                length: np.mean([top_score(one) for one in scores])
                for length, scores in _by_length(records).items()
            }
            for run, records in self.scores.items()
        }
        rows += [
            self._row(f"top needle score, context {length:,}", tops, length)
            for length in _keys(tops)
        ]
        return rows

    def _fading_rows(self) -> list[Row]:
        rows = []
        for what, field in (("largest weight", "largest"), ("entropy", "entropy")):
            values = {
                run: dict(
                    zip(
                        records[-1].num_keys,
                        np.mean(getattr(records[-1], field), (0, 1)),
                        strict=True,
                    )
                )
                for run, records in self.fading.items()
            }
            rows += [self._row(f"{what} at n = {n:,}", values, n) for n in _keys(values)]
        return rows

    def _row(self, what: str, values: dict[str, dict[Any, Any]], key: Any) -> Row:
        found = (values.get(run, {}).get(key) for run in self.runs)
        return Row(what=what, values=tuple(None if one is None else float(one) for one in found))

    def provenances(self) -> list[tuple[str, Provenance]]:
        """Where every number comes from."""
        kinds = {"loss": self.losses, "needle": self.trials, "needle score": self.scores,
                 "fading": self.fading}  # fmt: skip
        return [
            (f"{kind}, {run}", records[-1].provenance)
            for kind, by_run in kinds.items()
            for run, records in by_run.items()
        ]


def text_table(found: SideBySide) -> list[str]:
    """The numbers as lines, a column for each model."""
    rows = found.rows()
    width = max(len(row.what) for row in rows)
    columns = [max(10, len(run)) for run in found.runs]
    titles = (f"{run:>{column}}" for run, column in zip(found.runs, columns, strict=True))
    lines = [" " * width + "  " + "  ".join(titles)]
    for row in rows:
        cells = (
            f"{_shown(value):>{column}}" for value, column in zip(row.values, columns, strict=True)
        )
        lines.append(f"{row.what:{width}}  {'  '.join(cells)}")
    return lines


def draw(found: SideBySide) -> Any:
    """Loss by position, needles by context, needle scores by rank, largest weight by n."""
    figure, axes = new_figure(9.6, 7.2, columns=2, rows=2)
    loss, needle, score, fading = axes.flat
    looks = dict(zip(found.runs, itertools.cycle(LOOKS.values()), strict=False))
    for run in found.runs:
        line = {"color": looks[run].colour, "linestyle": looks[run].dash, "label": run}
        if run in found.losses:
            loss.plot(*by_position(found.losses[run][-1:]), **line)
        if run in found.trials:
            shares = _by_length(found.trials[run])
            right = [np.mean([one.is_whole for one in shares[length]]) for length in shares]
            needle.plot(list(shares), right, marker="o", **line)
        if run in found.scores:
            ranked = sorted(map(top_score, found.scores[run]), reverse=True)
            score.plot(range(1, len(ranked) + 1), ranked, **line)
        if run in found.fading:
            one = found.fading[run][-1]
            fading.plot(one.num_keys, np.mean(one.largest, (0, 1)), **line)
    loss.set(xlabel="position", ylabel="loss")
    needle.set(xlabel="context", ylabel="whole numbers found", ylim=(-0.02, 1.02))
    score.set(xlabel="trial, by rank", ylabel="top needle score", ylim=(0, None))
    fading.set(xlabel="keys n", ylabel="largest weight", xscale="log", ylim=(0, 1.02))
    for axis in axes.flat:
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    return figure


def write_side_by_side(folder: Path) -> tuple[SideBySide, Path]:
    """The page of a folder of results; the same records give the same bytes."""
    found = SideBySide(folder)
    code = base64.b64encode(as_svg(draw(found)).encode()).decode()
    image = f'<img alt="The models side by side" src="data:image/svg+xml;base64,{code}">'
    numbers = table(
        ["", *map(escape, found.runs)],
        [[escape(row.what), *map(_shown, row.values)] for row in found.rows()],
    )
    origins = table(
        ("what", "commit", "configuration", "versions", "device", "seed", "date"),
        [origin({"what": what, **asdict(one)}) for what, one in found.provenances()],
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Side by side</title>
<style>{asset("page.css")}</style>
</head>
<body>
<main>
<header><h1>Side by side</h1><p class="lead">{escape(", ".join(found.runs))}</p></header>
<section><figure>{image}</figure></section>
<section><h2>Numbers</h2>{numbers}</section>
<section><h2>Where every number comes from</h2>{origins}</section>
</main>
</body>
</html>
"""
    path = folder / PAGE
    # Another process may have measured another model meanwhile.
    with in_turn(folder):
        write_whole(path, page)
    return found, path


def _of_run(record: Any) -> object:
    return record.run


def _of_length(record: Any) -> object:
    """Contexts of several sizes may be measured one by one."""
    return record.run, record.length


def _newest(records: Sequence[Any], of: Callable[[Any], object] = _of_run) -> dict[str, list[Any]]:
    """By model, the records of its last measurement `of` the same."""
    last = {of(one): one.provenance.config_hash for one in records}
    found: dict[str, list[Any]] = {}
    for one in records:
        if one.provenance.config_hash == last[of(one)]:
            found.setdefault(one.run, []).append(one)
    return found


def _by_length(records: Sequence[Any]) -> dict[int, list[Any]]:
    lengths = sorted({one.length for one in records})
    return {length: [one for one in records if one.length == length] for length in lengths}


def _keys(values: dict[str, dict[Any, Any]]) -> list[Any]:
    return sorted({key for one in values.values() for key in one})


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
