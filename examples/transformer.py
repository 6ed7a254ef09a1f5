"""SSMax in a transformer of a hundred lines: three lines are new, marked so.

    python examples/transformer.py            # trains both on Python's own sources, a minute or so
    python examples/transformer.py --steps 20

It prints the loss of softmax and of SSMax at the training length and at four times that.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from ssmax import initial_s, ssmax_attention  # new
from ssmax_lab.data.sources import embedded_documents

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 4, 2, 32


class Attention(nn.Module):
    def __init__(self, is_ssmax: bool) -> None:
        super().__init__()
        self.is_ssmax = is_ssmax
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.s = nn.Parameter(torch.full((HEADS,), initial_s(LENGTH)))  # new

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.is_ssmax:
            mixed = ssmax_attention(q, k, v, self.s, is_causal=True)  # new
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, is_ssmax: bool) -> None:
        super().__init__()
        self.attention = Attention(is_ssmax)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.before_attention, self.before_feed_forward = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.feed_forward(self.before_feed_forward(x))


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out. Without positions: order comes of the causal mask."""

    def __init__(self, is_ssmax: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        # The two bytes before, so that the first layer knows where it is.
        self.before = nn.Conv1d(WIDTH, WIDTH, kernel_size=3, padding=2, groups=WIDTH)
        self.blocks = nn.ModuleList(Block(is_ssmax) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.before(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, text, starts, length):
    rows = torch.stack([text[start : start + length + 1] for start in starts])
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    raw = "".join(document.text for document in embedded_documents()).encode()[: 1 << 21]
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    seen, unseen = text[: -(1 << 17)], text[-(1 << 17) :]
    for is_ssmax in (False, True):
        torch.manual_seed(0)
        model = Transformer(is_ssmax)
        matrices = [weight for weight in model.parameters() if weight.dim() > 1]
        others = [weight for weight in model.parameters() if weight.dim() < 2]  # s among them
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        name = "ssmax" if is_ssmax else "softmax"
        for step in range(steps):
            loss = loss_of(model, seen, torch.randint(len(seen) - LENGTH - 1, (BATCH,)), LENGTH)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 99:
                print(f"{name:8} step {step + 1:4}  loss {loss.item():.3f}")
        with torch.no_grad():
            starts = torch.arange(0, len(unseen) - 4 * LENGTH - 1, 4096)
            inside, beyond = (loss_of(model, unseen, starts, n) for n in (LENGTH, 4 * LENGTH))
        print(f"{name:8} loss at {LENGTH}: {inside:.3f}, at {4 * LENGTH}: {beyond:.3f}")


if __name__ == "__main__":
    main()
