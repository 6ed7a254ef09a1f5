"""`export`: a model written in a form that others run, checked against its source, with a card."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssmax._files import whole_folder
from ssmax.errors import UsageError
from ssmax.hf.subject import learnt_positions
from ssmax.lm import LM
from ssmax.serve import card, checking, gguf_file, graphs, sessions, transformers_forms
from ssmax.serve.folding import Folded, fold, llama_form
from ssmax.serve.forms import GGUF, ONNX, POSITIONS, PROGRAM, check_choice
from ssmax.serve.vocabulary import end_of, gguf_vocabulary

DRAWN = 1024
"""Tokens of the check where there is no prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written, and how well it agrees with its source."""

    folder: Path
    to: str
    weights: str
    how: str
    """What became of s and b."""
    agreement: checking.Agreement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    how: str
    opened: Callable[[], sessions.Session]
    """The form as it stands on disk, ready to run."""
    is_exact: bool = True


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    to: str,
    weights: str = "float32",
    fit: bool = False,
    prompt: Sequence[int] | None = None,
    tokenizer: str | None = None,
    progress: checking.Progress | None = None,
) -> Exported:
    """Write a native or converted model as `to`, one of FORMS, into a new folder.

    What was written is loaded again and compared with the source on the tokens of `prompt`, in
    chunks and then token by token, as many as it has learnt positions for; tokens are drawn where
    there are none. Nothing is left behind where it disagrees. `weights` are those of GGUF: float32,
    bfloat16 or q8_0. `fit` gives up the heads' biases for the nearest form without. `tokenizer` is
    the content of a tokenizer.json, which also tells a native model's last token.
    """
    # Whole, also where it is "." or a link.
    folder = Path(folder).resolve()
    check_choice(folder, to, weights, fit)
    graphs.check_causal(model)
    was_training = model.training
    model.eval()
    try:
        tokens = _tokens(model, prompt)
        with whole_folder(folder) as partial:
            written = _write(model, partial, to, weights, fit, tokens.shape[1], tokenizer)
            agreement = checking.compare(
                sessions.session(model), written.opened(), tokens, progress
            )
            if written.is_exact:
                agreement.check(next(model.parameters()).dtype)
            if tokenizer is not None:
                (partial / "tokenizer.json").write_bytes(tokenizer.encode())
                if isinstance(model, LM) and to in ("hf", "ministral"):
                    transformers_forms.write_tokenizer_config(partial, end_of(tokenizer))
            done = Exported(
                folder=folder, to=to, weights=weights, how=written.how, agreement=agreement
            )
            (partial / "README.md").write_text(card.text(done))
    finally:
        model.train(was_training)
    return done


def _write(
    model: nn.Module,
    folder: Path,
    to: str,
    weights: str,
    fit: bool,
    checked: int,
    tokenizer: str | None,
) -> _Written:
    found = None if tokenizer is None else end_of(tokenizer)
    end = None if found is None else found.token
    if to == "hf":
        transformers_forms.write_converted(model, folder, end=end)
        return _Written(how="kept as parameters", opened=lambda: _open_converted(folder))
    if to in ("onnx", "torch-export"):
        graph = graphs.graph_of(model)
        if (longest := learnt_positions(model)) is not None:
            (folder / POSITIONS).write_text(json.dumps({"positions": longest}))
        if to == "onnx":
            graphs.write_onnx(graph, folder / ONNX)
            path, opened = folder / ONNX, sessions.onnx_session
        else:
            graphs.write_program(graph, folder / PROGRAM)
            path, opened = folder / PROGRAM, sessions.program_session
        return _Written(
            how="kept in the graph; n is counted from attention_mask",
            opened=lambda: opened(path, graph.empty_past()),
        )
    form = llama_form(model, end=end)
    folded = fold(form, fit=fit)
    # What was looked at is what is promised.
    context = max(form.train_length, form.config["max_position_embeddings"], checked)
    how = f"folded into W_q: {folded.how} (beta = {folded.beta:g})"
    if to == "ministral":
        transformers_forms.write_ministral(folded, folder, context=context)
        return _Written(how=how, opened=lambda: _open_ministral(folder), is_exact=folded.is_exact)
    path = folder / GGUF
    size = form.config["vocab_size"]
    vocabulary = None if tokenizer is None else gguf_vocabulary(tokenizer, size)
    gguf_file.write_gguf(folded, path, weights=weights, context=context, vocabulary=vocabulary)
    return _Written(
        how=how,
        opened=lambda: _open_gguf(path, folded, context),
        is_exact=folded.is_exact and weights == "float32",
    )


def _open_converted(folder: Path) -> sessions.Session:
    from ssmax.hf import from_pretrained

    return sessions.session(from_pretrained(folder, dtype="auto").eval())


def _open_ministral(folder: Path) -> sessions.Session:
    from transformers import AutoModelForCausalLM

    return sessions.session(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval())


def _open_gguf(path: Path, folded: Folded, context: int) -> sessions.Session:
    """The weights as they were stored, in the architecture that llama.cpp calls mistral3."""
    weights = gguf_file.read_weights(path, folded.config)
    stored = dataclasses.replace(folded, weights=weights)
    return sessions.session(transformers_forms.as_ministral(stored, context=context))


def _tokens(model: Any, prompt: Sequence[int] | None) -> Tensor:
    size, longest = model.config.vocab_size, learnt_positions(model)
    if prompt is None:
        length = DRAWN if longest is None else min(DRAWN, longest)
        return torch.randint(size, (1, length), generator=torch.Generator().manual_seed(0))
    tokens = torch.as_tensor(prompt, dtype=torch.int64)
    if tokens.dim() != 1 or tokens.numel() < 2:
        raise UsageError(f"prompt must be a list of at least 2 tokens, got {tuple(tokens.shape)}")
    if not (int(tokens.min()) >= 0 and int(tokens.max()) < size):
        raise UsageError(
            f"tokens must lie in 0..{size - 1}, the prompt holds "
            f"{int(tokens.min())}..{int(tokens.max())}. Is it another tokenizer's?"
        )
    return tokens[:longest].unsqueeze(0)
