"""vLLM by `vllm.LLM`, which is what `vllm serve` starts."""

import os

import protocol

# Before vLLM is imported. One process, so that an error is this one's; no more memory than needed.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams, __version__


# Functions of this file, which the process of a rank can find.
def kind(model):
    return type(model).__name__


def learned(model):
    """What a rank holds of every s and b."""
    parameters = model.named_parameters()
    return {name: value.tolist() for name, value in parameters if ".ssmax." in name}


def main() -> None:
    job = protocol.job()
    engine = LLM(model=job["folder"], **job["options"])
    greedy = {"temperature": 0.0, "max_tokens": job["new"], "ignore_eos": True, "logprobs": 0}
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    # Reading log-probabilities of a prompt bypasses the cache of prefixes, so the second call asks
    # for none.
    read = engine.generate(prompts, SamplingParams(**greedy, prompt_logprobs=0), use_tqdm=False)
    again = engine.generate(prompts, SamplingParams(**greedy), use_tqdm=False)
    config = engine.llm_engine.vllm_config
    # Prompts are cut where they do not fit into one step; all of this is vLLM's default.
    assert config.scheduler_config.enable_chunked_prefill
    assert config.cache_config.enable_prefix_caching
    most = config.scheduler_config.max_num_batched_tokens
    assert most < sum(map(len, job["prompts"])) or not job.get("is_cut", True)
    assert again[0].num_cached_tokens > len(job["prompts"][0]) // 2
    protocol.answer(
        version=__version__,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        ran_as=engine.apply_model(kind)[0],
        read=[
            [
                each[token].logprob
                for each, token in zip(one.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
            for one, prompt in zip(read, job["prompts"], strict=True)
        ],
        new=[list(one.outputs[0].token_ids) for one in read],
        new_logprobs=[
            [each[token].logprob for each, token in zip(out.logprobs, out.token_ids, strict=True)]
            for out in (one.outputs[0] for one in read)
        ],
        heads=engine.apply_model(learned),
        again=[list(one.outputs[0].token_ids) for one in again],
    )


if __name__ == "__main__":
    main()
