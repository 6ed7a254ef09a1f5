"""Run a GGUF file by llama.cpp, with a cache in float32."""

import rows
from llama_cpp import Llama, __version__


def main() -> None:
    """Run the job."""
    job = rows.read_job()
    tokens = job["tokens"][:-1]
    engine = Llama(
        job["gguf"], n_ctx=len(tokens) + 8, n_batch=rows.CHUNK, logits_all=True, verbose=False,
        type_k=0, type_v=0,
    )  # fmt: skip
    for piece in rows.pieces(tokens):
        engine.eval(piece)
    rows.write(f"llama-cpp-python {__version__}", rows.likeliest(engine.scores[: len(tokens)]))


if __name__ == "__main__":
    main()
