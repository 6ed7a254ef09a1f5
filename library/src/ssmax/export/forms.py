"""The forms that a model is exported in and the names of their files. Without torch."""

from pathlib import Path
from typing import Any

from ssmax._files import check_empty
from ssmax.errors import UsageError
from ssmax.hf.sources import MODEL_CONFIG, read_config

FORMS = ("hf", "ministral", "gguf", "onnx", "torch-export")
GGUF = "model.gguf"
GGUF_WEIGHTS = ("float32", "bfloat16", "q8_0")
ONNX, PROGRAM = "model.onnx", "model.pt2"
TOKENIZER = "tokenizer.json"
_PEFT = "adapter_config.json"
"""What PEFT writes beside the weights of an adapter."""


def check_choice(folder: Path, to: str, weights: str, fit: bool) -> None:
    """Raise on an unknown form, on options that it cannot take, and on a filled folder."""
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
    check_empty(folder)


def check_exportable(folder: Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face model's folder; raise on anything else."""
    if (folder / _PEFT).is_file() and not (folder / MODEL_CONFIG).is_file():
        raise UsageError(
            f"{folder} holds PEFT's adapter without the model that it is for; "
            f"PeftModel.from_pretrained(base, {str(folder)!r}).merge_and_unload()"
            ".save_pretrained(OUT) makes a whole model of both; save the base's tokenizer there too"
        )
    return read_config(folder)
