"""mlx-lm, on Linux on the CPU."""

import mlx.core as mx
import mlx_lm
import protocol
from mlx.utils import tree_flatten
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache


def main() -> None:
    job = protocol.job()
    model, tokenizer = mlx_lm.load(job["folder"])
    read, again = [], []
    for prompt in job["prompts"]:
        cache, found = make_prompt_cache(model), []
        for piece in protocol.chunks(prompt):
            found.append(model(mx.array([piece]), cache=cache)[0].astype(mx.float32))
        logits = mx.concatenate(found)[:-1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        read.append(mx.take_along_axis(logprobs, mx.array(prompt[1:])[:, None], 1)[:, 0].tolist())
        trim_prompt_cache(cache, 1)
        steps = generate_step(
            mx.array(prompt[-1:]), model, max_tokens=job["new"], prompt_cache=cache
        )
        again.append([int(token) for token, _ in steps])
    tokenizer.eos_token_ids = set()
    # It normalises logits in their own dtype, which would round what it reports once more.
    out = batch_generate(
        model, tokenizer, job["prompts"], max_tokens=job["new"], return_token_ids=True,
        return_logprobs=True, logits_processors=[lambda _, logits: logits.astype(mx.float32)],
    )  # fmt: skip
    kinds = {str(each.dtype) for _, each in tree_flatten(model.parameters())}
    protocol.answer(
        version=mlx_lm.__version__,
        dtype=kinds.pop().removeprefix("mlx.core."),
        ran_as=type(model).__module__,
        read=read,
        new=[list(map(int, tokens)) for tokens in out.token_ids],
        new_logprobs=[list(map(float, each)) for each in out.logprobs],
        again=again,
    )


if __name__ == "__main__":
    main()
