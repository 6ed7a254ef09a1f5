"""Needle in a haystack for any Hugging Face model: context size by depth, as a heat map.

    python examples/needle_map.py                      # softmax and SSMax, as the package has them
    python examples/needle_map.py MODEL --length 1024 --length 2048 --digits 7

A number is hidden in text and asked for. The map goes to needle_map.svg.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import transformers

import ssmax.hf
from hugging_face import text_tokens, tokenizer_of, write_model
from ssmax.eval import measure_retrieval
from ssmax.eval.retrieval import accuracy
from ssmax.records import Provenance
from ssmax.report.figures import figure6
from ssmax.report.style import as_svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="by default tiny-a-qa and tiny-b-qa, theta x 16")
    parser.add_argument("--length", type=int, action="append", help="of a context; repeatable")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--digits", type=int, default=4)
    asked = parser.parse_args()
    lengths = asked.length or [64, 128, 192, 256]
    scratch = Path(tempfile.mkdtemp())
    models = asked.models or [
        write_model(run, scratch / run, theta=1.6e5) for run in ("tiny-a-qa", "tiny-b-qa")
    ]
    found = {}
    for source in models:
        model = transformers.AutoModelForCausalLM.from_pretrained(source)
        tokenizer = tokenizer_of(source)
        name = Path(source).name
        found[name] = measure_retrieval(
            ssmax.hf.CausalSubject(model),
            tokenizer,
            text_tokens(tokenizer.encode, 100_000),
            run=name,
            lengths=lengths,
            depths=np.linspace(0, 1, asked.depths).tolist(),
            trials=asked.trials,
            digits=asked.digits,
            seed=0,
            out=scratch / "needle.jsonl",
            provenance=Provenance.here(config=vars(asked), device="cpu", seed=0),
        )
        for length in lengths:
            here = [trial for trial in found[name] if trial.length == length]
            print(f"{name}  context {length:5}  whole number {accuracy(here):.2f}")
    Path("needle_map.svg").write_text(as_svg(figure6(found)))
    print("the map: needle_map.svg")


if __name__ == "__main__":
    main()
