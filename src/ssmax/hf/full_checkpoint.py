"""A whole converted model from a folder of save_pretrained, s and b included or not at all."""

import json
from pathlib import Path
from typing import Any

from ssmax._extras import require
from ssmax.hf.conversion import KEY, Conversion, attach
from ssmax.hf.hook import ATTRIBUTE


def from_pretrained(folder: str | Path, **options: Any):
    """The model that `save_pretrained` wrote after a conversion; options are Transformers'.

    The class is the one that was saved. An s that is missing is an error that names the layer:
    Transformers itself would leave it uninitialised, or load plain softmax without a word.
    """
    transformers = require("transformers", extra="hf", purpose="ssmax.hf.from_pretrained")
    config = transformers.AutoConfig.from_pretrained(folder)
    values = getattr(config, KEY, None)
    if values is None:
        raise ValueError(
            f"{folder} holds no converted model: its config.json has no {KEY!r}; load it with "
            "Transformers, then an adapter with ssmax.hf.load, or an s of another name with "
            "ssmax.hf.adopt"
        )
    record = Conversion.from_dict(values)
    kind = _class_of(transformers, config, folder)

    class Loading(kind):
        """Converted as soon as it is built, so that the checkpoint's s finds its place."""

        _keep_in_fp32_modules_strict = [  # noqa: RUF012 (Transformers reads it from the class)
            *(getattr(kind, "_keep_in_fp32_modules_strict", None) or ()),
            ATTRIBUTE,
        ]

        def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
            super().__init__(config, *arguments, **keywords)
            delattr(self.config, KEY)
            attach(self, record)

    Loading.__name__ = kind.__name__
    Loading.__qualname__ = kind.__qualname__
    model, about = Loading.from_pretrained(
        folder, config=config, output_loading_info=True, **options
    )
    model.__class__ = kind
    missing = sorted(name for name in about["missing_keys"] if f".{ATTRIBUTE}." in name)
    extra = sorted(name for name in about["unexpected_keys"] if f".{ATTRIBUTE}." in name)
    wrong = [str(entry) for entry in about.get("mismatched_keys", ()) if ATTRIBUTE in str(entry)]
    for words, names in (("lacks", missing), ("has too many:", extra), ("has another", wrong)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{folder} {words} {', '.join(names[:3])}{more}")
    return model


def _class_of(transformers: Any, config: Any, folder: str | Path) -> Any:
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        text = json.dumps(names)
        raise ValueError(
            f"{folder} names the class {text}, which this Transformers does not have; "
            "remote code has to be converted after loading: ssmax.hf.load"
        )
    return kind
