"""Errors of loading: no such folder, an adapter alone, a model with code, a file cut short."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssmax._extras import require
from ssmax.errors import UsageError

WEIGHTS, CONFIG = "ssmax.safetensors", "ssmax.json"
"""What an adapter is made of."""
SECONDS_FOR_THE_HUB = 3.0
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_adapter(folder: Path) -> bool:
    """True where s and b lie without the model that they are for."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def check_typed(source: str) -> None:
    """Raise at once on what is neither there nor on the Hub.

    For names that a person types: Transformers tries the Hub again for half a minute.
    """
    path = Path(source)
    if path.is_file():
        raise UsageError(f"{source} is a file; give the folder of a model")
    if path.is_dir():
        return
    if not _ON_THE_HUB.fullmatch(source):
        raise UsageError(
            f"there is no folder {source!r}; give a folder, or a model on the Hub as OWNER/NAME"
        )
    require("huggingface_hub", install="ssmax[hf]", purpose="a model on the Hub")
    from huggingface_hub import constants, try_to_load_from_cache

    known = try_to_load_from_cache(source, "config.json")
    if not (isinstance(known, str) or constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT)):
        raise UsageError(
            f"there is no folder {source!r}, and {constants.ENDPOINT} cannot be reached; give a "
            "folder, or look at the network (HF_ENDPOINT names a mirror)"
        )


def _answers(address: str) -> bool:
    """Ask whether anybody answers, within seconds; looking up the name alone may take longer."""
    from huggingface_hub.utils import get_session

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            get_session().head(address, timeout=SECONDS_FOR_THE_HUB)
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS_FOR_THE_HUB)
    return answered.is_set()


def check_source(source: str | Path, *, of_an_adapter: str) -> None:
    """Raise on what is no model, where Transformers would ask the Hub or miss a file.

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


def not_loaded(source: str | Path, error: Exception) -> UsageError:
    """Make one line of what Transformers says in several."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    where = "" if Path(source).exists() else " is no folder, and as a name on the Hub it"
    return UsageError(f"{str(source)!r}{where} cannot be loaded: {first}")


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
        if "trust_remote_code" not in str(error):
            raise not_loaded(source, error) from error
        raise UsageError(
            f"{str(source)!r} brings code of its own, which is not run here; if you trust it, "
            "load it in Python with trust_remote_code=True: ssmax.hf.convert, save and "
            "HFCausalLM take the model"
        ) from None


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
