"""Read the config.json of a checkpoint. Without torch."""

import json
from pathlib import Path
from typing import Any

from ssmax.errors import UsageError
from ssmax.hf.sources import check_source

CONFIG = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json."""
    path = folder / CONFIG
    check_source(folder, of_an_adapter="save both as one model first")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; give that of a checkpoint")
    if not path.is_file():
        raise UsageError(f"{folder} is no model: it holds no {CONFIG}")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise UsageError(f"{path} describes no model of Transformers: it has no model_type")
    return values


def text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Find the part of a config that describes the model of text."""
    return values.get("text_config") or values
