"""Write what a run computes, line by line: metrics.jsonl, its curves for TensorBoard, its speed.

metrics.jsonl has nothing that a clock decides. A run that was stopped and resumed leaves the same
bytes as one that never was: what was written after the checkpoint is cut off before the run
resumes, and what was written before it is compared with the checksum in the checkpoint. Times and
speeds are in events.jsonl.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax_lab.model.config import LMConfig

EVENTS = "events.jsonl"
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "4090": 165.0,
}
"""Dense bfloat16 products a second, by a part of the device's name, as the makers state them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricsMark:
    """The length and checksum of metrics.jsonl at a checkpoint."""

    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class MetricsWriter:
    """Lines appended to a file, durable when `sync` returns."""

    def __init__(
        self, path: Path, *, mark: MetricsMark | None = None, tensorboard: Path | None = None
    ) -> None:
        """Check what is there against `mark` and cut it there; None keeps every finished line.

        Numbers are also written as curves into the `tensorboard` folder.
        """
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
        self._curves: Any = None
        if tensorboard is not None:
            require("tensorboard", install="ssmax-lab[tensorboard]", purpose="run.tensorboard")
            from torch.utils.tensorboard.writer import SummaryWriter

            self._curves = SummaryWriter(str(tensorboard))

    def append(self, kind: str, **values: Any) -> None:
        """Write a line; floats keep every digit."""
        written = json.dumps({"kind": kind, **values}).encode() + b"\n"
        self._digest.update(written)
        self._file.write(written)
        if self._curves is not None:
            self._append_curves(kind, values)

    def _append_curves(self, kind: str, values: dict[str, Any]) -> None:
        step = values["step"]
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                self._curves.add_scalar(f"{kind}/{name}", value, step)
        for name, row in values.get("values", {}).items():
            if ".ssmax." in name:
                for head, value in enumerate(row):
                    self._curves.add_scalar(f"{name}/{head}", value, step)

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
        if self._curves is not None:
            self._curves.close()


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


def flops_per_token(config: LMConfig) -> float:
    """Count the operations of a training step: six a weight, and causal attention's products."""
    heads = config.num_heads * config.head
    attention = config.hidden_size * (2 * heads + 2 * config.kv_heads * config.head)
    block = attention + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * block + config.hidden_size * config.vocab_size
    visible = (config.train_length + 1) / 2
    return 6.0 * weights + 12.0 * config.num_layers * heads * visible


def peak_flops(device: torch.device) -> float | None:
    """Look up what the device can do at most; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def short_number(number: float) -> str:
    """Round a number to the unit that it has a few of: 15.0 k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f}"
