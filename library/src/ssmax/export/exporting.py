"""`export`: write a model in a form that others run, check it against its source, add a card."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssmax._files import whole_folder
from ssmax.errors import UsageError
from ssmax.export import card, checking, gguf_file, graphs, sessions
from ssmax.export.folding import fold, llama_form
from ssmax.export.forms import (
    GGUF,
    ONNX,
    PROGRAM,
    TOKENIZER,
    check_choice,
    check_exportable,
)
from ssmax.export.ministral import as_ministral
from ssmax.export.vocabulary import gguf_vocabulary
from ssmax.hf.conversion import must_be_converted
from ssmax.hf.full_checkpoint import from_pretrained
from ssmax.hf.inputs import copy_inputs
from ssmax.hf.layers import learned_positions
from ssmax.hf.remote_code import save_remote_code
from ssmax.hf.sources import MODEL_CONFIG


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
    model: nn.Module | str | Path,
    folder: str | Path,
    *,
    to: str,
    weights: str = "float32",
    fit: bool = False,
    prompt: Sequence[int] | int = 1024,
    tokenizer: str | None = None,
    progress: checking.Progress | None = None,
) -> Exported:
    """Write a converted model, or the one in a folder, as `to`, one of FORMS, into a new folder.

    What was written is loaded again and compared with the source on the tokens of `prompt`, or on
    so many that are drawn, in chunks and then token by token, as many as it has learned positions
    for. Nothing is left behind where it disagrees. `weights` are those of GGUF: float32,
    bfloat16 or q8_0. `fit` gives up the heads' biases for the nearest form without. `tokenizer` is
    the content of a tokenizer.json; a folder has its own.
    """
    # Whole, also where it is "." or a link.
    folder = Path(folder).resolve()
    check_choice(folder, to, weights, fit)
    source = None if isinstance(model, nn.Module) else Path(model)
    network: Any = model
    if source is not None:
        check_exportable(source)
        # Graphs and GGUF's folding are made in float32; the others keep the dtype.
        keeps_dtype = to in ("hf", "ministral")
        network = from_pretrained(source, dtype="auto" if keeps_dtype else torch.float32)
        path = source / TOKENIZER
        tokenizer = path.read_bytes().decode() if path.is_file() else None
    graphs.check_causal(network)
    was_training = network.training
    network.eval()
    try:
        tokens = _tokens(network, prompt)
        with whole_folder(folder) as partial:
            written = _write(network, partial, to, weights, fit, tokens.shape[1], tokenizer)
            agreement = checking.compare(
                sessions.session(network), written.opened(), tokens, progress
            )
            if written.is_exact:
                agreement.check(next(network.parameters()).dtype)
            if source is not None and to in ("hf", "ministral"):
                copy_inputs(source, partial, network.config)
            elif tokenizer is not None:
                (partial / TOKENIZER).write_bytes(tokenizer.encode())
            done = Exported(
                folder=folder, to=to, weights=weights, how=written.how, agreement=agreement
            )
            (partial / "README.md").write_text(card.text(done))
    finally:
        network.train(was_training)
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
    if to == "hf":
        save_remote_code(model, folder)
        values = json.loads((folder / MODEL_CONFIG).read_text())
        if (context := _context(model, checked)) != values.get("max_position_embeddings", context):
            values["max_position_embeddings"] = context
            (folder / MODEL_CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        return _Written(
            how="kept as parameters",
            opened=lambda: sessions.session(from_pretrained(folder, dtype="auto").eval()),
        )
    if to in ("onnx", "torch-export"):
        graph = graphs.graph_of(model)
        write, name, opened = {
            "onnx": (graphs.write_onnx, ONNX, sessions.onnx_session),
            "torch-export": (graphs.write_program, PROGRAM, sessions.program_session),
        }[to]
        path = folder / name
        write(graph, path)
        return _Written(
            how="kept in the graph; n is counted from attention_mask",
            opened=lambda: opened(path, graph.empty_past()),
        )
    form = llama_form(model)
    folded = fold(form, fit=fit)
    context = _context(model, checked)
    how = f"folded into W_q: {folded.how} (beta = {folded.beta:g})"
    if to == "ministral":
        stock = as_ministral(folded, context=context)
        stock.save_pretrained(folder)
        return _Written(
            how=how,
            opened=lambda: sessions.session(
                type(stock).from_pretrained(folder, dtype="auto").eval()
            ),
            is_exact=folded.is_exact,
        )
    path = folder / GGUF
    vocabulary = gguf_vocabulary(tokenizer, form.config) if tokenizer is not None else None
    gguf_file.write_gguf(folded, path, weights=weights, context=context, vocabulary=vocabulary)

    def open_stored() -> sessions.Session:
        """Load the weights as they were stored into the architecture that llama.cpp runs."""
        stored = gguf_file.read_weights(path, folded.config)
        stored = dataclasses.replace(folded, weights=stored)
        return sessions.session(as_ministral(stored, context=context))

    return _Written(
        how=how,
        opened=open_stored,
        is_exact=folded.is_exact and weights == "float32",
    )


def _context(model: Any, checked: int) -> int:
    """Find how many tokens engines may read: they refuse more than the config says.

    A config whose limit is the training length says nothing of what SSMax reaches: there as many
    are promised as were checked. Any other limit stands.
    """
    config, trained = model.config.get_text_config(), must_be_converted(model).train_length
    limit = getattr(config, "max_position_embeddings", checked)
    # Other rotations compute their angles from that number.
    is_free = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "default"
    return max(limit, checked) if is_free and limit == trained else limit


def _tokens(model: Any, prompt: Sequence[int] | int) -> Tensor:
    size, longest = model.config.get_text_config().vocab_size, learned_positions(model)
    if isinstance(prompt, int):
        drawn = torch.randint(size, (prompt,), generator=torch.Generator().manual_seed(0))
        return drawn[:longest].unsqueeze(0)
    tokens = torch.as_tensor(prompt, dtype=torch.int64)
    if tokens.dim() != 1 or tokens.numel() < 2:
        raise UsageError(f"prompt must be a list of at least 2 tokens, got {tuple(tokens.shape)}")
    if not (int(tokens.min()) >= 0 and int(tokens.max()) < size):
        raise UsageError(
            f"tokens must lie in 0..{size - 1}, the prompt holds "
            f"{int(tokens.min())}..{int(tokens.max())}. Is it another tokenizer's?"
        )
    return tokens[:longest].unsqueeze(0)
