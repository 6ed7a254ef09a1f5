"""A whole converted model from a folder of save_pretrained, s and b included or not at all."""

from pathlib import Path
from typing import Any

from ssmax._extras import require
from ssmax.hf.conversion import KEY, Conversion, attach, refuse_misfits
from ssmax.hf.hook import ATTRIBUTE

TYPE_PREFIX, CLASS_PREFIX = "ssmax_", "SSMax"
"""Before the model's type and the names of its classes, in remote code."""
# Where a file is looked for, which a config and its weights share.
_PLACE = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
)  # fmt: skip


class Converted:
    """In front of a class of Transformers: converted as soon as it is built, as its config says.

    So the checkpoint's s and b find their places, which are float32. One that is missing is an
    error: Transformers itself would leave it uninitialised.
    """

    base_model_prefix: str

    def __init__(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)  # pyright: ignore[reportCallIssue]
        values, prefix = getattr(config, KEY), f"{self.base_model_prefix}."
        known = dict(self.named_modules())
        # A head may stand before the model that was saved, or may have been left out.
        layers = [
            next((one for one in (name, name.removeprefix(prefix), prefix + name) if one in known),
                 name)
            for name in values["layers"]
        ]  # fmt: skip
        attach(self, Conversion.from_dict({**values, "layers": layers}))

    @classmethod
    def from_pretrained(cls, folder: Any, *arguments: Any, **options: Any) -> Any:
        """As Transformers', but for an s or b that is missing, too many or of another shape."""
        wants_about = options.pop("output_loading_info", False)
        may_differ = options.pop("ignore_mismatched_sizes", False)
        # Transformers renames weights by the name of the class, and none of remote code's.
        plain: Any = next(one for one in cls.__mro__ if one.__module__.startswith("transformers."))
        own = {"__module__": plain.__module__, "config_class": getattr(cls, "config_class", None)}
        loading: Any = type(plain.__name__, (Converted, plain), own)
        read: Any = super(Converted, loading)
        model, about = read.from_pretrained(
            folder, *arguments, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        model.__class__ = cls
        # The class that was saved has all of its weights there; another may have a head of its own.
        is_same = plain.__name__ in [
            name.removeprefix(CLASS_PREFIX) for name in model.config.architectures or []
        ]
        missing = [name for name in about["missing_keys"] if is_same or f".{ATTRIBUTE}." in name]
        extra = [name for name in about["unexpected_keys"] if f".{ATTRIBUTE}." in name]
        shapes = [
            each
            for each in about["mismatched_keys"]
            if not may_differ or f".{ATTRIBUTE}." in each[0]
        ]
        refuse_misfits(folder, missing, extra, shapes)
        _read_as_it_is(model)
        return (model, about) if wants_about else model


def _read_as_it_is(model: Any) -> None:
    """Transformers up to 5.8 at least notes the model's dtype for all that it leaves on disk."""
    for name, parameter in model.named_parameters():
        if f".{ATTRIBUTE}." in name:
            hook = getattr(model.get_submodule(name.rpartition(".")[0]), "_hf_hook", None)
            loader = getattr(getattr(hook, "weights_map", None), "dataset", None)
            index = getattr(loader, "index", {})
            if name in index:
                index[name]["dtype"] = str(parameter.dtype).removeprefix("torch.")


def from_pretrained(folder: str | Path, **options: Any) -> Any:
    """The model that `save_pretrained` wrote after a conversion; options are Transformers'.

    The class is the one that was saved. An s that is missing is an error that names the layer:
    Transformers itself would leave it uninitialised, or load plain softmax without a word.
    """
    transformers = require("transformers", extra="hf", purpose="ssmax.hf.from_pretrained")
    place = {name: options[name] for name in _PLACE if name in options}
    config, kind = _config_and_class(transformers, folder, place)
    loading = type(kind.__name__, (Converted, kind), {})
    loaded = loading.from_pretrained(folder, config=config, **options)
    model = loaded[0] if options.get("output_loading_info") else loaded
    model.__class__ = kind
    return loaded


def _config_and_class(transformers: Any, folder: str | Path, place: dict[str, Any]) -> Any:
    """As they were before remote code gave them names of its own."""
    values, _ = transformers.PretrainedConfig.get_config_dict(folder, **place)
    if KEY not in values:
        raise ValueError(
            f"{folder} holds no converted model: its config.json has no {KEY!r}; load it with "
            "Transformers, then an adapter with ssmax.hf.load, or an s of another name with "
            "ssmax.hf.adopt"
        )
    names = [name.removeprefix(CLASS_PREFIX) for name in values.get("architectures") or [""]]
    kind = getattr(transformers, names[0], None)
    model_type = values.get("model_type", "").removeprefix(TYPE_PREFIX)
    if kind is None or model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{folder} names the class {names[0]!r}, which this Transformers does not have; "
            "remote code has to be converted after loading: ssmax.hf.load"
        )
    # The remote code would not be saved with the model again.
    plain = {key: value for key, value in values.items() if key != "auto_map"}
    config = transformers.CONFIG_MAPPING[model_type].from_dict({**plain, "model_type": model_type})
    config.architectures = names
    return config, kind
