"""A converted model for people without this package: its weights and one file of code."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ssmax._extras import require
from ssmax._files import write_whole
from ssmax.errors import UsageError
from ssmax.hf.bundle import bundle
from ssmax.hf.conversion import must_be_converted, unwrapped
from ssmax.hf.written_config import CLASS_PREFIX, MODULE
from ssmax.nn.rules import OWN_RULES, RULES

_HEAD = '''"""Scalable-Softmax in models of Transformers: a query is scaled by its keys' number.

Written by ssmax.hf.save_remote_code from the package ssmax, which it does not need. Load it with
AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True).
"""

'''
# In the order of their imports.
_MODULES = (
    "ssmax.errors", "ssmax._extras", "ssmax.ops.length", "ssmax.ops.dtypes", "ssmax.ops.window",
    "ssmax.ops.visible", "ssmax.ops.scale", "ssmax.ops.scale_query.reference", "ssmax.nn.rules",
    "ssmax.nn.scale", "ssmax.hf.written_config", "ssmax.hf.masks", "ssmax.hf.hook",
    "ssmax.hf.layers", "ssmax.hf.conversion", "ssmax.hf.full_checkpoint",
)  # fmt: skip
_INSTEAD = {
    # The reference runs anywhere, without a kernel.
    "scale_by_ssmax": "scale_by_ssmax_reference",
    # The file's own configs write their type themselves.
    "install": "install_attention",
}


def save_remote_code(model: nn.Module, folder: str | Path) -> str:
    """Write a converted model that loads with `trust_remote_code=True` and without this package.

    The checkpoint has a type and classes of its own: without that flag Transformers refuses it, as
    do engines that choose their code by these. Returns the name of the Auto class that loads it.
    """
    transformers = require("transformers", install="ssmax[hf]", purpose="ssmax.hf.save_remote_code")
    record = must_be_converted(model)
    if RULES[record.rule] is not OWN_RULES.get(record.rule):
        raise UsageError(
            f"the rule {record.rule!r} is not this package's own, so that the file of code would "
            "not know it; use save_pretrained and ssmax.hf.from_pretrained"
        )
    saved: Any = unwrapped(model)
    if hasattr(saved, "peft_config"):
        raise UsageError(
            "PEFT has changed this model; merge_and_unload gives one that can be saved"
        )
    kind, config = type(saved), type(saved.config)
    heads = _auto_classes(transformers, kind, config)
    auto = next((auto for auto, head in heads.items() if head is kind), None)
    if auto is None:
        raise UsageError(
            f"no Auto class of Transformers leads from a {config.__name__} to {kind.__name__}, so "
            "that remote code could not be found by it; use save_pretrained and "
            "ssmax.hf.from_pretrained, or with a class of your own ssmax.hf.save"
        )
    saved.save_pretrained(folder)
    path = Path(folder) / "config.json"
    values = json.loads(path.read_text())
    names = {auto: head.__name__ for auto, head in heads.items()}
    values["auto_map"] = {
        auto: f"{MODULE}.{CLASS_PREFIX}{name}"
        for auto, name in {**names, "AutoConfig": config.__name__}.items()
    }
    write_whole(path.with_name(f"{MODULE}.py"), source(names, config.__name__))
    write_whole(path, json.dumps(values, indent=2) + "\n")
    return auto


def is_our_code(folder: Path) -> bool:
    """True where all code that a folder brings is what this package would write into it."""
    if {path.name for path in folder.rglob("*.py")} != {f"{MODULE}.py"}:
        return False
    names: dict[str, str] = {}
    for path in folder.glob("*config.json"):
        values = json.loads(path.read_text())
        names |= values.get("auto_map", {})
    # "owner/name--module.Class" would be code from the Hub.
    own = re.compile(rf"{MODULE}\.{CLASS_PREFIX}(\w+)")
    found = {auto: own.fullmatch(str(name)) for auto, name in names.items()}
    heads = {auto: match[1] for auto, match in found.items() if match}
    if len(heads) < len(names) or "AutoConfig" not in heads:
        return False
    return (folder / f"{MODULE}.py").read_text() == source(heads, heads.pop("AutoConfig"))


def source(heads: Mapping[str, str], config: str) -> str:
    """Write the file: our own lines, and a class for each one that an Auto class takes."""
    parts = [_class("OwnType", config, "of a type of its own", "AutoConfig")]
    own_config = f"\n    config_class = {CLASS_PREFIX}{config}"
    for name, auto in {name: auto for auto, name in heads.items()}.items():
        parts.append(_class("Converted", name, "with Scalable-Softmax", auto) + own_config)
    # `transformers serve` looks for a class by its name in there, also for that of remote code; of
    # the module two copies may be loaded, which share their type.
    own = [f"{CLASS_PREFIX}{name}" for name in dict.fromkeys(heads.values())]
    parts.append("\n".join(f"type(transformers).{name} = {name}" for name in own))
    definitions = bundle(_MODULES, ["Converted", "OwnType"], _INSTEAD)
    return f"{_HEAD}import transformers\n{definitions}\n\n\n" + "\n\n\n".join(parts) + "\n"


def _class(first: str, name: str, what: str, auto: str) -> str:
    # By its Auto class Transformers knows that the code is to be saved with the model.
    return (
        f"class {CLASS_PREFIX}{name}({first}, transformers.{name}):\n"
        f'    """{name} {what}."""\n\n'
        f'    _auto_class = "{auto}"'
    )


def _auto_classes(transformers: Any, kind: type, config: type) -> dict[str, type]:
    """Find every Auto class that knows this family, and the class that it takes."""
    found = {}
    for auto in dir(transformers):
        mapping = auto.startswith("AutoModel") and getattr(transformers, auto)._model_mapping
        if mapping and config in mapping:
            known = mapping[config]
            several = known if isinstance(known, tuple | list) else (known,)
            found[auto] = kind if kind in several else several[0]
    return found
