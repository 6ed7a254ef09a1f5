"""The tokenizer and the processors of a model; none of their code is run."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from ssmax._extras import require
from ssmax.hf.sources import read_by_transformers

# Copied as they are: tokens that were prepared with a tokenizer.json are known by its bytes, and
# processors of pictures and sound need packages that converting does not.
FILES = (
    "tokenizer.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "audio_tokenizer_config.json", "chat_template.*",
    "additional_chat_templates/*.jinja", "*_tokenizer/*",
)  # fmt: skip
"""By their names in a model's folder; a second tokenizer has a folder of its own."""


def own_tokenizer(source: str | Path, config: Any = None) -> Any:
    """Load a model's tokenizer by Transformers; `config` is the model's.

    Without one a folder is asked for it, which may name code that is not run.
    """
    transformers = require("transformers", install="ssmax[hf]", purpose="reading a tokenizer")
    # Not left open: Transformers would ask on the terminal, and wait.
    with read_by_transformers(source):
        return transformers.AutoTokenizer.from_pretrained(
            source, config=config, trust_remote_code=False
        )


def copy_inputs(source: str | Path, out: Path, config: Any) -> None:
    """Copy tokenizer and processors from a folder or the Hub, as far as there are any."""
    tokenizer = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        tokenizer = own_tokenizer(source, config)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    folder = _folder_of(source)
    for path in (path for pattern in FILES for path in folder.glob(pattern) if path.is_file()):
        copy = out / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _folder_of(source: str | Path) -> Path:
    """Find the model's folder, or that of its files from the Hub."""
    if Path(source).is_dir():
        return Path(source)
    hub = require("huggingface_hub", install="ssmax[hf]", purpose="reading a model's files")
    return Path(hub.snapshot_download(str(source), allow_patterns=list(FILES)))
