"""Errors of loading: no such folder, an adapter alone, a model with code, a file cut short."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssmax._extras import require
from ssmax.errors import UsageError

WEIGHTS, CONFIG = "ssmax.safetensors", "ssmax.json"
"""What an adapter is made of."""
MODEL_CONFIG = "config.json"
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_adapter(folder: Path) -> bool:
    """True where s and b lie without the model that they are for."""
    return (folder / CONFIG).is_file() and not (folder / MODEL_CONFIG).is_file()


def check_source(source: str | Path, *, of_an_adapter: str) -> None:
    """Raise on what is no model, where Transformers would ask the Hub or miss a file.

    `of_an_adapter` says what to do with one.
    """
    path = Path(source)
    # Anything else may be a name on the Hub.
    is_path = path.is_absolute() or str(source).startswith(("./", "../", "~"))
    if (is_path and not path.exists()) or path.parent.is_file():
        raise UsageError(f"{str(source)!r} cannot be loaded: there is no such folder")
    if is_adapter(path):
        raise UsageError(
            f"{source} holds an adapter, s and b without the model that they are for; "
            + of_an_adapter
        )


def check_typed(source: str, *, of_an_adapter: str) -> None:
    """Raise on what a person typed that is neither a folder nor a name on the Hub."""
    check_source(source, of_an_adapter=of_an_adapter)
    path = Path(source)
    if path.is_file():
        raise UsageError(f"{source} is a file; give the folder of a model")
    if not path.is_dir() and not _ON_THE_HUB.fullmatch(source):
        raise UsageError(
            f"there is no folder {source!r}; give a folder, or a model on the Hub as OWNER/NAME"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model in a folder; raise on anything else."""
    give = f"give that of a model; of a run of ssmax-lab, ssmax-lab export {folder} OUT makes one"
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; {give}")
    whole = f"ssmax.hf.load(base, {str(folder)!r}).save_pretrained(OUT) makes a whole model of both"
    check_source(folder, of_an_adapter=f"{whole}; save the base's tokenizer there too")
    path = folder / MODEL_CONFIG
    if not path.is_file():
        raise UsageError(f"{folder} is no model: it holds no {MODEL_CONFIG}; {give}")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise UsageError(f"{path} describes no model of Transformers: it has no model_type; {give}")
    return values


def converted_already(source: str | Path) -> UsageError:
    """Make the error for a converted model where plain softmax is wanted."""
    return UsageError(f"{source} is converted already; load it with ssmax.hf.from_pretrained")


@contextmanager
def read_by_transformers(source: str | Path) -> Iterator[None]:
    """Raise in one line what Transformers says against a model's files."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{str(source)!r} brings code of its own, which is not run here; if you trust it, "
                "load it in Python with trust_remote_code=True: ssmax.hf.convert, save and "
                "HFCausalLM take the model"
            ) from None
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "" if Path(source).exists() else " is no folder, and as a name on the Hub it"
        raise UsageError(f"{str(source)!r}{where} cannot be loaded: {first}") from error


@contextmanager
def whole_files(source: str | Path) -> Iterator[None]:
    """Raise a UsageError that names the file where one was cut short."""
    safetensors = require("safetensors", install="ssmax[hf]", purpose="reading checkpoints")
    try:
        yield
    except (safetensors.SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        files = sorted(Path(source).rglob("*.*")) if Path(source).is_dir() else []
        what = next((path for path in files if not _is_whole(path)), source)
        raise UsageError(
            f"{what} cannot be read ({error}): it is damaged or was cut short; copy, download or "
            "save it again"
        ) from error


def _is_whole(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError):
        return False
    return True
