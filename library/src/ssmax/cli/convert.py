"""`ssmax convert`: a Hugging Face model in, a converted one out."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ssmax._extras import require
from ssmax._files import check_empty, whole_folder
from ssmax.errors import UsageError
from ssmax.hf.choices import check_choice, check_layers
from ssmax.hf.sources import check_source, check_typed


def convert_shown(
    source: str,
    out: Path,
    *,
    rule: str,
    init: str,
    train_length: int | None,
    bias: bool | None,
    layers: str,
    attention: str,
    adapter: bool,
    remote_code: bool,
    opens_as_softmax: bool,
    as_json: bool,
) -> None:
    """Load, convert, verify, save; say what was done."""
    if adapter and remote_code:
        raise UsageError("--adapter writes s and b alone, without a model for --remote-code")
    if opens_as_softmax and not remote_code:
        raise UsageError("--opens-as-softmax is a choice of --remote-code; give both or neither")
    check_empty(out)
    # All that can be told before weights are read, which may take minutes.
    check_choice(rule, init, train_length, bias)
    check_layers(layers, attention)
    check_source(source, of_an_adapter="give that model itself to ssmax convert")
    check_typed(source)
    transformers = require("transformers", install="ssmax[hf]", purpose="ssmax convert")
    import ssmax.hf
    from ssmax.hf.inputs import copy_inputs
    from ssmax.hf.verification import UnverifiedError
    from ssmax.hf.written_config import CLASS_PREFIX

    model = _load(transformers, source)
    # One that came with an s by another name has been given its place.
    is_adopted = hasattr(model.config, "ssmax")
    if not is_adopted:
        choice: Any = {"rule": rule, "init": init, "layers": layers, "attention": attention}
        ssmax.hf.convert(model, train_length=train_length, bias=bias, **choice)
    else:
        print(
            f"{source} carries an s, which is kept; the options that choose one are not used",
            file=sys.stderr,
        )
    unverified, about = "", {"layers": len(model.config.ssmax["layers"])}
    try:
        about = dataclasses.asdict(ssmax.hf.verify(model))
    except UnverifiedError as error:
        # Converted all the same: only somebody with its pictures or sounds can look.
        unverified = str(error)
    how = f"ssmax.hf.from_pretrained({str(out)!r})"
    with whole_folder(out) as partial:
        if adapter:
            ssmax.hf.save(model, partial)
            how = f"ssmax.hf.load(base, {str(out)!r})"
        elif remote_code:
            ssmax.hf.save_remote_code(model, partial, opens_as_softmax=opens_as_softmax)
            known = json.loads((partial / "config.json").read_text())["auto_map"]
            own = f".{CLASS_PREFIX}{type(model).__name__}"
            auto = next(name for name in known if known[name].endswith(own))
            how += (
                ", which runs no code of the folder; people without ssmax who trust that code, "
                f"with {auto}.from_pretrained({str(out)!r}, trust_remote_code=True)"
            )
        else:
            model.save_pretrained(partial)
        if not adapter:
            copy_inputs(source, partial, model.config)
    total = sum(parameter.numel() for parameter in model.parameters())
    ours = sum(p.numel() for name, p in model.named_parameters() if ".ssmax." in name)
    if as_json:
        how_converted = {name: model.config.ssmax[name] for name in ("rule", "init")}
        about |= {"verified": not unverified, **how_converted, "adopted": is_adopted}
        print(json.dumps({"out": str(out), "learned": ours, "parameters": total, **about}))
        return
    print(
        f"{type(model).__name__}: {about['layers']} attention layers converted"
        f"{'' if unverified else ' and verified'}, {ours:,} of {total:,} parameters are s and b"
    )
    if unverified:
        print(f"not verified: {unverified}")
    print(f"{out}: load it with {how}")


def _load(transformers: Any, source: str) -> Any:
    from ssmax.hf.foreign import load_with_s
    from ssmax.hf.sources import converted_already, read_by_transformers
    from ssmax.hf.written_config import KEY

    with read_by_transformers(source):
        values, _ = transformers.PretrainedConfig.get_config_dict(source)
        if KEY in values:
            raise converted_already(source)
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    return load_with_s(kind or transformers.AutoModelForCausalLM, source, dtype="auto")
