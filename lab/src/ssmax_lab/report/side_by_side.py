"""Models beside each other, from the records of a folder: a table, figures, a page."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssmax._files import in_turn, write_whole
from ssmax.errors import UsageError
from ssmax_lab.analysis.measures import by_octave, octave_differences, top_score
from ssmax_lab.analysis.statistics import over_seeds
from ssmax_lab.records import (
    NEEDLE,
    NEEDLE_SCORE,
    POSITION_LOSS,
    RECORD_FILES,
    SHARPNESS,
    SIDE_BY_SIDE,
    Provenance,
    read_jsonl,
)
from ssmax_lab.report.charts import Row as Point
from ssmax_lab.report.charts import curves, over_runs, series_of
from ssmax_lab.report.page import document, origins
from ssmax_lab.report.style import Figure
from ssmax_lab.report.tables import Table

LESS_FIRST = (
    "In brackets: the difference from {}, and its 95 % interval over documents or trials; it says "
    "nothing of what another training run would give"
)
FILES = (POSITION_LOSS, NEEDLE, NEEDLE_SCORE, SHARPNESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number of every model; None where it was not measured."""

    what: str
    values: tuple[float | None, ...]
    less_first: tuple[tuple[float, float | None, float | None] | None, ...]
    """The difference from the first model, and its interval over documents or trials."""


class SideBySide:
    """The newest measurement of every kind, by model, in the order in which they were made."""

    def __init__(self, folder: Path, runs: Sequence[str] | None = None) -> None:
        """Read the records of all models, or of those in `runs`."""
        found: dict[str, list[Any]] = {
            name: [
                record
                for record in read_jsonl(folder / name, RECORD_FILES[name].kind)
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
        rows = self._rows(
            "loss, positions {0[0]:,} to {0[1]:,}",
            {
                run: dict(
                    zip(
                        itertools.pairwise(records[-1].edges),
                        zip(*records[-1].binned, strict=True),
                        strict=True,
                    )
                )
                for run, records in self.newest[POSITION_LOSS].items()
            },
        )
        for what, file, value in (
            ("retrieval accuracy, whole number", NEEDLE, lambda one: one.is_whole),
            ("retrieval accuracy, first digit", NEEDLE, lambda one: one.first_digit),
            ("top needle score", NEEDLE_SCORE, top_score),
        ):
            rows += self._rows(f"{what}, context {{:,}}", self.by_length(file, value))
        for what, field in (("largest weight", "largest"), ("entropy", "entropy")):
            # A mean over heads: another document is not in it.
            means = {
                run: {n: [mean] for n, mean in _by_keys(records[-1], field)}
                for run, records in self.newest[SHARPNESS].items()
            }
            rows += self._rows(f"{what} at n = {{:,}}", means)
        return rows

    def by_length(
        self, file: str, value: Callable[[Any], float]
    ) -> dict[str, dict[int, list[float]]]:
        """List a value of every trial of each context size, in the order of depths and trials."""
        found: dict[str, dict[int, list[float]]] = {}
        for run, records in self.newest[file].items():
            for one in sorted(records, key=lambda one: (one.length, one.depth, one.trial)):
                found.setdefault(run, {}).setdefault(one.length, []).append(float(value(one)))
        return found

    def _rows(self, what: str, values: Mapping[str, Mapping[Any, Sequence[float]]]) -> list[Row]:
        """Make a row for each key: means of every model, and what they are less the first's."""
        rows = []
        for key in sorted({key for one in values.values() for key in one}):
            found = [values.get(run, {}).get(key) for run in self.runs]
            means = tuple(None if one is None else float(np.mean(one)) for one in found)
            less = tuple(_less(found[0], one) for one in found[1:])
            rows.append(Row(what=what.format(key), values=means, less_first=(None, *less)))
        return rows

    def provenances(self) -> list[tuple[str, Provenance]]:
        """List where every number comes from."""
        return [
            (f"{name.removesuffix('.jsonl').replace('_', ' ')}, {run}", records[-1].provenance)
            for name, by_run in self.newest.items()
            for run, records in by_run.items()
        ]


def _less(
    base: Sequence[float] | None, own: Sequence[float] | None
) -> tuple[float, float | None, float | None] | None:
    """Compare two models on the same documents or trials; None where they are not the same."""
    if base is None or own is None or len(base) != len(own):
        return None
    found = over_seeds(own, base)
    return found.effect, found.low, found.high


def _by_keys(record: Any, field: str) -> list[tuple[int, float]]:
    """Average the largest weight or the entropy over heads, by the number of keys."""
    means = np.mean(getattr(record, field), (0, 1)).tolist()
    return list(zip(record.num_keys, means, strict=True))


def text_table(found: SideBySide) -> list[str]:
    """Write the numbers as lines, a column for each model."""
    table = number_table(found)
    cells = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([f"{first:{widths[0]}}", *map(str.rjust, others, widths[1:])])
        for first, *others in cells
    ]
    return [*lines, *(["", table.caption] if table.caption else [])]


def number_table(found: SideBySide) -> Table:
    """Tabulate the numbers, a column for each model."""
    return Table(
        header=["", *found.runs],
        rows=[[row.what, *_cells(row)] for row in found.rows()],
        caption=LESS_FIRST.format(found.runs[0]) if len(found.runs) > 1 else "",
    )


def figures(found: SideBySide) -> list[Figure]:
    """Draw loss by position, needles by context, needle scores by rank, largest weight by n."""
    losses, scores = found.newest[POSITION_LOSS], found.newest[NEEDLE_SCORE]
    series = series_of(found.runs)
    first, measure, less = found.runs[0], "loss, nats", f"loss less that of {found.runs[0]}, nats"
    of_losses: list[Point] = []
    measures = [measure]
    if first in losses and len(losses) > 1:
        measures = [less, measure]
        for run, records in losses.items():
            x, y = octave_differences(losses[first][-1], records[-1])
            of_losses += over_runs(run, "position", x, [y], measure=less)
    for run, records in losses.items():
        x, y = by_octave(records[-1].mean)
        of_losses += over_runs(run, "position", x, [y], measure=measure)
    of_trials: list[Point] = []
    for run, by_length in found.by_length(NEEDLE, lambda one: one.is_whole).items():
        means = [float(np.mean(values)) for values in by_length.values()]
        of_trials += over_runs(run, "context", list(by_length), [means])
    of_scores: list[Point] = []
    for run, records in scores.items():
        ranked = sorted(map(top_score, records), reverse=True)
        of_scores += over_runs(run, "trial by rank", range(1, len(ranked) + 1), [ranked])
    of_sharpness: list[Point] = []
    for run, records in found.newest[SHARPNESS].items():
        n, means = zip(*_by_keys(records[-1], "largest"), strict=True)
        of_sharpness += over_runs(run, "n", n, [means])
    made: list[tuple[str, str, Sequence[Point], dict[str, Any]]] = [
        ("Loss by position", "position", of_losses, {"log_x": True, "measures": measures}),
        ("Needle retrieval accuracy by context", "context", of_trials,
         {"y": "needle retrieval accuracy", "domain": (0, 1), "dots": True, "log_x": True}),
        ("Attention on the number, trial by trial", "trial by rank", of_scores,
         {"y": "top needle score", "zero": True, "dots": True}),
        ("Mean largest attention weight by number of keys", "n", of_sharpness,
         {"y": "largest attention weight", "log_x": True, "log_y": True}),
    ]  # fmt: skip
    return [
        Figure(title=title, panels=[curves(rows, series, x=x, **{"y": "", **options})])
        for title, x, rows, options in made
        if rows
    ]


def write_side_by_side(folder: Path) -> tuple[SideBySide, Path]:
    """Write the page of a folder of results; the same records give the same bytes."""
    found = SideBySide(folder)
    page = document(
        "Side by side",
        note=", ".join(found.runs),
        figures=[
            {"id": f"figure-{place}", "figure": figure}
            for place, figure in enumerate(figures(found), 1)
        ],
        tables=[number_table(found)],
        provenance=origins(found.provenances()),
    )
    path = folder / SIDE_BY_SIDE
    # Another process may have measured another model meanwhile.
    with in_turn(folder):
        write_whole(path, page)
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


def _cells(row: Row) -> list[str]:
    cells = []
    for value, less in zip(row.values, row.less_first, strict=True):
        told = "-" if value is None else f"{value:.4f}"
        if less is not None:
            interval = "" if less[1] is None else f" [{less[1]:+.4f}, {less[2]:+.4f}]"
            told += f" ({less[0]:+.4f}{interval})"
        cells.append(told)
    return cells
