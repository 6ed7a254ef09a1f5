"""Run a model by Transformers as it comes."""

import rows
import torch
import transformers


@torch.no_grad()
def main() -> None:
    """Run the job."""
    job = rows.read_job()
    config = transformers.AutoConfig.from_pretrained(
        job["folder"], trust_remote_code=job["is_our_code"]
    )
    names = config.architectures or [""]
    kind = getattr(transformers, names[0], None) or transformers.AutoModelForCausalLM
    model = kind.from_pretrained(
        job["folder"], dtype=torch.float32, trust_remote_code=job["is_our_code"]
    ).eval()
    past, found = None, []
    for piece in rows.pieces(job["tokens"][:-1]):
        out = model(input_ids=torch.tensor([piece]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        found += rows.likeliest(out.logits[0])
    rows.write(transformers.__version__, found)


if __name__ == "__main__":
    main()
