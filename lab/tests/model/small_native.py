"""A native model, small enough to be written in seconds and sharp enough for s to matter."""

import torch

from ssmax_lab.model import LM, LMConfig

SMALL = {
    "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "intermediate_size": 96,
    "vocab_size": 99, "train_length": 64, "rule": "ssmax",
}  # fmt: skip


def native(**changes) -> LM:
    torch.manual_seed(0)
    model = LM(LMConfig(**{**SMALL, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.weight"):
                parameter.mul_(30)
            if name.endswith("ssmax.s"):
                parameter.copy_(0.2 + torch.rand(parameter.shape))
            if name.endswith("ssmax.bias"):
                parameter.copy_(0.5 * torch.rand(parameter.shape))
        # Choices that rounding does not change.
        model.head.weight.mul_(40)
    return model
