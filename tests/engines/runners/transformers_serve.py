"""`transformers serve`, asked by the `openai` client for several texts at the same time."""

import concurrent.futures
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import protocol
import transformers


def main() -> None:
    job = protocol.job()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", job["folder"]]
    command += ["--host", "127.0.0.1", "--port", str(port), *job["options"]]
    with subprocess.Popen([str(each) for each in command]) as server:
        try:
            _wait(server, f"http://127.0.0.1:{port}/health")
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

            def complete(text):
                done = client.completions.create(
                    model=job["folder"], prompt=text, max_tokens=job["new"], temperature=0
                )
                return done.choices[0].text

            with concurrent.futures.ThreadPoolExecutor() as pool:
                texts = list(pool.map(complete, job["prompts"]))
        finally:
            server.terminate()
    protocol.answer(version=transformers.__version__, texts=texts)


def _wait(server, address) -> None:
    for _ in range(1200):
        assert server.poll() is None, f"the server ended with {server.returncode}"
        try:
            urllib.request.urlopen(address).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(address)


if __name__ == "__main__":
    main()
