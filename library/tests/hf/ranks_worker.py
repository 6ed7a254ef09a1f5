"""One of two ranks: a converted model's gradients under every way to spread it, into a folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks
from tiny_models import build, randomise, tokens_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

import ssmax.hf
from ssmax.errors import UsageError
from ssmax.hf.hook import watched
from ssmax.nn import SSMaxScale

TOKENS = tokens_of(4, 11)
LENGTH = 8
POSITIONS = torch.arange(LENGTH).view(1, -1)


def converted():
    return randomise(ssmax.hf.convert(build("llama")))


def gradients(model, tokens):
    """Of every parameter by its name, whole."""
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    found = {}
    for name, parameter in getattr(model, "module", model).named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def sharded(model, *, ssmax_first, **options):
    if ssmax_first:
        for module in model.modules():
            if isinstance(module, SSMaxScale):
                fully_shard(module)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def split(model, folder):
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    plan = DistributedConfig(tp_plan="auto", tp_size=2)
    return ssmax.hf.from_pretrained(folder, distributed_config=plan)


def clamped():
    return ssmax.hf.convert(build("llama"), rule="clamp", train_length=4)


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


@torch.no_grad()
def decoded(model):
    """Logits of the last token, read alone behind a cache of the others."""
    cache = model(input_ids=TOKENS[:, :-1], use_cache=True).past_key_values
    return model(input_ids=TOKENS[:, -1:], past_key_values=cache).logits


def tensor_parallel(folder):
    model = split(converted(), folder / "whole")
    found = gradients(model, TOKENS)
    here = model.model.layers[0].self_attn.ssmax.s.to_local()
    assert here.shape == (2,), "s is not split with its heads"
    model.save_pretrained(folder / "again")
    ssmax.hf.save(model, folder / "adapter" / str(dist.get_rank()))
    return found


@torch.no_grad()
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    mine = TOKENS.chunk(2)[dist.get_rank()]
    narrow = torch.bfloat16
    found = {
        "ddp": gradients(DistributedDataParallel(converted()), mine),
        "fsdp2": gradients(sharded(converted(), ssmax_first=False), mine),
        "fsdp2 bfloat16": gradients(sharded(converted().to(narrow), ssmax_first=True), mine),
        "tensor parallel": tensor_parallel(folder),
        "decoded": decoded(split(converted(), folder / "decoded")),
        "fsdp2, no gradients": logits(sharded(converted(), ssmax_first=False)),
        "clamp": logits(split(clamped(), folder / "clamp")),
    }
    try:
        gradients(sharded(converted().to(narrow), ssmax_first=False), mine)
    except AssertionError as error:
        found["fsdp2 bfloat16, one group"] = str(error)
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    rings = {
        "rising": in_a_ring(POSITIONS),
        "packed": in_a_ring(POSITIONS % 3),
        "window": in_a_ring(POSITIONS, has_window=True),
    }
    torch.save(rings, folder / f"ring{dist.get_rank()}.pt")
    dist.destroy_process_group()
