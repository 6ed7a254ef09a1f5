"""Transformers where this package is not installed."""

import copy

import protocol
import torch
import transformers


@torch.no_grad()
def main() -> None:
    job = protocol.job()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"], **job["options"])
    model.eval().generation_config.eos_token_id = None
    read, again = [], []
    for prompt in job["prompts"]:
        cache, found = transformers.DynamicCache(config=model.config), []
        for piece in [*protocol.chunks(prompt[:-1]), prompt[-1:]]:
            # All but the last token of the prompt are the cached prefix of what follows.
            prefix = copy.deepcopy(cache)
            found.append(model(torch.tensor([piece]), past_key_values=cache).logits[0].float())
        logprobs = torch.cat(found)[:-1].log_softmax(-1)
        read.append(logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist())
        tokens = torch.tensor([prompt])
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), past_key_values=prefix,
            max_new_tokens=job["new"], do_sample=False,
        )  # fmt: skip
        again.append(out[0, len(prompt) :].tolist())
    longest = max(map(len, job["prompts"]))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in job["prompts"]]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in job["prompts"]]
    out = model.generate(
        torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=job["new"],
        do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    new = out.sequences[:, longest:]
    logprobs = torch.stack(out.logits, 1).float().log_softmax(-1)
    protocol.answer(
        version=transformers.__version__,
        dtype=str(model.dtype).removeprefix("torch."),
        ran_as=type(model).__name__,
        read=read,
        new=new.tolist(),
        new_logprobs=logprobs.gather(2, new[..., None])[..., 0].tolist(),
        again=again,
    )


if __name__ == "__main__":
    main()
