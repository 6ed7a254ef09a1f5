"""llama.cpp by its C interface, which alone takes several sequences at a time."""

import ctypes

import llama_cpp as cpp
import numpy as np
import protocol


def main() -> None:
    job = protocol.job()
    cpp.llama_backend_init()
    path = f"{job['folder']}/model.gguf".encode()
    model = cpp.llama_model_load_from_file(path, cpp.llama_model_default_params())
    options = cpp.llama_context_default_params()
    options.n_threads = options.n_threads_batch = 1
    options.n_seq_max = len(job["prompts"])
    # Sequences share what there is.
    longest = max(map(len, job["prompts"])) + job["new"]
    options.n_ctx = (longest // 256 + 1) * 256 * options.n_seq_max
    for name, value in job["options"].items():
        setattr(options, name, value)
    context = cpp.llama_init_from_model(model, options)
    memory = cpp.llama_get_memory(context)
    size = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    batch = cpp.llama_batch_init(protocol.CHUNK, 0, 1)

    def decode(tokens):
        """Log-probabilities after every (sequence, position, token)."""
        batch.n_tokens = len(tokens)
        for index, (sequence, position, token) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = True
        assert cpp.llama_decode(context, batch) == 0
        rows = [cpp.llama_get_logits_ith(context, index) for index in range(len(tokens))]
        logits = np.stack([np.ctypeslib.as_array(row, (size,)) for row in rows]).astype(np.float64)
        return protocol.log_softmax(logits)

    def read(sequence, prompt):
        placed = [(sequence, position, token) for position, token in enumerate(prompt)]
        return np.concatenate([decode(piece) for piece in protocol.chunks(placed)])

    def continued(rows, sequences):
        """Continue sequences, all in one batch, after the last row of each."""
        new, of_new = [[] for _ in rows], [[] for _ in rows]
        ends = [len(job["prompts"][sequence]) for sequence in sequences]
        for step in range(job["new"]):
            tokens = [int(row.argmax()) for row in rows]
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                new[index].append(token)
                of_new[index].append(float(row[token]))
            rows = decode([
                (sequence, end + step, token)
                for sequence, end, token in zip(sequences, ends, tokens, strict=True)
            ])  # fmt: skip
        return new, of_new

    found, last, again = [], [], []
    for sequence, prompt in enumerate(job["prompts"]):
        rows = read(sequence, prompt)
        found.append(np.take_along_axis(rows[:-1], np.array(prompt[1:])[:, None], 1)[:, 0].tolist())
        last.append(rows[-1])
    new, of_new = continued(last, range(len(last)))
    for sequence, prompt in enumerate(job["prompts"]):
        # Keep the prefix, forget the rest.
        assert cpp.llama_memory_seq_rm(memory, sequence, len(prompt) - 1, -1)
        rows = decode([(sequence, len(prompt) - 1, prompt[-1])])
        again += continued(list(rows), [sequence])[0]
    name = ctypes.create_string_buffer(64)
    cpp.llama_model_desc(model, name, 64)
    protocol.answer(
        version=cpp.__version__, dtype=name.value.decode(), ran_as="mistral3",
        read=found, new=new, new_logprobs=of_new, again=again,
    )  # fmt: skip


if __name__ == "__main__":
    main()
