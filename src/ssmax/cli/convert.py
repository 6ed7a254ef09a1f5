"""`ssmax convert`: a Hugging Face model in, a converted one out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ssmax._extras import require


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
    as_json: bool,
) -> None:
    """Load, convert, verify, save; say what was done."""
    transformers = require("transformers", extra="hf", purpose="ssmax convert")
    import ssmax.hf

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; give another one")
    model = _load(transformers, source)
    choice: dict[str, Any] = {"rule": rule, "init": init, "layers": layers, "attention": attention}
    ssmax.hf.convert(model, train_length=train_length, bias=bias, **choice)
    verified = ssmax.hf.verify(model)
    if adapter:
        ssmax.hf.save(model, out)
    else:
        model.save_pretrained(out)
        copy_tokenizer(transformers, source, out)
    total = sum(parameter.numel() for parameter in model.parameters())
    ours = sum(p.numel() for name, p in model.named_parameters() if ".ssmax." in name)
    if as_json:
        about = dataclasses.asdict(verified)
        print(json.dumps({"out": str(out), "learnt": ours, "parameters": total, **about}))
        return
    print(
        f"{type(model).__name__}: {verified.layers} attention layers converted and verified, "
        f"{ours:,} of {total:,} parameters are s and b"
    )
    how = (
        f"ssmax.hf.load(base, {str(out)!r})"
        if adapter
        else f"ssmax.hf.from_pretrained({str(out)!r})"
    )
    print(f"{out}: load it with {how}")


def _load(transformers: Any, source: str) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        names = config.architectures or []
        kind = getattr(transformers, names[0], None) if names else None
        kind = kind or transformers.AutoModelForCausalLM
        return kind.from_pretrained(source, dtype="auto")
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{source!r} cannot be loaded: {first}") from None


def copy_tokenizer(transformers: Any, source: str, out: Path) -> None:
    """Where there is one."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError):
        return
    tokenizer.save_pretrained(out)
