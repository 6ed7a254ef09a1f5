"""The config.json of a converted model: a type of its own, which plain Transformers refuses.

Transformers by itself would load a converted checkpoint as softmax and drop s. In memory the config
keeps its plain type, by which Transformers, PEFT and others find what belongs to a family.
"""

import functools
import json
from pathlib import Path
from typing import Any

KEY = "ssmax"
"""Where a config says how its model was converted."""
TYPE_PREFIX, CLASS_PREFIX = "ssmax_", "SSMax"
"""Before the model's type and the names of its classes, on disk."""
MODULE = "modeling_ssmax"
"""The file of code that remote code is in."""


def write_own_type(config: Any, path: Any, use_diff: bool, *, has_code: bool) -> None:
    """Write a config.json as Transformers does, but for the type and the names of its classes.

    Without `has_code` an `auto_map` is left out: it came with the unconverted model.
    """
    values = json.loads(config.to_json_string(use_diff=use_diff))
    if not has_code:
        values.pop("auto_map", None)
    values["model_type"] = TYPE_PREFIX + values["model_type"].removeprefix(TYPE_PREFIX)
    if names := values.get("architectures"):
        values["architectures"] = [CLASS_PREFIX + name.removeprefix(CLASS_PREFIX) for name in names]
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    Path(path).write_text(text, encoding="utf-8")


class OwnType:
    """Mixed into a class of configs: reads and writes a type of its own, and is of the plain one.

    Subclasses are the configs of remote code, of vLLM's plugin, and of a checkpoint being read.
    """

    model_type: str

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write it with a type of its own."""
        write_own_type(self, json_file_path, use_diff, has_code=True)

    @classmethod
    def get_config_dict(
        cls, *arguments: Any, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read it with the plain type; engines choose their class by the names as they are."""
        values, rest = super().get_config_dict(  # pyright: ignore[reportAttributeAccessIssue]
            *arguments, **options
        )
        return {**values, "model_type": cls.model_type}, rest


@functools.cache
def install_writer() -> None:
    """Make every config of a converted model write a type of its own; others stay as they are.

    The method that writes the file is the one place that `save_pretrained`, the Trainer's
    checkpoints and uploads share; `to_dict` is also read by PEFT, which needs the plain type.
    """
    import transformers

    plain = transformers.PretrainedConfig.to_json_file

    @functools.wraps(plain)
    def to_json_file(self: Any, json_file_path: Any, use_diff: bool = True) -> None:
        if KEY in vars(self) and not _belongs_to_code(transformers, self):
            write_own_type(self, json_file_path, use_diff, has_code=False)
        else:
            plain(self, json_file_path, use_diff=use_diff)

    transformers.PretrainedConfig.to_json_file = to_json_file


def _belongs_to_code(transformers: Any, config: Any) -> bool:
    """True where the model runs by code in its folder, which finds it by `auto_map`.

    Models of Transformers' own classes may still carry the auto_map of the folder they are from.
    """
    names = getattr(config, "architectures", None) or [""]
    return bool(getattr(config, "auto_map", None)) and not hasattr(transformers, names[0])
