"""Run a model by vLLM."""

import os

# Before vLLM is imported. One process, so that an error is this one's.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import rows
from vllm import LLM, SamplingParams, __version__


def main() -> None:
    """Run the job."""
    job = rows.read_job()
    engine = LLM(
        model=job["folder"], dtype="float32", max_model_len=job["max_length"],
        trust_remote_code=job["is_our_code"], skip_tokenizer_init=True, enforce_eager=True,
    )  # fmt: skip
    one = SamplingParams(
        temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=rows.LIKELIEST
    )
    prompt = {"prompt_token_ids": job["tokens"]}
    (out,) = engine.generate([prompt], one, use_tqdm=False)
    found = [
        {token: each.logprob for token, each in row.items()} for row in out.prompt_logprobs[1:]
    ]
    rows.write(__version__, found)


if __name__ == "__main__":
    main()
