"""A graph of the forms onnx and torch-export, as its README says: a cache goes in and comes out."""

import numpy as np
import protocol


def run(call, empty, job):
    """`call(tokens, mask, past)` gives logits and present; `empty(batch)` the first past."""

    def step(tokens, mask, past):
        logits, present = call(np.asarray(tokens), np.asarray(mask), past)
        return protocol.log_softmax(logits.astype(np.float64)), present

    def continued(logprobs, mask, past):
        new, of_new = [], []
        for _ in range(job["new"]):
            token = logprobs[:, -1].argmax(-1)
            new.append(token)
            of_new.append(np.take_along_axis(logprobs[:, -1], token[:, None], 1)[:, 0])
            mask = np.concatenate([mask, np.ones_like(mask[:, :1])], 1)
            logprobs, past = step(token[:, None], mask, past)
        return np.stack(new, 1).tolist(), np.stack(of_new, 1).tolist()

    read, again = [], []
    for prompt in job["prompts"]:
        past, found, seen = empty(1), [], 0
        for piece in [*protocol.chunks(prompt[:-1]), prompt[-1:]]:
            seen += len(piece)
            prefix = past
            logprobs, past = step([piece], np.ones((1, seen), np.int64), past)
            found.append(logprobs[0])
        rows = np.concatenate(found)[:-1]
        read.append(np.take_along_axis(rows, np.asarray(prompt[1:])[:, None], 1)[:, 0].tolist())
        # The cache is the caller's: that of all but the last token is there again.
        mask = np.ones((1, seen), np.int64)
        logprobs, past = step([prompt[-1:]], mask, prefix)
        again += continued(logprobs, mask, past)[0]
    longest = max(map(len, job["prompts"]))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in job["prompts"]]
    mask = np.asarray([[0] * (longest - len(p)) + [1] * len(p) for p in job["prompts"]])
    logprobs, past = step(padded, mask, empty(len(padded)))
    new, of_new = continued(logprobs, mask, past)
    return {"read": read, "new": new, "new_logprobs": of_new, "again": again}
