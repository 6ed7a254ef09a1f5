"""`ssmax convert`: a Hugging Face model in, a converted one out."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from ssmax._extras import require
from ssmax.data.tokenizer import FILE
from ssmax.tiny import run_folder
from ssmax.train.journal import JOURNAL


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
    strict: bool,
    as_json: bool,
) -> None:
    """Load, convert, verify, save; say what was done."""
    transformers = require("transformers", extra="hf", purpose="ssmax convert")
    import ssmax.hf
    from ssmax.hf.full_checkpoint import CLASS_PREFIX
    from ssmax.hf.sources import check_source
    from ssmax.hf.verification import UnverifiedError

    has_code = remote_code or strict
    if adapter and has_code:
        raise ValueError("--adapter writes s and b alone, without a model for --remote-code")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; give another one")
    if (run_folder(source) / JOURNAL).is_file():
        raise ValueError(
            f"{source} is a run; ssmax export {source} OUT --to hf makes a Hugging Face model of it"
        )
    check_source(source, of_an_adapter="give that model itself to ssmax convert")
    model = _load(transformers, source)
    # One that came with an s by another name has been given its place.
    if not hasattr(model.config, "ssmax"):
        choice: Any = {"rule": rule, "init": init, "layers": layers, "attention": attention}
        ssmax.hf.convert(model, train_length=train_length, bias=bias, **choice)
    elif not as_json:
        print(f"{source} carries an s, which is kept; the options that choose one are not used")
    unverified, about = "", {"layers": len(model.config.ssmax["layers"])}
    try:
        about = dataclasses.asdict(ssmax.hf.verify(model))
    except UnverifiedError as error:
        # Converted all the same: only somebody with its pictures or sounds can look.
        unverified = str(error)
    if adapter:
        ssmax.hf.save(model, out)
        how = f"ssmax.hf.load(base, {str(out)!r})"
    elif has_code:
        ssmax.hf.save_remote_code(model, out, strict=strict)
        known = json.loads((out / "config.json").read_text())["auto_map"]
        own = f".{CLASS_PREFIX}{type(model).__name__}"
        auto = next(name for name in known if known[name].endswith(own))
        how = (
            f"ssmax.hf.from_pretrained({str(out)!r}), which runs no code of the folder; people "
            f"without ssmax, with {auto}.from_pretrained({str(out)!r}, trust_remote_code=True)"
        )
    else:
        model.save_pretrained(out)
        how = f"ssmax.hf.from_pretrained({str(out)!r})"
    if not adapter:
        copy_tokenizer(transformers, source, out)
    total = sum(parameter.numel() for parameter in model.parameters())
    ours = sum(p.numel() for name, p in model.named_parameters() if ".ssmax." in name)
    if as_json:
        about |= {"verified": not unverified}
        print(json.dumps({"out": str(out), "learnt": ours, "parameters": total, **about}))
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
    from ssmax.hf.sources import not_loaded

    try:
        # Not left open: Transformers would ask on the terminal, and wait.
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        names = config.architectures or []
        kind = getattr(transformers, names[0], None) if names else None
        kind = kind or transformers.AutoModelForCausalLM
        return load_with_s(kind, source, dtype="auto")
    except OSError as error:
        raise not_loaded(source, error) from None
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{source!r} brings code of its own, which is not run here; load it with "
            "trust_remote_code=True, then ssmax.hf.convert and ssmax.hf.save"
        ) from None


def copy_tokenizer(transformers: Any, source: str, out: Path) -> None:
    """Where there is one."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError):
        return
    tokenizer.save_pretrained(out)
    if (Path(source) / FILE).is_file():
        # As it was: tokens that were prepared with it are known by its bytes.
        shutil.copyfile(Path(source) / FILE, out / FILE)
