"""A Hugging Face model to try things on, without a download: a run of the package as one.

Softmax becomes Llama, SSMax stock Ministral 3. Any model of yours goes in its place.
"""

from pathlib import Path

import transformers

from ssmax.data import load_tokenizer
from ssmax.data.embedded import embedded_documents
from ssmax.data.tokenizer import Tokenizer
from ssmax.lm import to_llama_weights
from ssmax.serve import export
from ssmax.study.hf_measurement import hf_tokenizer
from ssmax.tiny import run_folder
from ssmax.train import load_run_model, load_run_tokenizer


def write_model(run: str, folder: Path, *, theta: float = 10_000.0) -> Path:
    """What comes with the package as `run`, in Transformers' form, with its tokenizer.json."""
    model = load_run_model(run_folder(run)).eval()
    model.theta = theta
    definition = load_run_tokenizer(run_folder(run)).definition
    assert definition is not None
    if model.config.rule == "softmax":
        weights, config = to_llama_weights(model)
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        llama.load_state_dict(weights)
        llama.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(definition)
        transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
        ).save_pretrained(folder)
    else:
        export(model, folder, to="ministral", tokenizer=definition)
    return folder


def tokenizer_of(source: str | Path) -> Tokenizer:
    """That of a folder, or of a name on the Hub."""
    return load_tokenizer(hf_tokenizer(str(source)))


def text_tokens(encode, count: int) -> list[int]:
    """So many tokens of Python's own sources, as a tokenizer cuts them."""
    tokens: list[int] = []
    for document in embedded_documents():
        tokens += encode(document.text)
        if len(tokens) >= count:
            return tokens[:count]
    raise ValueError(f"the text ends after {len(tokens):,} tokens; ask for fewer than {count:,}")
