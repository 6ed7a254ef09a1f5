"""`ssmax serve`: an OpenAI-compatible server of somebody else's on a converted model."""

import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ssmax._engines import ENGINES, Engine, parse, python_of
from ssmax._files import ending_by_exception
from ssmax.errors import MachineError, UsageError

_logger = logging.getLogger(__name__)
HOST = "127.0.0.1"
SECONDS_TO_STOP = 10.0
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "tekken.json")
"""Files that tokenizers are made of."""
SERVERS: dict[str, Engine] = {
    "vllm": ENGINES["vllm"],
    "transformers": replace(
        ENGINES["transformers"],
        modules=("transformers", "fastapi", "uvicorn", "openai"),
        install="pip install 'transformers[serving]'",
    ),
}
"""The best first."""


def serve(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Folder of a converted or exported model."),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="FLAG", help="Options passed on to the engine, after --."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="vllm or transformers; vllm=PYTHON takes that of another environment. By "
            "default the first that is installed."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65_535, help=f"Port on {HOST}.")] = 8000,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; by default the engine's choice.")
    ] = "auto",
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SSMAX_API_KEY", help="Key that clients must send; vllm only."),
    ] = None,
) -> int:
    """Serve a model with vLLM or `transformers serve` until Ctrl-C."""
    from ssmax.export.forms import check_exportable

    check_exportable(model)
    _check_tokenizer(model, options or ())
    name, python = _choose(engine, api_key)
    _check_port(port)
    # Its name is what clients ask for, and transformers serve splits names at "@" and ":".
    if name == "transformers" and not re.fullmatch(r"[\w.-]+", model.resolve().name):
        raise UsageError(f"{model} must have a name of letters, digits, . _ and -; rename it")
    with ending_by_exception(), tempfile.TemporaryDirectory(prefix="ssmax-serve-") as scratch:
        try:
            folder, needs_code = _servable(model.resolve(), Path(scratch))
            flags = ["--host", HOST, "--port", str(port), "--dtype", dtype]
            flags += ["--trust-remote-code"] if needs_code else []
            command = [python, "-m", *_program(name, folder), *flags, *(options or ())]
            address = f"http://{HOST}:{port}"
            with _started(command, folder, api_key) as process:
                _wait_until_it_answers(name, address, process)
                print(_told(name, address, folder, api_key), flush=True)
                code = process.wait()
        except KeyboardInterrupt:
            # The way to end it.
            print("stopped", flush=True)
            return 0
    raise MachineError(f"{name} ended by itself with exit code {code}; its last lines say why")


def _choose(wanted: str | None, key: str | None) -> tuple[str, str]:
    """Choose an engine and its Python."""
    given: str | None = None
    names = list(SERVERS)
    if wanted is not None:
        name, given = parse(wanted, names)
        names = [name]
    for name in names:
        python = given or python_of(SERVERS[name])
        if python is None:
            continue
        if key is not None and name == "transformers":
            raise UsageError(
                "transformers serve knows no key: anybody on this machine may ask it; give none, "
                f"or install vLLM: {SERVERS['vllm'].install}"
            )
        return name, python
    ways = ", or ".join(f"{SERVERS[name].install}" for name in names)
    raise UsageError(f"no engine is installed that could serve: {ways}")


def _check_tokenizer(model: Path, options: Sequence[str]) -> None:
    """Raise where an engine could read no prompt: it would fail after minutes, or at the first."""
    has_one = any(True for pattern in TOKENIZERS for _ in model.glob(pattern))
    if not has_one and not any("tokenizer" in option for option in options):
        raise UsageError(
            f"{model} holds no tokenizer, so that no engine could read a prompt; save the one of "
            f"its base there: AutoTokenizer.from_pretrained(BASE).save_pretrained({str(model)!r})"
        )


def _check_port(port: int) -> None:
    with socket.socket() as free:
        # As servers do: one that has just ended holds its port for a minute otherwise.
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((HOST, port))
        except OSError as error:
            raise UsageError(f"port {port} cannot be used: {error.strerror}; give --port") from None


def _servable(model: Path, scratch: Path) -> tuple[Path, bool]:
    """Find or write a form that engines read; say whether it brings code."""
    from ssmax.hf.remote_code import is_our_code
    from ssmax.hf.written_config import KEY, MODULE

    if KEY not in json.loads((model / "config.json").read_text()):
        return model, False
    if (model / f"{MODULE}.py").is_file() and is_our_code(model):
        return model, True
    from ssmax.export import export

    folder = scratch / model.name
    try:
        done = export(model, folder, to="ministral")
    except UsageError as refused:
        _logger.info(f"not as ministral: {refused}")
        done = export(model, folder, to="hf")
    _logger.info(
        f"exported for this time: s and b {done.how}. To keep it: "
        f"ssmax export {shlex.quote(str(model))} OUT --to {done.to}, then ssmax serve OUT"
    )
    return folder, done.to == "hf"


def _program(engine: str, folder: Path) -> list[str]:
    """Name an engine's module and the model that it is to serve."""
    if engine == "transformers":
        return ["transformers.cli.transformers", "serve", folder.name]
    # The command `vllm serve` asks for the metadata of a package called vllm, which builds of
    # others do not have; its module is the same server.
    module = "vllm.entrypoints.openai.api_server"
    return [module, "--model", str(folder), "--served-model-name", folder.name]


@contextmanager
def _started(
    command: list[str], folder: Path, key: str | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the engine in a process group of its own, which Ctrl-C reaches through us alone."""
    _logger.info(shlex.join(command))
    # It is started where the folder is, whose other files must not be taken for packages.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if key is not None:
        # Not as an option: others can read command lines.
        environment["VLLM_API_KEY"] = key
    process = subprocess.Popen(
        command, stdout=2, env=environment, cwd=folder.parent, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_STOP)
        finally:
            # Its workers too, and itself where somebody still reads its answers.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_it_answers(engine: str, address: str, process: "subprocess.Popen[bytes]") -> None:
    # No proxy stands between this machine and itself.
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    while process.poll() is None:
        with suppress(OSError), ask(f"{address}/health", timeout=5.0):
            return
        time.sleep(0.2)
    raise MachineError(
        f"{engine} ended with exit code {process.returncode} before it answered; its last lines "
        "say why"
    )


def _told(engine: str, address: str, folder: Path, key: str | None) -> str:
    body = {"model": folder.name, "prompt": "Once upon a time", "max_tokens": 20}
    header = "" if key is None else ' -H "Authorization: Bearer $SSMAX_API_KEY"'
    return (
        f"{engine} serves {folder.name} at {address}/v1; Ctrl-C ends it\n"
        f"curl {address}/v1/completions -H 'Content-Type: application/json'{header} "
        f"-d {shlex.quote(json.dumps(body))}"
    )
