"""What the Hugging Face examples share; those scripts need this file beside them.

Models to try things on without a download (softmax becomes Llama, SSMax stock Ministral 3; any
model of yours goes in their place), how a model is loaded, and a text to measure it with.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ssmax.export import export
from ssmax_lab.data.preparation import prepare
from ssmax_lab.data.shards import ShardSet
from ssmax_lab.data.tokenizer import Tokenizer, load_tokenizer
from ssmax_lab.model import to_llama_weights
from ssmax_lab.model.hf_causal_lm import load_causal
from ssmax_lab.model.llama import save_as_llama
from ssmax_lab.study.hf_measurement import hf_tokenizer
from ssmax_lab.tiny import run_folder
from ssmax_lab.train.run import load_run_model, load_run_tokenizer


def write_model(run: str, folder: Path, *, theta: float = 10_000.0) -> Path:
    """What comes with the package as `run`, in Transformers' form, with its tokenizer."""
    model = load_run_model(run_folder(run)).eval()
    model.theta = theta
    tokenizer = load_run_tokenizer(run_folder(run))
    if model.config.rule == "softmax":
        weights, config = to_llama_weights(model)
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        llama.load_state_dict(weights)
        llama.save_pretrained(folder)
        assert tokenizer.definition is not None
        (folder / "tokenizer.json").write_text(tokenizer.definition)
        transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
        ).save_pretrained(folder)
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        end = tokenizer.vocabulary.end_of_document
        save_as_llama(
            model,
            Path(scratch, "llama"),
            tokenizer=tokenizer.definition,
            end=(end, tokenizer.decode([end])),
        )
        export(Path(scratch, "llama"), folder, to="ministral")
    return folder


def load(source: str | Path) -> Any:
    """A model from a folder or the Hub, a converted one with its s.

    Transformers' own AutoModel has no place for s, and refuses a converted one.
    """
    return load_causal(source)


def is_converted(model: Any) -> bool:
    """True where a loaded model brought its s along."""
    return hasattr(model.config, "ssmax")


def tokenizer_of(source: str | Path) -> Tokenizer:
    """That of a folder, or of a name on the Hub."""
    return load_tokenizer(hf_tokenizer(str(source)))


def text_tokens(encode: Callable[[str], list[int]], side: str, count: int) -> list[int]:
    """At most so many tokens of Python's own sources, as a tokenizer cuts them.

    The side "train" is what the package's models were trained on; "validation" they never saw.
    """
    tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        # A text's hash decides its side, whatever the tokenizer; bytes are the quickest.
        prepare("embedded", folder, tokenizer="bytes", workers=1)
        shards, as_bytes = ShardSet.open(Path(folder, side)), load_tokenizer("bytes")
        for number in range(shards.num_documents):
            if len(tokens) < count:
                tokens += encode(as_bytes.decode(shards.document(number).tolist()))
    return tokens[:count]


def text_rows(encode: Callable[[str], list[int]], side: str, *, length: int, count: int) -> Tensor:
    """Rows of so many tokens, at most `count` of them: fewer where the text ends."""
    tokens = text_tokens(encode, side, count * length)
    if len(tokens) < length:
        raise ValueError(
            f"the {side} text has {len(tokens):,} tokens, too few for a row of {length:,}; "
            "ask for a shorter --length"
        )
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def run(main: Callable[[], None]) -> None:
    """A script, whose mistakes of the caller's are one line and no traceback."""
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
