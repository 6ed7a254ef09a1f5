"""Cut a text into tokens as llama.cpp does, and join them again."""

import protocol
from llama_cpp import Llama, __version__


def main() -> None:
    job = protocol.job()
    engine = Llama(f"{job['folder']}/model.gguf", vocab_only=True, verbose=False)
    tokens = engine.tokenize(job["text"].encode(), add_bos=False, special=False)
    text = engine.detokenize(tokens).decode()
    protocol.answer(version=__version__, tokens=tokens, text=text)


if __name__ == "__main__":
    main()
