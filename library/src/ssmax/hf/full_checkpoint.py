"""Loading a converted model from a folder of save_pretrained, s and b included or not at all."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.hf.adapter import check_tensors_finite, ssmax_tensors
from ssmax.hf.conversion import Conversion, attach, check_tensors_fit
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.layers import module_device
from ssmax.hf.sources import check_source, converted_already, read_by_transformers, whole_files
from ssmax.hf.written_config import CLASS_PREFIX, KEY, TYPE_PREFIX, OwnType


class Converted:
    """Mixed into a class of Transformers: converts the model as it is built, as its config says.

    So the checkpoint's s and b find their places, which are float32. One that is missing is an
    error: Transformers itself would leave it uninitialised.
    """

    base_model_prefix: str

    # Types in a comment: vLLM's Transformers backend reads the annotations of a model's __init__
    # and calls isinstance on them, which typing.Any refuses.
    def __init__(self, config, *arguments, **options):
        # type: (Any, *Any, **Any) -> None
        super().__init__(config, *arguments, **options)  # pyright: ignore[reportCallIssue]
        model: Any = self
        where = f"the {KEY!r} of its config"
        record = Conversion.from_dict(getattr(config, KEY, None), where=where)
        prefix = f"{self.base_model_prefix}."
        known = dict(model.named_modules())
        # A head may stand before the model that was saved, or may have been left out.
        layers = [
            next((one for one in (name, name.removeprefix(prefix), prefix + name) if one in known),
                 name)
            for name in record.layers
        ]  # fmt: skip
        attach(model, dataclasses.replace(record, layers=tuple(layers)), from_where=where)

    @classmethod
    def from_pretrained(cls, folder: Any, *arguments: Any, **options: Any) -> Any:
        """Load it; raise where an s or b is missing, too many or of another shape."""
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
        names = model.config.architectures or []
        is_same = plain.__name__ in [name.removeprefix(CLASS_PREFIX) for name in names]
        missing = [name for name in about["missing_keys"] if is_same or f".{ATTRIBUTE}." in name]
        extra = [name for name in about["unexpected_keys"] if f".{ATTRIBUTE}." in name]
        shapes = [
            each
            for each in about["mismatched_keys"]
            if not may_differ or f".{ATTRIBUTE}." in each[0]
        ]
        check_tensors_fit(folder, missing, extra, shapes)
        _read_as_it_is(model)
        return (model, about) if wants_about else model


class _ReadAsPlain(OwnType):
    """Mixed into a class of configs: what it reads is of that class, as before the conversion."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Read it; the code in the folder, which would not be saved again, is left out."""
        names = [name.removeprefix(CLASS_PREFIX) for name in config_dict.get("architectures") or []]
        values = {key: value for key, value in config_dict.items() if key != "auto_map"}
        found = super().from_dict(  # pyright: ignore[reportAttributeAccessIssue]
            {**values, "architectures": names}, **options
        )
        config = found[0] if isinstance(found, tuple) else found
        config.__class__ = cls.__bases__[1]
        return found


def _read_as_it_is(model: Any) -> None:
    """Undo the dtype, the model's, that Transformers up to 5.8 notes for all that stays on disk."""
    for name, parameter in model.named_parameters():
        if f".{ATTRIBUTE}." in name:
            hook = getattr(model.get_submodule(name.rpartition(".")[0]), "_hf_hook", None)
            loader = getattr(getattr(hook, "weights_map", None), "dataset", None)
            index = getattr(loader, "index", {})
            if name in index:
                index[name]["dtype"] = str(parameter.dtype).removeprefix("torch.")


def from_pretrained(folder: str | Path, **options: Any) -> Any:
    """Load what `save_pretrained` wrote after a conversion; options are those of Transformers.

    The class is the one that was saved. An s that is missing is an error that names the layer.
    Transformers' own `AutoModel` refuses the folder, whose type it does not know.
    """
    transformers = require("transformers", install="ssmax[hf]", purpose="ssmax.hf.from_pretrained")
    home = Path(folder, options["subfolder"]) if options.get("subfolder") else folder
    check_source(
        home,
        of_an_adapter="load that with Transformers, then its s and b with "
        f"ssmax.hf.load(model, {str(home)!r})",
    )
    with read_by_transformers(folder):
        values, _ = transformers.PretrainedConfig.get_config_dict(folder, **options)
    if KEY not in values:
        raise UsageError(
            f"{folder} holds no converted model: its config.json has no {KEY!r}; convert it with "
            f"ssmax convert {folder} OUT, or load it with Transformers, then an adapter with "
            "ssmax.hf.load"
        )
    # Before weights are read, and by the file's name.
    Conversion.from_dict(values[KEY], where=f"the {KEY!r} of {Path(folder, 'config.json')}")
    name = (values.get("architectures") or [""])[0].removeprefix(CLASS_PREFIX)
    kind = getattr(transformers, name, None)
    model_type = values.get("model_type", "").removeprefix(TYPE_PREFIX)
    if kind is None or model_type not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{folder} names the class {name!r}, which this Transformers does not have; "
            "remote code has to be converted after loading: ssmax.hf.load"
        )
    plain = transformers.CONFIG_MAPPING[model_type]
    if isinstance(options.get("config"), transformers.PretrainedConfig):
        given: Any = copy.deepcopy(options["config"])
        setattr(given, KEY, values[KEY])
        given.architectures = [name]
        options["config"] = given
    reading = type(plain.__name__, (_ReadAsPlain, plain), {"__module__": plain.__module__})
    loading: Any = type(kind.__name__, (Converted, kind), {"config_class": reading})
    with read_by_transformers(folder), whole_files(folder):
        loaded = loading.from_pretrained(folder, **options)
    model = loaded[0] if options.get("output_loading_info") else loaded
    # There a model has shapes and no values.
    if module_device(model).type != "meta":
        check_tensors_finite(folder, ssmax_tensors(model))
    model.__class__ = kind
    return loaded


def load_source(source: str | Path, *, may_be_converted: bool = False, dtype: Any = "auto") -> Any:
    """Load a model by the class that was saved, a converted one only where it may be."""
    transformers = require("transformers", install="ssmax[hf]", purpose="loading a model")
    with read_by_transformers(source):
        values, _ = transformers.PretrainedConfig.get_config_dict(source)
        if KEY in values and may_be_converted:
            return from_pretrained(source, dtype=dtype)
        if KEY in values:
            raise converted_already(source)
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    names = config.architectures or [""]
    kind = getattr(transformers, names[0], None) or transformers.AutoModelForCausalLM
    return load_plain(kind, source, dtype=dtype)


def load_plain(kind: Any, source: str | Path, **options: Any) -> Any:
    """Load by `kind.from_pretrained`; raise on an s that it finds no place for."""
    # Not left open: Transformers would ask on the terminal, and wait.
    options = {"trust_remote_code": False, **options}
    with read_by_transformers(source), whole_files(source):
        model, about = kind.from_pretrained(source, output_loading_info=True, **options)
    left_over = sorted(about["unexpected_keys"])
    # A rule that learns nothing leaves no tensors, but a config that names it.
    if hasattr(model.config, KEY) or any(f".{ATTRIBUTE}." in name for name in left_over):
        raise converted_already(source)
    sounds = ("ssmax", "softmax_scale")
    like_s = [name for name in left_over if any(word in name.lower() for word in sounds)]
    if like_s:
        raise UsageError(
            f"{source} holds {like_s[0]}, which sounds like an s by another name and would be "
            "lost; load the model in Python, convert it with init='paper' and copy it into the s "
            "of every layer, <attention>.ssmax.s"
        )
    return model
