"""Where a model comes from: no such folder, an adapter alone, one with code, a file cut short."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssmax._extras import require
from ssmax.errors import UsageError

WEIGHTS, CONFIG = "ssmax.safetensors", "ssmax.json"
"""What an adapter is made of."""


def is_adapter(folder: Path) -> bool:
    """True where s and b lie without the model that they are for."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def check_source(source: str | Path, *, of_an_adapter: str) -> None:
    """Refuse what is no model, where Transformers would look for one on the Hub or miss a file.

    `of_an_adapter` says what to do with one.
    """
    # Anything else may be a name on the Hub.
    is_path = Path(source).is_absolute() or str(source).startswith(("./", "../", "~"))
    if is_path and not Path(source).exists():
        raise UsageError(f"{str(source)!r} cannot be loaded: there is no such folder")
    if is_adapter(Path(source)):
        raise UsageError(
            f"{source} holds an adapter, s and b without the model that they are for; "
            + of_an_adapter
        )


def not_loaded(source: str | Path, error: OSError) -> ValueError:
    """What Transformers says in several lines, in one."""
    first = str(error).strip().splitlines()[0]
    where = "" if Path(source).exists() else " is no folder, and as a name on the Hub it"
    return ValueError(f"{str(source)!r}{where} cannot be loaded: {first}")


def converted_already(source: str | Path) -> ValueError:
    """Of a model that plain softmax was wanted of."""
    return ValueError(f"{source} is converted already; load it with ssmax.hf.from_pretrained")


@contextmanager
def no_code_run(source: str | Path) -> Iterator[None]:
    """Within it, what Transformers says of a model with code of its own is said in one line."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UsageError(
            f"{str(source)!r} brings code of its own, which is not run here; if you trust it, "
            "load it in Python with trust_remote_code=True: ssmax.hf.convert, save and "
            "CausalSubject take the model"
        ) from None


@contextmanager
def whole_files(source: str | Path) -> Iterator[None]:
    """Within it, a file that was cut short is a ValueError that names it."""
    safetensors = require("safetensors", extra="lm", purpose="reading checkpoints")
    try:
        yield
    except (safetensors.SafetensorError, json.JSONDecodeError) as error:
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
    except (SafetensorError, json.JSONDecodeError):
        return False
    return True
