"""`ssmax serve`: a folder with a model in, an endpoint out."""

import contextlib
import errno
import ipaddress
import json
import socket
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmax._extras import require
from ssmax.cli.export import load_source, read_config
from ssmax.data.tokenizer import FILE, load_tokenizer
from ssmax.errors import UsageError
from ssmax.lm.config import FORMAT
from ssmax.serve.forms import GGUF, ONNX, POSITIONS, PROGRAM
from ssmax.serve.language import Language, plain_language, transformers_language
from ssmax.train.device import check_device, device_of

if TYPE_CHECKING:
    from ssmax.serve.decoders import Decoder

LONGEST_USUAL = 8192
"""Tokens of a prompt, where nobody says and no learnt positions end before."""


def serve_shown(
    folder: Path,
    *,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    max_prompt_tokens: int | None,
    max_new_tokens: int,
    max_batch: int,
    max_waiting: int,
    drain_seconds: int,
    tokenizer: str | None,
    trust_program: bool,
    device: str | None,
) -> None:
    """Load, listen, answer until a signal; then finish what was begun."""
    if api_key == "":
        raise UsageError("the API key is empty; leave it out to ask for none")
    if drain_seconds < 0:
        raise UsageError(f"--drain-seconds must be at least 0, got {drain_seconds}")
    check_device(device)
    uvicorn = require("uvicorn", extra="serve", purpose="ssmax serve")
    require("fastapi", extra="serve", purpose="ssmax serve")
    # Taken before a large model is loaded: a port in use is known at once.
    with _taken(host, port) as listening:
        if not _holds_graph(folder, trust_program=trust_program):
            read_config(folder)
        from ssmax.serve.endpoint import Limits, application
        from ssmax.serve.engine import Engine
        from ssmax.study.hf_measurement import hf_name

        decoder, language, longest = load_served(
            folder, tokenizer, device, trust_program=trust_program
        )
        if longest is not None and longest <= max_new_tokens:
            raise UsageError(
                f"the model has learnt {longest} positions, prompt and answer together; "
                f"give --max-new-tokens below that, got {max_new_tokens}"
            )
        most = LONGEST_USUAL if longest is None else min(LONGEST_USUAL, longest - max_new_tokens)
        limits = Limits(
            max_prompt_tokens=most if max_prompt_tokens is None else max_prompt_tokens,
            max_new_tokens=max_new_tokens,
        )
        if longest is not None and limits.max_prompt_tokens + max_new_tokens > longest:
            raise UsageError(
                f"the model has learnt {longest} positions; --max-prompt-tokens and "
                f"--max-new-tokens ask for {limits.max_prompt_tokens} + {max_new_tokens}"
            )
        engine = Engine(
            decoder,
            language,
            max_batch=max_batch,
            max_waiting=max_waiting,
            report=traceback.print_exception,
        )
        name = name or hf_name(str(folder))
        app = application(engine, name=name, limits=limits, api_key=api_key)
        config = uvicorn.Config(
            app, log_level="warning", ws="none", timeout_graceful_shutdown=drain_seconds
        )
        _say_where(listening, name, has_key=api_key is not None)
        # uvicorn raises the signal again once all is drained.
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


def _taken(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} of {host} is in use; give another --port") from None
        raise UsageError(
            f"nothing can listen on port {port} of {host} ({error.strerror}); give another --host "
            "or --port"
        ) from None


def _say_where(listening: socket.socket, name: str, *, has_key: bool) -> None:
    host, port = listening.getsockname()[:2]
    print(f"{name}: http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
    if not has_key and not ipaddress.ip_address(host).is_loopback:
        print("anyone who reaches this address can use it; --api-key asks for a key", flush=True)


def load_served(
    folder: Path, tokenizer: str | None, device: str | None, *, trust_program: bool = False
) -> "tuple[Decoder, Language, int | None]":
    """What answers, what its tokens mean, and how many positions it has learnt, if they end."""
    here = device_of(device)
    if _holds_graph(folder, trust_program=trust_program):
        from ssmax.serve.decoders import FileDecoder

        return FileDecoder(folder), _language(folder, tokenizer), _positions(folder)
    from ssmax.serve.graphs import graph_of

    values, longest, ends = read_config(folder), None, []
    if "model_type" in values:
        from ssmax.hf.subject import learnt_positions, load_causal

        model = load_causal(folder, dtype="auto")
        longest, given = learnt_positions(model), model.generation_config.eos_token_id
        ends = [given] if isinstance(given, int) else list(given or ())
        size = model.config.get_text_config().vocab_size
    else:
        model = load_source(folder, keeps_dtype=True).model
        size = model.config.vocab_size
    is_run = "model_type" not in values and values.get("format") != FORMAT
    config = model.config if "model_type" in values else None
    language = _language(folder, tokenizer, ends, config=config, is_run=is_run)
    if language.size > size:
        raise UsageError(
            f"the tokenizer has {language.size:,} tokens, the model {size:,}; give the model's own"
        )
    return graph_of(model.to(here).eval()), language, longest


def _holds_graph(folder: Path, *, trust_program: bool) -> bool:
    """True for what --to onnx and --to torch-export write; what cannot be served is refused."""
    if (folder / GGUF).is_file():
        raise UsageError(f"{folder} is llama.cpp's; serve it with llama-server -m {folder / GGUF}")
    is_onnx, is_program = (folder / ONNX).is_file(), (folder / PROGRAM).is_file()
    if is_program and not is_onnx and not trust_program:
        raise UsageError(
            f"{folder} is a program of torch.export, and PyTorch's loader runs what code it finds "
            "in one; give --trust-program if it is yours or you trust who made it"
        )
    return is_onnx or is_program


def _positions(folder: Path) -> int | None:
    """Those that the model of a graph has learnt, where the export found that they end."""
    path = folder / POSITIONS
    return json.loads(path.read_text())["positions"] if path.is_file() else None


def _language(
    folder: Path,
    tokenizer: str | None,
    ends: Any = (),
    *,
    config: Any = None,
    is_run: bool = False,
) -> Language:
    if tokenizer is not None:
        return plain_language(load_tokenizer(tokenizer), ends)
    if is_run:
        from ssmax.train import load_run_tokenizer

        return plain_language(load_run_tokenizer(folder))
    if (folder / "tokenizer_config.json").is_file():
        from ssmax.hf.inputs import own_tokenizer

        return transformers_language(own_tokenizer(folder, config), ends)
    if (folder / FILE).is_file():
        return plain_language(load_tokenizer(str(folder)), ends)
    raise UsageError(
        f"{folder} holds no {FILE}, so that its tokens cannot be read; give --tokenizer, a name "
        "or a path"
    )
