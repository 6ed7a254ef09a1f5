"""Needle in a haystack for any Hugging Face model: context size by depth, as a heat map.

    python examples/needle_map.py                      # softmax and SSMax, as the package has them
    python examples/needle_map.py MODEL --length 1024 --length 2048 --digits 7

A number is hidden in text and asked for; a converted MODEL answers with its s. The map goes to
needle_map.svg.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hugging_face import load, run, text_tokens, tokenizer_of, write_model
from ssmax_lab.eval.retrieval import accuracy, measure_retrieval
from ssmax_lab.model.hf_causal_lm import HFCausalLM
from ssmax_lab.records import Provenance
from ssmax_lab.report.figures import figure6
from ssmax_lab.report.style import as_svg


def names_of(models: Sequence[str | Path]) -> list[str]:
    """The end of every path, as long as it has to be to tell them apart."""
    paths = [Path(model).resolve().parts for model in models]
    if len(set(paths)) < len(paths):
        twice = models[paths.index(max(paths, key=paths.count))]
        raise ValueError(
            f"every model is measured once, and {twice} was given twice; leave one out"
        )
    length, names = 1, [path[-1] for path in paths]
    while len(set(names)) < len(names):
        length += 1
        names = ["/".join(path[-length:]) for path in paths]
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="by default tiny-a-qa and tiny-b-qa, theta x 16")
    parser.add_argument("--length", type=int, action="append", help="of a context; repeatable")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--digits", type=int, default=4)
    asked = parser.parse_args()
    lengths = asked.length or [64, 128, 192, 256]
    scratch = Path(tempfile.mkdtemp())
    models = asked.models or [
        write_model(name, scratch / name, theta=1.6e5) for name in ("tiny-a-qa", "tiny-b-qa")
    ]
    found = {}
    for name, source in zip(names_of(models), models, strict=True):
        model, tokenizer = load(source), tokenizer_of(source)
        found[name] = measure_retrieval(
            HFCausalLM(model),
            tokenizer,
            text_tokens(tokenizer.encode, "validation", 100_000),
            run=name,
            lengths=lengths,
            depths=np.linspace(0, 1, asked.depths).tolist(),
            trials=asked.trials,
            digits=asked.digits,
            seed=0,
            # A file of its own: what a file holds under a name is not measured again.
            out=scratch / f"needle-{len(found)}.jsonl",
            provenance=Provenance.here(
                config={**vars(asked), "model": str(source)}, device="cpu", seed=0
            ),
        )
        for length in lengths:
            here = [trial for trial in found[name] if trial.length == length]
            print(f"{name}  context {length:5}  whole number {accuracy(here):.2f}")
    Path("needle_map.svg").write_text(as_svg(figure6(found)))
    print("the map: needle_map.svg")


if __name__ == "__main__":
    run(main)
