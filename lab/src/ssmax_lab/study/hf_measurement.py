"""Any causal model of Transformers as it is measured: its own tokenizer, text in its tokens."""

import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ssmax._device import select_device
from ssmax._extras import require
from ssmax.errors import UsageError
from ssmax.hf.adapter import check_base
from ssmax_lab.data.preparation import text_to_measure
from ssmax_lab.data.shards import ShardSet
from ssmax_lab.data.tokenizer import FILE, load_tokenizer
from ssmax_lab.model.hf_causal_lm import HFCausalLM, causal_config, load_causal
from ssmax_lab.records import config_hash
from ssmax_lab.study.measurement import Measurement, weights_hash

LONGEST_USUAL = 1024
SAMPLE = "".join(map(chr, range(32, 0x250))) + inspect.cleandoc(inspect.__doc__ or "")
"""Text that distinguishes two tokenizers."""


def hf_tokenizer(source: str) -> str:
    """Find a model's tokenizer.json."""
    utilities = require(
        "transformers.utils", install="ssmax-lab[hf]", purpose="reading a tokenizer"
    )
    try:
        return utilities.cached_file(source, FILE)
    except OSError as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise UsageError(
            f"{source!r} gives no {FILE} ({first}), so that no text can be put into its tokens; "
            "give --tokenizer, a name or the path of one"
        ) from None


def hf_measurements(
    sources: Sequence[str],
    adapter: Path | None,
    *,
    tokenizer: str | None,
    text: Path | Callable[[str], Path],
    results: Path,
    device: str | None,
) -> Iterator[Measurement]:
    """Load one model after the other, so that one at a time is in memory.

    An adapter's base comes without it first. `text` is a folder of prepared tokens, or finds one
    for a tokenizer.
    """
    models: list[tuple[str, Path | None]] = [(source, None) for source in sources]
    if adapter is not None:
        models.append((sources[0], adapter))
    names = _names(models)
    # Before its tokenizer is missed, and before another is measured for hours.
    configs = [causal_config(source) for source in sources]
    if adapter is not None:
        check_base(adapter, sources[0], configs[0])
    tokenizer = tokenizer or hf_tokenizer(sources[0])
    for source in sources[1:]:
        check_same_tokens(source, tokenizer)
    data = text if isinstance(text, Path) else text(tokenizer)
    for (source, used), name in zip(models, names, strict=True):
        yield _measurement(source, used, name, tokenizer, data, results, device)


def _names(models: Sequence[tuple[str, Path | None]]) -> list[str]:
    """Name models in records: a folder by its name, and the one around it where two share it."""
    paths = [Path(source).resolve() for source, _ in models]
    short = [
        (path.name if path.exists() else source) + (f"+{used.resolve().name}" if used else "")
        for (source, used), path in zip(models, paths, strict=True)
    ]
    names = [
        f"{path.parent.name}/{name}" if short.count(name) > 1 and path.exists() else name
        for name, path in zip(short, paths, strict=True)
    ]
    if len(set(names)) < len(names):
        raise UsageError(f"two models are called {max(short, key=short.count)!r}; rename one")
    return names


def _measurement(
    source: str,
    adapter: Path | None,
    name: str,
    tokenizer: str,
    data: Path,
    results: Path,
    device: str | None,
) -> Measurement:
    """Load a model from a folder or the Hub, with an adapter's s where one is given."""
    here = select_device(device)
    loaded = load_tokenizer(tokenizer)
    model = load_causal(source, adapter, dtype="auto")
    weights = weights_hash(model)
    model.to(here)
    config = model.config.get_text_config()
    if loaded.vocabulary.size > config.vocab_size:
        raise UsageError(
            f"the tokenizer {tokenizer} has {loaded.vocabulary.size:,} tokens, the model "
            f"{config.vocab_size:,}; give the model's own"
        )
    first = _first_token(tokenizer)
    measured = Measurement(
        model=HFCausalLM(model, first=first),
        tokenizer=loaded,
        run=name,
        identity={
            "source": source,
            "adapter": None if adapter is None else str(adapter),
            "weights": weights,
            "model": model.config.to_dict(),
            "dtype": str(model.dtype),
            "tokenizer": loaded.vocabulary.hash,
            "transformers": importlib.metadata.version("transformers"),
        },
        shards=ShardSet.open(text_to_measure(data, is_for_tests=True)),
        results=results,
        device=here,
        usual_length=min(LONGEST_USUAL, getattr(config, "max_position_embeddings", 8192) // 8),
        first=first,
        model_hash=config_hash({"weights": weights, "model": _itself(model.config)}),
    )
    measured.check(
        tokenizer, otherwise=", or give the file that they were made with as --tokenizer"
    )
    return measured


def _itself(config: Any) -> dict[str, Any]:
    """Describe a config without where it was and what read it."""
    elsewhere = ("_name_or_path", "transformers_version")
    return {key: value for key, value in config.to_dict().items() if key not in elsewhere}


def check_same_tokens(source: str, tokenizer: str) -> None:
    """Refuse a model that reads other tokens: their losses cannot be compared."""
    try:
        own = load_tokenizer(hf_tokenizer(source))
    except UsageError:
        return
    ours = load_tokenizer(tokenizer)
    same_size = own.vocabulary.size == ours.vocabulary.size
    if not same_size or own.encode(SAMPLE) != ours.encode(SAMPLE):
        raise UsageError(
            f"{source!r} reads other tokens than {tokenizer}, so that their numbers cannot stand "
            "side by side; measure it alone, with --results of its own"
        )


def _first_token(tokenizer: str) -> int | None:
    """Find the token that a tokenizer.json puts before every text."""
    path = Path(tokenizer) / FILE if Path(tokenizer).is_dir() else Path(tokenizer)
    if not path.is_file():
        return None
    tokenizers = require("tokenizers", install="ssmax-lab", purpose="reading a tokenizer")
    made = tokenizers.Tokenizer.from_file(str(path))
    with_specials, bare = (made.encode("a", add_special_tokens=add).ids for add in (True, False))
    return with_specials[0] if with_specials[:1] != bare[:1] else None
