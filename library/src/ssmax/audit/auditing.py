"""`audit`: run a checkpoint in every engine and say which of them apply its scale."""

import dataclasses
import functools
import json
import logging
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmax._engines import ENGINES, parse, python_of
from ssmax._progress import log_progress
from ssmax.audit.judging import Rows, Verdict, judge
from ssmax.audit.reference import Reference
from ssmax.audit.scales import find_scale, text_config
from ssmax.audit.small import write_small
from ssmax.errors import UsageError
from ssmax.hf.remote_code import is_our_code
from ssmax.hf.sources import read_config

_logger = logging.getLogger(__name__)
_RUNNERS = Path(__file__).with_name("_runners")
PAST = 1024
"""Positions that are compared after the scale has begun."""
Run = Callable[[Path, list[int]], Rows]
"""Runs an engine on a folder and tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What a checkpoint declares, and what engines make of it."""

    model: str
    where: str
    formula: str
    begins: int
    """The first position whose factor is not 1."""
    tokens: int
    verdicts: tuple[Verdict, ...]

    @property
    def is_applied(self) -> bool:
        """True where every engine applies the scale."""
        return all(verdict.finding == "applied" for verdict in self.verdicts)


def audit(
    model: str | Path,
    *,
    engines: Sequence[str] | Mapping[str, Run] | None = None,
    tokens: int | None = None,
    max_length: int | None = None,
    gguf: str | Path | None = None,
    small: bool = False,
) -> Audit:
    """Say whether engines apply the scale of the queries that a checkpoint's config declares.

    `model` is a folder. The engines are names as `vllm` or `vllm=PYTHON`, by default all that are
    installed; or functions that run one. `max_length` is the longest text that vLLM is told to
    expect. `gguf` is the same model as llama.cpp reads it. `small` puts a small model with random
    weights in the place of the checkpoint's, with the same scale.
    """
    folder = Path(model)
    values = read_config(folder)
    scale = find_scale(values)
    length = scale.begins + PAST if tokens is None else tokens
    if length < 3:
        raise UsageError(f"tokens must be at least 3, got {length}")
    if max_length is not None and max_length <= length:
        raise UsageError(f"max_length must be more than the {length} tokens, got {max_length}")
    if small and gguf is not None:
        raise UsageError("gguf holds the checkpoint's weights, small makes others; leave one out")
    if engines is None:
        engines = [name for name in ENGINES if name != "llama.cpp" or gguf is not None]
        engines = [name for name in engines if python_of(ENGINES[name]) is not None]
    if not isinstance(engines, Mapping):
        options = {"max_length": max_length, "gguf": None if gguf is None else str(gguf)}
        engines = dict(_engine(text, options) for text in engines)
    with tempfile.TemporaryDirectory(prefix="ssmax-audit-") as scratch:
        if small:
            folder = write_small(folder, Path(scratch) / "small")
            scale = find_scale(read_config(folder))
        prompt = _draw(read_config(folder), length)
        _logger.info(f"{scale.where}: {scale.formula}")
        reference, found = Reference(folder, scale), []
        for name, run in engines.items():
            _logger.info(f"{name}: {length:,} tokens")
            show = functools.partial(log_progress, _logger, f"{name}: reference, token")
            try:
                rows = run(folder, prompt.tolist())
            except EngineError as error:
                verdict = Verdict(
                    engine=name, version="", finding="not comparable",
                    why=f"it does not run this model: {error}",
                )  # fmt: skip
            else:
                verdict = judge(name, rows, reference, prompt, show)
            found.append(verdict)
    return Audit(
        model=str(model), where=scale.where, formula=scale.formula, begins=scale.begins,
        tokens=length, verdicts=tuple(found),
    )  # fmt: skip


class EngineError(RuntimeError):
    """An engine ended without an answer."""


def _engine(text: str, options: dict[str, Any]) -> tuple[str, Run]:
    """Find an engine's Python."""
    name, python = parse(text, tuple(ENGINES))
    python = python or python_of(ENGINES[name])
    if python is None:
        raise UsageError(
            f"{name} is not installed: {ENGINES[name].install}; or give the Python of the "
            f"environment that has it: {name}=PYTHON"
        )
    if name == "llama.cpp" and options["gguf"] is None:
        raise UsageError("llama.cpp reads GGUF files: give the one of this model as gguf")
    script = _RUNNERS / f"run_{name.replace('-', '_').replace('.', '_')}.py"
    return name, functools.partial(_run, python, script, options)


def _run(
    python: str, script: Path, options: dict[str, Any], folder: Path, tokens: list[int]
) -> Rows:
    """Run an engine in its own process."""
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(prefix="ssmax-audit-") as scratch:
        job, out = Path(scratch) / "job.json", Path(scratch) / "rows.json"
        about = {"folder": str(folder), "tokens": tokens, "is_our_code": is_our_code(folder)}
        job.write_text(json.dumps({**about, **options}))
        done = subprocess.run(
            [python, str(script), str(job), str(out)], capture_output=True, text=True,
            errors="replace", cwd=scratch,
        )  # fmt: skip
        if done.returncode != 0 or not out.is_file():
            raise EngineError(_reason(done.stderr, done.returncode))
        found = json.loads(out.read_text())
    rows = [{int(token): value for token, value in row.items()} for row in found["rows"]]
    widest = max(map(len, rows))
    # Some have a token more, the one that follows.
    ids = [[*row, *[next(iter(row))] * (widest - len(row))] for row in rows]
    logprobs = [[row[token] for token in each] for each, row in zip(ids, rows, strict=True)]
    return Rows(
        version=found["version"],
        ids=torch.tensor(ids),
        logprobs=torch.tensor(logprobs, dtype=torch.float64),
    )


def _reason(stderr: str, code: int) -> str:
    """Find the error in what an engine wrote."""
    lines = [line.strip() for line in stderr.splitlines()]
    errors = [line for line in lines if re.match(r"(\[\w+\]: )?[\w.]*(Error|Exception)\b.*:", line)]
    return errors[-1][:300] if errors else f"exit code {code}"


def _draw(values: dict[str, Any], length: int) -> Tensor:
    """Draw random tokens, none that a config gives a meaning to."""
    text = text_config(values)
    size = text.get("vocab_size")
    if not size:
        raise UsageError("the config must say vocab_size")
    special: set[int] = set()
    for key, value in {**values, **text}.items():
        if key.endswith(("_token_id", "_token_index")):
            special |= {one for one in (value if isinstance(value, list) else [value]) if one}
    allowed = torch.tensor([token for token in range(size) if token not in special])
    generator = torch.Generator().manual_seed(0)
    return allowed[torch.randint(len(allowed), (length,), generator=generator)]
