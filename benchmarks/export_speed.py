"""What every exported form of a run does: tokens a second, prefilled and decoded, and agreement.

    PYTHONPATH=.venv/engines python benchmarks/export_speed.py RUN

llama.cpp is measured where `make test-engines` has built it. The best of three, on one thread;
onnxruntime takes the threads it wants.
"""

import argparse
import importlib.util
import itertools
import tempfile
import time
from pathlib import Path

import torch

from ssmax.export import export
from ssmax.export.graphs import graph_of
from ssmax.export.sessions import onnx_session, program_session, session
from ssmax_lab.data.sources import embedded_documents
from ssmax_lab.model.llama import as_llama
from ssmax_lab.train.run import load_run_model, load_run_tokenizer

PREFILLED, DECODED, REPEATS = 4096, 128, 3


def llama_cpp_session(path: Path):
    from llama_cpp import Llama

    engine = Llama(
        str(path), n_ctx=PREFILLED + DECODED, logits_all=True, verbose=False, n_threads=1,
        n_threads_batch=1, type_k=0, type_v=0,
    )  # fmt: skip

    def step(tokens):
        engine.eval(tokens[0].tolist())
        start = engine.n_tokens - tokens.shape[1]
        return torch.from_numpy(engine.scores[start : engine.n_tokens].copy()).unsqueeze(0)

    return step


def openings(model, folder: Path) -> dict:
    """Every form, ready to be opened anew."""
    from transformers import AutoModelForCausalLM

    import ssmax.hf

    past = graph_of(model).empty_past()
    forms = {
        "the source": lambda: session(model),
        "hf": lambda: session(ssmax.hf.from_pretrained(folder / "hf").eval()),
        "ministral": lambda: session(AutoModelForCausalLM.from_pretrained(folder / "ministral")),
        "onnx": lambda: onnx_session(folder / "onnx" / "model.onnx", past),
        "torch-export": lambda: program_session(folder / "torch-export" / "model.pt2", past),
    }
    if importlib.util.find_spec("llama_cpp") is not None:
        for weights in ("float32", "bfloat16"):
            forms[f"gguf, {weights}, llama.cpp"] = lambda weights=weights: llama_cpp_session(
                folder / weights / "model.gguf"
            )
    return forms


@torch.no_grad()
def measured(open_form, tokens: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Prefilled and decoded tokens a second, and the logits."""
    best = [0.0, 0.0]
    for _ in range(REPEATS):
        run, pieces = open_form(), []
        parts = (tokens[:, :PREFILLED].split(512, dim=1), tokens[:, PREFILLED:].split(1, dim=1))
        for i, part in enumerate(parts):
            start = time.perf_counter()
            pieces += [run(piece) for piece in part]
            speed = sum(piece.shape[1] for piece in part) / (time.perf_counter() - start)
            best[i] = max(best[i], speed)
    return *best, torch.cat(pieces, 1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("run", type=Path)
    run = arguments.parse_args().run
    model = as_llama(load_run_model(run))
    torch.set_num_threads(1)
    text = "".join(document.text for document in itertools.islice(embedded_documents(), 20))
    tokens = load_run_tokenizer(run).encode(text)[: PREFILLED + DECODED]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for to in ("hf", "ministral", "onnx", "torch-export"):
            export(model, folder / to, to=to, prompt=tokens)
        for weights in ("float32", "bfloat16"):
            export(model, folder / weights, to="gguf", weights=weights, prompt=tokens)
        exact = None
        print("| form | prefill, tokens/s | decode, tokens/s | logits within | same choice |")
        print("|---|---|---|---|---|")
        for form, open_form in openings(model, folder).items():
            prefill, decode, logits = measured(open_form, torch.tensor([tokens]))
            exact = logits if exact is None else exact
            same = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
            difference = (logits - exact).abs().max().item()
            print(f"| {form} | {prefill:,.0f} | {decode:,.0f} | {difference:.1g} | {same:.2%} |")


if __name__ == "__main__":
    main()
