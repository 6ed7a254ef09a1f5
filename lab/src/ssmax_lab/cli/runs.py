"""A run that a verb was given, looked at before anything is done with it."""

from pathlib import Path

from ssmax.errors import UsageError
from ssmax_lab.cli.options import TINY
from ssmax_lab.records import RUN_CONFIG


def check_run(folder: Path, *, otherwise: str = "") -> None:
    """Refuse what is no run; `otherwise` says what the verb takes besides."""
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}; give a run that ssmax-lab pretrain made, or "
            f"{TINY}{otherwise}"
        )
    if not (folder / RUN_CONFIG).is_file():
        raise UsageError(
            f"{folder} is no run: it holds no {RUN_CONFIG}; give one that ssmax-lab pretrain made, "
            f"or {TINY}{otherwise}"
        )
