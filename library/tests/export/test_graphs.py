"""One graph for prefill and decoding, any batch and length, padded or not."""

import itertools
import subprocess
import sys

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_llama import llama
from tiny_models import build, randomise, tokens_of

import ssmax.hf
from ssmax.export import export
from ssmax.export.graphs import graph_of
from ssmax.testing.budget import assert_no_worse_than

PADDING, PROMPT = 4, 37
TOKENS = tokens_of(batch=3, length=PADDING + 50)
# The first row is padded on the left, the others are not.
KEEP = torch.ones_like(TOKENS)
KEEP[0, :PADDING] = 0


def converted(name):
    return randomise(ssmax.hf.convert(build(name), layers="all"))


SOURCES = {
    "llama": lambda: converted("llama"),
    "llama, another rule": lambda: llama("sqrt_log"),
    "gpt2": lambda: converted("gpt2"),
    "gemma3 with QK-norm and windows": lambda: converted("gemma3"),
}


def by_onnxruntime(folder):
    onnxruntime = pytest.importorskip("onnxruntime")
    engine = onnxruntime.InferenceSession(folder / "model.onnx")
    inputs = engine.get_inputs()
    assert [entry.name for entry in inputs[:3]] == [
        "input_ids", "attention_mask", "past_key_values.0.key",
    ]  # fmt: skip

    def run(tokens, mask, past):
        values = zip(inputs, (tokens, mask, *past), strict=True)
        feed = {entry.name: value.numpy() for entry, value in values}
        logits, *present = map(torch.from_numpy, engine.run(None, feed))
        return logits, present

    return run


def prefilled_and_decoded(run, past):
    """A prompt of all rows at once, then token by token."""
    bounds = [0, PROMPT, *range(PROMPT + 1, TOKENS.shape[1] + 1)]
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        logits, past = run(TOKENS[:, start:stop], KEEP[:, :stop], past)
        pieces.append(logits)
    return torch.cat(pieces, 1)


def each_row_alone(model):
    """Row by row, without cache and padding."""
    rows = []
    for tokens, keep in zip(TOKENS, KEEP.bool(), strict=True):
        rows.append(model(tokens[keep].unsqueeze(0)).logits[0])
    return torch.cat(rows)


def compare(model, logits):
    eager = each_row_alone(model)
    exact = each_row_alone(model.double())
    assert_no_worse_than(logits[KEEP.bool()], eager, exact)


@torch.no_grad()
@pytest.mark.parametrize(
    "source", ["llama", pytest.param("llama, another rule", marks=pytest.mark.slow)]
)
def test_onnxruntime_computes_the_same_batched_padded_and_cached(source, tmp_path):
    model = SOURCES[source]()
    export(model, tmp_path / "out", to="onnx", prompt=TOKENS[0].tolist())
    past = graph_of(model).empty_past(batch=3)
    compare(model, prefilled_and_decoded(by_onnxruntime(tmp_path / "out"), past))


RELOAD = """
import sys
sys.modules["ssmax"] = sys.modules["transformers"] = None  # importing them fails
import torch
from safetensors.torch import load_file, save_file

prompt, folder = int(sys.argv[1]), sys.argv[2]
asked = load_file(folder + "/asked")
past = [asked[f"past.{i}"] for i in range(len(asked) - 2)]
model = torch.export.load(folder + "/model.pt2").module()
pieces = []
with torch.no_grad():
    bounds = [0, prompt, *range(prompt + 1, asked["tokens"].shape[1] + 1)]
    for start, stop in zip(bounds, bounds[1:]):
        logits, past = model(asked["tokens"][:, start:stop], asked["keep"][:, :stop], past)
        pieces.append(logits)
save_file({"logits": torch.cat(pieces, 1)}, folder + "/answered")
"""


@torch.no_grad()
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, marks=() if "gemma3" in source else pytest.mark.slow)
        for source in SOURCES
    ],
)
def test_a_program_of_torch_export_computes_the_same_in_a_fresh_process(source, tmp_path):
    """A process that has torch alone; here it takes a first prompt of any length."""
    model, folder = SOURCES[source](), tmp_path / "out"
    export(model, folder, to="torch-export", prompt=TOKENS[0].tolist())
    program, graph = torch.export.load(folder / "model.pt2").module(), graph_of(model)
    for length in range(1, 6):
        for batch in (1, 3):
            given = TOKENS[:batch, -length:], KEEP[:batch, -length:], graph.empty_past(batch=batch)
            torch.testing.assert_close(program(*given)[0], graph(*given)[0])
    past = {f"past.{i}": t for i, t in enumerate(graph.empty_past(batch=3))}
    save_file({"tokens": TOKENS, "keep": KEEP, **past}, folder / "asked")
    command = [sys.executable, "-c", RELOAD, str(PROMPT), str(folder)]
    subprocess.run(command, capture_output=True, check=True)
    compare(model, load_file(folder / "answered")["logits"])


@pytest.mark.parametrize(
    ("family", "layer"),
    [("jamba", "LinearAttentionLayer"), ("falcon_h1", "LinearAttentionAndFullAttentionLayer")],
)
def test_a_cache_of_more_than_keys_and_values_is_refused(family, layer):
    model = ssmax.hf.convert(families.build("causal", family))
    with pytest.raises(ValueError, match=rf"only keys and values .*\({layer}\); the form hf"):
        graph_of(model)
