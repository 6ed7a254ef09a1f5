"""One of two ranks that hold a sequence together in Transformers: its n, or why it is refused."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks
from ranks_worker import TOKENS, converted
from tiny_models import build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import ssmax.hf
from ssmax.errors import UsageError
from ssmax.hf.hook import watched

LENGTH = 8
POSITIONS = torch.arange(LENGTH).view(1, -1)


def in_a_ring(positions, *, has_window=False):
    """n of the first layer under PyTorch's ring, whose kernels need a GPU, or what it says."""
    counts = []
    model = ssmax.hf.convert(build("mistral" if has_window else "llama"), layers="all")
    if not has_window:
        # As Accelerate prepares a model; one with windows it refuses, PyTorch alone does not.
        _attach_context_parallel_hooks(model)
    buffers = [TOKENS[:1, :LENGTH].clone(), positions.clone()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1]),
        watched(lambda module, num_keys, *_: counts.append(num_keys)),
    ):
        try:
            model(input_ids=buffers[0], position_ids=buffers[1], use_cache=False)
        except NotImplementedError:
            return counts[0].flatten().tolist(), buffers[1].flatten().tolist()
        except UsageError as error:
            return str(error)


def through_ulysses():
    """This rank's part of the logits under DeepSpeed's Ulysses, beside the whole."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.comm.init_distributed("gloo")
    model, size = converted(), dist.get_world_size()
    exact = model(input_ids=TOKENS[:1, :LENGTH], use_cache=False).logits
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", size, 1, seq_length=LENGTH)
    mine = torch.arange(LENGTH).chunk(size)[dist.get_rank()]
    inputs = {"input_ids": TOKENS[:1, mine], "position_ids": POSITIONS[:, mine]}
    return model.train()(**inputs, use_cache=False).logits, exact[:, mine]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    with torch.no_grad():
        if sys.argv[2] == "ulysses":
            found = through_ulysses()
        else:
            found = {
                "rising": in_a_ring(POSITIONS),
                "packed": in_a_ring(POSITIONS % 3),
                "window": in_a_ring(POSITIONS, has_window=True),
            }
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
