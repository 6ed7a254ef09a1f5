"""The forms that a model is exported in and the names of their files. Without torch."""

from pathlib import Path

from ssmax.errors import UsageError

FORMS = ("hf", "ministral", "gguf", "onnx", "torch-export")
GGUF = "model.gguf"
GGUF_WEIGHTS = ("float32", "bfloat16", "q8_0")
ONNX, PROGRAM = "model.onnx", "model.pt2"
POSITIONS = "positions.json"
"""Beside a graph whose positions end: how many were learnt."""


def check_choice(folder: Path, to: str, weights: str, fit: bool) -> None:
    """Refuse a form that there is none of, options that it cannot take, and a filled folder."""
    if to not in FORMS:
        raise UsageError(f"to must be one of {', '.join(FORMS)}, got {to!r}")
    if weights not in GGUF_WEIGHTS:
        raise UsageError(f"weights must be one of {', '.join(GGUF_WEIGHTS)}, got {weights!r}")
    if weights != "float32" and to != "gguf":
        raise UsageError(
            f"weights={weights!r} belongs to gguf; {to} keeps the dtype of the model: cast that"
        )
    if fit and to not in ("ministral", "gguf"):
        raise UsageError(f"fit gives up the bias, which {to} can keep; leave it out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; give another one")
