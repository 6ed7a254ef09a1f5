"""Convert a pretrained Hugging Face model and train nothing but s and b.

    python examples/train_only_s.py                     # a small Llama that comes with the package
    python examples/train_only_s.py MODEL --length 2048 # yours: a folder, or a name on the Hub

A few numbers learn, at four times the length that the model was trained at; all else stays.
It prints the loss of text that s has not seen, before and after; s and b go to the folder adapter.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import transformers

import ssmax.hf
from hugging_face import text_tokens, tokenizer_of, write_model


def loss_of(model, rows) -> float:
    with torch.no_grad():
        return sum(model(row[None], labels=row[None]).loss.item() for row in rows) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="by default tiny-a, as Llama")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="adapter")
    asked = parser.parse_args()
    source = asked.model or write_model("tiny-a", Path(tempfile.mkdtemp()) / "tiny-a", theta=1.6e5)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    tokens = text_tokens(tokenizer_of(source).encode, 200 * asked.length)
    seen, held_out = torch.tensor(tokens).view(200, -1).split([160, 40])
    before = loss_of(model, held_out)

    ssmax.hf.convert(model)  # s = 0, b = 1: the same model, until it is trained
    ssmax.hf.verify(model)
    ssmax.hf.freeze_all_but_ssmax(model)
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=0.01)
    print(f"{sum(weight.numel() for weight in learning)} numbers learn; loss before {before:.4f}")
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
    again = ssmax.hf.load(transformers.AutoModelForCausalLM.from_pretrained(source), asked.out)
    same = torch.equal(again(held_out[:1]).logits, model(held_out[:1]).logits)
    print(f"{asked.out}: loaded onto the base again, {'the same' if same else 'another'} model")


if __name__ == "__main__":
    main()
