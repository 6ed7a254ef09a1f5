"""Models beside each other, from the records of a folder: a table, a drawing, a page."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ssmax._files import in_turn, write_whole
from ssmax.errors import UsageError
from ssmax_lab.analysis.measures import by_position, top_score
from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.records import (
    NEEDLE,
    NEEDLE_SCORE,
    POSITION_LOSS,
    RECORD_TYPES,
    SHARPNESS,
    SIDE_BY_SIDE,
    Provenance,
    read_jsonl,
)
from ssmax_lab.report.page import document, image, origins
from ssmax_lab.report.page_tables import table
from ssmax_lab.report.style import as_svg, new_figure

FILES = (POSITION_LOSS, NEEDLE, NEEDLE_SCORE, SHARPNESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number of every model; None where it was not measured."""

    what: str
    values: tuple[float | None, ...]


class SideBySide:
    """The newest measurement of every kind, by model, in the order in which they were made."""

    def __init__(self, folder: Path, runs: Sequence[str] | None = None) -> None:
        """Read the records of all models, or of those in `runs`."""
        found: dict[str, list[Any]] = {
            name: [
                record
                for record in read_jsonl(folder / name, RECORD_TYPES[name])
                if runs is None or record.run in runs
            ]
            for name in FILES
            if (folder / name).is_file()
        }
        if not any(found.values()):
            raise UsageError(
                f"{folder} holds no results: {', '.join(FILES)} are what ssmax-lab evaluate writes"
            )
        every = [record for records in found.values() for record in records]
        self.runs: list[str] = list(dict.fromkeys(record.run for record in every))
        self.newest: dict[str, dict[str, list[Any]]] = {
            name: _newest(found.get(name, [])) for name in FILES
        }
        """By file and model; contexts of several sizes may be measured one by one."""

    def rows(self) -> list[Row]:
        """List what there is to compare."""
        trials, scores = self.newest[NEEDLE], self.newest[NEEDLE_SCORE]
        last = {run: records[-1] for run, records in self.newest[SHARPNESS].items()}
        losses = {
            run: dict(
                zip(
                    itertools.pairwise(records[-1].edges),
                    np.mean(records[-1].binned, 0),
                    strict=True,
                )
            )
            for run, records in self.newest[POSITION_LOSS].items()
        }
        rows = self._rows("loss, positions {0[0]:,} to {0[1]:,}", losses)
        for what, is_right in (("whole number", "is_whole"), ("first digit", "first_digit")):
            accuracy = _by_length(trials, lambda one, name=is_right: getattr(one, name))
            rows += self._rows(f"retrieval accuracy, {what}, context {{:,}}", accuracy)
        rows += self._rows("top needle score, context {:,}", _by_length(scores, top_score))
        for what, field in (("largest weight", "largest"), ("entropy", "entropy")):
            means = {
                run: dict(zip(one.num_keys, np.mean(getattr(one, field), (0, 1)), strict=True))
                for run, one in last.items()
            }
            rows += self._rows(f"{what} at n = {{:,}}", means)
        return rows

    def _rows(self, what: str, values: Mapping[str, Mapping[Any, Any]]) -> list[Row]:
        rows = []
        for key in sorted({key for one in values.values() for key in one}):
            found = (values.get(run, {}).get(key) for run in self.runs)
            cells = tuple(None if one is None else float(one) for one in found)
            rows.append(Row(what=what.format(key), values=cells))
        return rows

    def provenances(self) -> list[tuple[str, Provenance]]:
        """List where every number comes from."""
        return [
            (f"{name.removesuffix('.jsonl').replace('_', ' ')}, {run}", records[-1].provenance)
            for name, by_run in self.newest.items()
            for run, records in by_run.items()
        ]


def text_table(found: SideBySide) -> list[str]:
    """Write the numbers as lines, a column for each model."""
    rows = found.rows()
    width = max(len(row.what) for row in rows)
    columns = [max(10, len(run)) for run in found.runs]
    titles = (f"{run:>{column}}" for run, column in zip(found.runs, columns, strict=True))
    lines = [" " * width + "  " + "  ".join(titles)]
    for row in rows:
        cells = (
            f"{_cell(value):>{column}}" for value, column in zip(row.values, columns, strict=True)
        )
        lines.append(f"{row.what:{width}}  {'  '.join(cells)}")
    return lines


def draw(found: SideBySide) -> Any:
    """Draw loss by position, needles by context, needle scores by rank, largest weight by n."""
    figure, axes = new_figure(9.6, 7.2, columns=2, rows=2)
    loss, needle, score, weight = axes.flat
    losses, trials, scores, sharpness = (found.newest[name] for name in FILES)
    for run, look in zip(found.runs, itertools.cycle(CONFIGURATIONS.values()), strict=False):
        line = {"color": look.colour, "linestyle": look.dash, "label": run}
        if run in losses:
            loss.plot(*by_position(losses[run][-1:]), **line)
        if run in trials:
            accuracy = _by_length(trials, lambda one: one.is_whole)[run]
            needle.plot(list(accuracy), list(accuracy.values()), marker="o", **line)
        if run in scores:
            ranked = sorted(map(top_score, scores[run]), reverse=True)
            score.plot(range(1, len(ranked) + 1), ranked, **line)
        if run in sharpness:
            one = sharpness[run][-1]
            weight.plot(one.num_keys, np.mean(one.largest, (0, 1)), **line)
    loss.set(xlabel="position", ylabel="loss")
    needle.set(xlabel="context", ylabel="needle retrieval accuracy", ylim=(-0.02, 1.02))
    score.set(xlabel="trial, by rank", ylabel="top needle score", ylim=(0, None))
    weight.set(xlabel="keys n", ylabel="largest weight", xscale="log", ylim=(0, 1.02))
    for axis in axes.flat:
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    return figure


def write_side_by_side(folder: Path) -> tuple[SideBySide, Path]:
    """Write the page of a folder of results; the same records give the same bytes."""
    found = SideBySide(folder)
    numbers = table(
        ["", *map(escape, found.runs)],
        [[escape(row.what), *map(_cell, row.values)] for row in found.rows()],
    )
    provenances = [{"what": what, **asdict(one)} for what, one in found.provenances()]
    drawing = image(as_svg(draw(found)), "The models side by side")
    names = escape(", ".join(found.runs))
    sections = (
        f'<header><h1>Side by side</h1><p class="lead">{names}</p></header>',
        f"<section><figure>{drawing}</figure></section>",
        f"<section><h2>Numbers</h2>{numbers}</section>",
        f"<section><h2>Where every number comes from</h2>{origins(provenances)}</section>",
    )
    path = folder / SIDE_BY_SIDE
    # Another process may have measured another model meanwhile.
    with in_turn(folder):
        write_whole(path, document("Side by side", sections))
    return found, path


def _newest(records: Sequence[Any]) -> dict[str, list[Any]]:
    """Keep each model's records of its last measurement of one kind and context size."""

    def measured(record: Any) -> object:
        return record.run, getattr(record, "length", None)

    last = {measured(one): one.provenance.config_hash for one in records}
    found: dict[str, list[Any]] = {}
    for one in records:
        if one.provenance.config_hash == last[measured(one)]:
            found.setdefault(one.run, []).append(one)
    return found


def _by_length(
    by_run: Mapping[str, Sequence[Any]], value: Callable[[Any], float]
) -> dict[str, dict[int, float]]:
    """Average a value over the trials of each context size."""
    return {
        run: {
            length: float(np.mean([value(one) for one in records if one.length == length]))
            for length in sorted({one.length for one in records})
        }
        for run, records in by_run.items()
    }


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
