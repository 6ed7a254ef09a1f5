"""The loss at every position of any Hugging Face model, before and after its conversion.

    python examples/position_loss.py                                   # tiny-a, as Llama
    python examples/position_loss.py MODEL --train-length 1024 --length 4096

Nothing is trained: `clamp` leaves the model as it is up to the training length and sharpens its
attention beyond. A MODEL that is converted already is measured without its s and with it. The
figure goes to position_loss.svg.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy as np

import ssmax.hf
from hugging_face import is_converted, load, run, text_rows, tokenizer_of, write_model
from ssmax_lab.eval.position_loss import measure_position_loss
from ssmax_lab.model.hf_causal_lm import HFCausalLM
from ssmax_lab.records import Provenance
from ssmax_lab.report.figures import figure5
from ssmax_lab.report.style import as_svg


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="by default tiny-a, as Llama")
    parser.add_argument("--train-length", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--documents", type=int, default=32, help="at most; fewer if text ends")
    asked = parser.parse_args()
    source = asked.model or write_model("tiny-a", Path(tempfile.mkdtemp()) / "tiny-a", theta=1.6e5)
    model = load(source)
    encode = tokenizer_of(source).encode
    rows = text_rows(encode, "validation", length=asked.length + 1, count=asked.documents)

    def measured(name: str):
        here = Provenance.here(config=vars(asked), device="cpu", seed=0)
        return measure_position_loss(HFCausalLM(model), rows, run=name, provenance=here, batch=8)

    if not is_converted(model):
        ssmax.hf.convert(model, rule="clamp", train_length=asked.train_length)
    after = measured("after")
    ssmax.hf.revert(model)
    before = measured("before")
    print(f"{before.count} documents")
    print("positions        before   after")
    for index, (start, stop) in enumerate(itertools.pairwise(before.edges)):
        losses = (np.mean([row[index] for row in record.binned]) for record in (before, after))
        print(f"{start:6} to {stop:5}  {'  '.join(f'{loss:7.4f}' for loss in losses)}")
    figure = figure5(
        {"": {"before": {0: before}, "after": {0: after}}}, train_length=asked.train_length
    )
    Path("position_loss.svg").write_text(as_svg(figure))
    print("the figure: position_loss.svg")


if __name__ == "__main__":
    run(main)
