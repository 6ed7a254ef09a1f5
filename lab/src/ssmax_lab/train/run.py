"""What a run's folder holds: settings, metrics, tokenizer, model; how it is opened and read.

metrics.jsonl has nothing that a clock decides. A run that was stopped and resumed leaves the same
bytes as one that never was: what was written after the checkpoint is cut off before the run
resumes, and what was written before it is compared with the checksum in the checkpoint. Times and
speeds are in events.jsonl. Torch is imported where a model is loaded.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmax._files import locked, make_folder, whole_file, write_whole
from ssmax.errors import UsageError
from ssmax_lab.data.shards import TRAIN, ShardSet
from ssmax_lab.data.tokenizer import FILE as TOKENIZER
from ssmax_lab.data.tokenizer import Tokenizer, load_tokenizer
from ssmax_lab.records import METRICS, RUN_CONFIG, Provenance
from ssmax_lab.tiny import TINY
from ssmax_lab.train.config import MAY_CHANGE, TrainConfig

if TYPE_CHECKING:
    import torch

    from ssmax_lab.model import LM
    from ssmax_lab.train.dist import DistContext

MODEL, EVENTS = "model", "events.jsonl"
"""In a run: the folder of its model, and what clocks and people decided."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricsMark:
    """The length and checksum of metrics.jsonl at a checkpoint."""

    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class MetricsWriter:
    """Lines appended to a file, durable when `sync` returns."""

    def __init__(self, path: Path, *, mark: MetricsMark | None = None) -> None:
        """Check what is there against `mark` and cut it there; None keeps every finished line."""
        path.touch()
        if mark is None:
            content = path.read_bytes()
            content = content[: content.rfind(b"\n") + 1]
        else:
            content = read_marked(path, mark)
        self._digest = hashlib.sha256(content)
        self._file = path.open("r+b")
        self._file.truncate(len(content))
        self._file.seek(0, os.SEEK_END)

    def append(self, kind: str, **values: Any) -> None:
        """Write a line; floats keep every digit."""
        written = json.dumps({"kind": kind, **values}).encode() + b"\n"
        self._digest.update(written)
        self._file.write(written)

    def flush(self) -> None:
        """Hand the lines to the system; they outlive this process, not the machine."""
        self._file.flush()

    def sync(self) -> MetricsMark:
        """Put everything on disk; return the length and checksum of all lines."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return MetricsMark(bytes=self._file.tell(), sha256=self._digest.hexdigest())

    def close(self) -> None:
        """Write what is left and close; an earlier call raised what cannot be written."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_marked(path: Path, mark: MetricsMark) -> bytes:
    """Read metrics up to a checkpoint; a file that is shorter, or was changed, is refused."""
    content = path.read_bytes()
    kept = content[: mark.bytes]
    if len(kept) < mark.bytes:
        fault = f"holds {len(content)} bytes, the checkpoint was written after {mark.bytes}"
    elif hashlib.sha256(kept).hexdigest() != mark.sha256:
        fault = "was changed after the checkpoint was written: its checksum differs"
    else:
        return kept
    raise UsageError(f"{path} {fault}; bring the file back, or start a new run")


def read_run_config(folder: Path, *, otherwise: str = "") -> TrainConfig:
    """Read the configuration that a run was started with.

    `otherwise` tells who gave something else what to do.
    """
    path = folder / RUN_CONFIG
    advice = f"give a run that ssmax-lab pretrain made, or {TINY}{otherwise}"
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; {advice}")
    if not path.is_file():
        raise UsageError(f"{folder} is no run: it holds no {RUN_CONFIG}; {advice}")
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict) or not values:
            raise UsageError("it describes none")
        if "model_type" in values:
            raise UsageError("it is Transformers'; evaluate --hf and serve take it")
        if "format" in values:
            raise UsageError("it is a model's; give the folder of the run that holds it")
        values.pop("provenance", None)
        return TrainConfig.from_dict(values)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, UsageError) as error:
        raise UsageError(f"{path} is not the configuration of a run: {error}") from None


def resumed_config(folder: Path, overrides: Mapping[str, Any]) -> TrainConfig:
    """Read a run's configuration, with what may change when it resumes."""
    if not (folder / RUN_CONFIG).is_file():
        raise UsageError(
            f"{folder} is no run: it holds no {RUN_CONFIG}, so that there is nothing to "
            "resume; leave --resume out to begin one"
        )
    config = read_run_config(folder)
    changed = config.with_overrides(overrides)
    for key in overrides:
        room, name = key.split(".", 1)
        is_other = getattr(getattr(config, room), name) != getattr(getattr(changed, room), name)
        if is_other and key not in MAY_CHANGE:
            raise UsageError(
                f"{key} cannot change in a run that resumes; what can: {', '.join(MAY_CHANGE)}"
            )
    if changed.run.steps != config.run.steps and config.is_bound_to_steps:
        raise UsageError(
            "run.steps cannot change in a run whose schedule or switch is a share of them"
        )
    return changed


def with_name(folder: Path) -> Path:
    """Make a path end in the folder's name, also where it is "." or ".."; a link keeps its."""
    return folder.resolve() if folder.name in ("", "..") else folder


def text_of_run(config: TrainConfig) -> Path:
    """Find the prepared tokens that a run was trained on; a fine-tuned one's are its base's."""
    if config.data.base:
        return text_of_run(read_run_config(Path(config.data.base)))
    return Path(config.data.folder)


def check_text(config: TrainConfig) -> None:
    """Refuse a data.folder without prepared tokens, or with those of another vocabulary."""
    folder = Path(config.data.folder)
    if not config.data.folder or not folder.is_dir():
        raise UsageError(
            f"there are no prepared tokens in data.folder, {config.data.folder!r}; "
            "make them with ssmax-lab data prepare"
        )
    vocabulary = ShardSet.open(folder / TRAIN).vocabulary
    if vocabulary.size > config.model.vocab_size:
        raise UsageError(
            f"{folder} holds tokens of {vocabulary.name!r}, a vocabulary of {vocabulary.size}; "
            f"the model has {config.model.vocab_size}: set model.vocab_size={vocabulary.size}, or "
            "prepare the text with another tokenizer"
        )


@contextmanager
def open_run(
    folder: Path,
    config: TrainConfig,
    *,
    tokenizer_from: Path,
    ranks: "DistContext",
    resume: bool,
) -> Iterator[Callable[[], None]]:
    """Hold the folder, one rank for all of them; one that holds another run is refused.

    Yields what writes config.json, to be called once there is nothing left that could be refused.
    """
    from ssmax_lab.train import checkpoint

    with ExitStack() as held:

        def claim() -> None:
            make_folder(folder)
            held.enter_context(locked(folder))
            metrics = folder / METRICS
            has_steps = metrics.is_file() and metrics.stat().st_size > 0
            has_run = (folder / RUN_CONFIG).exists() or has_steps or checkpoint.has_any(folder)
            if has_run and not resume:
                raise UsageError(
                    f"{folder} holds a run already; continue it with --resume, or give another name"
                )

        def write() -> None:
            if (tokenizer_from / TOKENIZER).is_file():
                # Its bytes: they are what tokens are known by.
                with whole_file(folder / TOKENIZER) as file:
                    file.write((tokenizer_from / TOKENIZER).read_bytes())
            _write_config(folder, config, ranks)

        ranks.on_rank0(claim)
        yield lambda: ranks.on_rank0(write)


def _write_config(folder: Path, config: TrainConfig, ranks: "DistContext") -> None:
    """Write it with the provenance of the first start; later ones are among the events."""
    provenance: dict[str, Any] = dataclasses.asdict(
        Provenance.here(config=config.to_dict(), device=str(ranks.device), seed=config.run.seed)
    )
    if (folder / RUN_CONFIG).exists():
        provenance = json.loads((folder / RUN_CONFIG).read_text()).get("provenance", provenance)
    values = {**config.to_dict(), "provenance": provenance}
    write_whole(folder / RUN_CONFIG, json.dumps(values, indent=2) + "\n")


def load_run_model(folder: Path, *, device: "torch.device | str" = "cpu") -> "LM":
    """Load what a run was finished with, or else the model of its newest checkpoint."""
    config = read_run_config(folder)
    from ssmax_lab.model import LM, LMConfig, load_lm

    if (folder / MODEL).is_dir():
        return load_lm(folder / MODEL, device=device)
    # Only here: torch.distributed's checkpoints take a second to import.
    import torch

    from ssmax_lab.train import checkpoint
    from ssmax_lab.train.dist import single_process

    found, faults = checkpoint.newest_checkpoint(folder)
    if found is None:
        raise UsageError("; ".join([f"{folder} holds no model and no whole checkpoint", *faults]))
    rule = checkpoint.read_state(found).rule
    model = LM(LMConfig.from_dict({**config.model.to_dict(), "rule": rule}))
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    checkpoint.load_tensors(found, tensors, single_process(torch.device("cpu")))
    return model.to(device)


def load_run_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer whose tokens a run learned."""
    if (folder / TOKENIZER).is_file():
        return load_tokenizer(str(folder / TOKENIZER))
    return load_tokenizer(read_run_config(folder).data.tokenizer)
