"""Convert a pretrained Hugging Face model and train nothing but s and b.

    python examples/train_only_s.py                     # a small Llama that comes with the package
    python examples/train_only_s.py MODEL --length 2048 # yours: a folder, or a name on the Hub

A few numbers learn, at four times the length that the model was trained at; all else stays. A MODEL
that is converted already goes on with its own. It prints the loss of text that neither s nor the
small models have seen, before and after; s and b go to the folder adapter.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import ssmax.hf
from hugging_face import is_converted, load, run, text_rows, tokenizer_of, write_model
from ssmax_lab.model.hf_causal_lm import HFCausalLM


def loss_of(model, rows) -> float:
    """The mean of all rows; a row longer than the model's positions is refused."""
    measured = HFCausalLM(model)
    return torch.cat([measured.losses(row[None]) for row in rows]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="by default tiny-a, as Llama")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="adapter")
    asked = parser.parse_args()
    source = asked.model or write_model("tiny-a", Path(tempfile.mkdtemp()) / "tiny-a", theta=1.6e5)
    torch.manual_seed(0)
    model = load(source)
    encode = tokenizer_of(source).encode
    seen = text_rows(encode, "train", length=asked.length, count=160)
    held_out = text_rows(encode, "validation", length=asked.length, count=40)
    before = loss_of(model, held_out)

    if not is_converted(model):
        ssmax.hf.convert(model)  # s = 0, b = 1: the same model, until it is trained
    ssmax.hf.verify(model)
    ssmax.hf.freeze_all_but_ssmax(model)
    groups = ssmax.hf.param_groups(model, lr=0.0, ssmax_lr=1e-3)  # nothing is left for lr
    optimizer = torch.optim.AdamW(groups)
    learning = sum(weight.numel() for group in groups for weight in group["params"])
    print(f"{learning} numbers learn; loss before {before:.4f}")
    for step in range(asked.steps):
        batch = seen[torch.randint(len(seen), (4,))]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1:4}  loss {loss.item():.4f}")
    print(f"loss after {loss_of(model, held_out):.4f}")

    ssmax.hf.save(model, asked.out)
    base = load(source)
    # An adapter is for softmax.
    again = ssmax.hf.load(ssmax.hf.revert(base) if is_converted(base) else base, asked.out)
    same = torch.equal(again(held_out[:1]).logits, model(held_out[:1]).logits)
    print(f"{asked.out}: loaded onto the base again, {'the same' if same else 'another'} model")


if __name__ == "__main__":
    run(main)
