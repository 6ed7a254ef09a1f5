"""One of two ranks under DeepSpeed's Ulysses: its logits, and those of one process."""

import sys
from pathlib import Path

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from ranks_worker import LENGTH, POSITIONS, TOKENS, converted


@torch.no_grad()
def through_ulysses():
    """This rank's part of the logits, beside the whole."""
    deepspeed.comm.init_distributed("gloo")
    model, size = converted(), dist.get_world_size()
    exact = model(input_ids=TOKENS[:1, :LENGTH], use_cache=False).logits
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", size, 1, seq_length=LENGTH)
    mine = torch.arange(LENGTH).chunk(size)[dist.get_rank()]
    inputs = {"input_ids": TOKENS[:1, mine], "position_ids": POSITIONS[:, mine]}
    return model.train()(**inputs, use_cache=False).logits, exact[:, mine]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.save(through_ulysses(), Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
